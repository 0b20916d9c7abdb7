"""Patches that the prompt sees too, against TransformerBridge's hooks and against one pass under attention of the
test's own."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.faults import Scope, Zeros
from kvprobe.inference.model import Model, load
from kvprobe.models.lens import HOOKS
from kvprobe.patching import LogitDiff, LogProb, patch_sweep
from kvprobe.patching.grid import ACTIVATIONS
from tests.models import N_LAYERS, WINDOW, llama, tiny_tokenizer
from tests.patching.oracle import Run, hooked_pass, patched_pass, swaps_of, twins
from tests.patching.pairs import SPANS, TOLERANCE, WEIGHTS, near, swept, two, weighed
from tests.patching.test_reader import logits_of, seeds
from tests.refusals import refused

KEYS_AND_VALUES = ("K", "V", "KV")
spans = st.fixed_dictionaries({name: st.integers(1, 5) for name in ("system", "T1", "T2")})
few = settings(max_examples=5)


def some_grid(base: Run, rng: random.Random, heads: bool) -> dict[str, Any]:
    axes: list[list[tuple[str, Any]]] = [
        [("layer", None), ("layer", [2, 0]), ("band", [range(2), [2, 0], range(3)])],
        [("slot", None), ("slot", rng.sample(range(base.cache.slots), 2)), ("segment", None), ("segment", ["T1"])],
        *([[("head", None), ("head", [base.row.kv_heads - 1])]] if heads else []),
    ]
    return dict(rng.choice(axis) for axis in rng.sample(axes, rng.randint(1, len(axes))))


def parts_of(model: Model) -> list[str]:
    """The activations that TransformerBridge shows of this model."""
    return [part for part in ACTIVATIONS if f"blocks.0.{HOOKS[part]}" in model.lanes.hooked.bridge.hook_dict]


@given(spans=spans, seed=seeds, count=st.integers(1, 8))
@few
def test_patched_keys_and_values_are_read_by_the_prompt_too(tiny: Model, spans: dict[str, int], seed: int, count: int):
    rng = random.Random(seed)
    base, donor = two(tiny, spans)
    gap = rng.choice([0, 2])
    suffix = base.suffix(seed, count, gap=gap)
    parts = rng.sample(KEYS_AND_VALUES, rng.randint(1, 3))
    patched = swept(base, donor, suffix, over=some_grid(base, rng, heads=True), parts=parts, reads="total")
    swaps = swaps_of(patched, base)
    logits = patched_pass(tiny, base, donor, suffix, swaps, reads="total")
    assert near(patched.values, logits[:, -1] @ WEIGHTS)
    # TransformerBridge counts a window in tokens, not in positions.
    if tiny.lanes.hooked.fires("k") and not gap:
        assert near(patched.values, hooked_pass(tiny, base, donor, suffix, swaps)[:, -1] @ WEIGHTS)


@given(spans=spans, seed=seeds, count=st.integers(1, 8))
@few
def test_patched_activations_affect_all_later_tokens(tiny: Model, spans: dict[str, int], seed: int, count: int):
    rng = random.Random(seed)
    base, donor = two(tiny, spans)
    suffix = base.suffix(seed, count)
    known = parts_of(tiny)
    parts = rng.sample(known, rng.randint(1, len(known)))
    patched = swept(base, donor, suffix, over=some_grid(base, rng, heads=False), parts=parts, reads="total")
    logits = hooked_pass(tiny, base, donor, suffix, swaps_of(patched, base))
    assert near(patched.values, logits[:, -1] @ WEIGHTS)


def test_single_cells_of_every_part_have_effects_of_their_own(tiny: Model):
    base, donor = two(tiny)
    suffix = base.suffix(0, 3)
    known = parts_of(tiny)
    patched = swept(base, donor, suffix, over=("layer", "slot"), parts=(*known, "V"), reads="total")
    logits = hooked_pass(tiny, base, donor, suffix, swaps_of(patched, base))
    assert near(patched.values, logits[:, -1] @ WEIGHTS)
    for part in known:
        for layer in range(N_LAYERS - 1):
            chosen = [cell.part == part and cell.layers == (layer,) for cell in patched.cells]
            effects = torch.as_tensor(patched.effect)[torch.tensor(chosen)].abs()
            assert float((effects > 1e-4).float().mean()) > 0.6, (part, layer)


def test_keys_and_values_of_the_last_layer_are_read_by_the_suffix_alone(tiny: Model):
    base, donor = two(tiny)
    over = {"layer": [0, N_LAYERS - 1], "slot": None, "head": None}
    total, reader = (
        swept(base, donor, base.suffix(0, 3), over=over, parts=KEYS_AND_VALUES, reads=reads)
        for reads in ("total", "reader")
    )
    assert total.cells == reader.cells
    last = [number for number, cell in enumerate(total.cells) if cell.layers == (N_LAYERS - 1,)]
    assert near(total.values[last], reader.values[last])
    first = [number for number, cell in enumerate(total.cells) if cell.layers == (0,)]
    assert not near(total.values[first], reader.values[first])
    assert near([total.base, total.donor], [reader.base, reader.donor])


def test_patching_the_residual_stream_of_all_slots_gives_the_donor(tiny: Model):
    base, donor = two(tiny)
    settings: dict[str, Any] = {"parts": ("resid_pre", "KV"), "reads": "total"}
    for layer in range(N_LAYERS - 1):
        patched = swept(base, donor, base.suffix(0, 3), over={"band": [range(layer + 1)]}, **settings)
        # With the donor's residual stream at the bottom, all layers are the donor's; K and V are not all of it.
        assert near(patched.values[0], patched.donor)
        assert not near(patched.values[1], patched.donor)
    whole = swept(base, donor, base.suffix(0, 3), over={"band": [range(N_LAYERS)]}, **settings)
    assert near(whole.values, [whole.donor] * 2)
    # A share of the way: round-off counts for more where the way is short.
    assert abs(whole.normalised - 1).max() < 2 * TOLERANCE / abs(whole.donor - whole.base)


def test_a_donor_that_equals_the_base_has_no_effect(tiny_llama: Model):
    base, _ = two(tiny_llama)
    parts = (*KEYS_AND_VALUES, *parts_of(tiny_llama))
    patched = swept(base, base, base.suffix(0, 3), over=("layer", "segment"), parts=parts, reads="total")
    assert near(patched.effect, torch.zeros(len(patched.cells)))


def test_a_slot_beyond_the_window_acts_through_the_tokens_between(tiny_gemma: Model):
    base, donor = two(tiny_gemma, {"T1": 14})
    suffix = base.suffix(0, 2)
    over = {"slot": [1], "layer": None}
    total, reader = (swept(base, donor, suffix, over=over, parts=("V",), reads=reads) for reads in ("total", "reader"))
    assert base.cache.slots - WINDOW > 1
    assert near(reader.effect[:2], [0, 0])
    assert (abs(total.effect) > 1e-4).all()
    logits = hooked_pass(tiny_gemma, base, donor, suffix, swaps_of(total, base))
    assert near(total.values, logits[:, -1] @ WEIGHTS)


@pytest.mark.parametrize("align", ["start", "end"])
def test_segments_of_unequal_length_meet_at_start_or_end(tiny: Model, align: str):
    base = Run(tiny, 1).read({"system": 4, "T1": 3, "T2": 5})
    donor = Run(tiny, 2).read({"system": 3, "T1": 6, "T2": 5})
    pairs = twins(base, donor, from_end=align == "end")
    suffix = base.suffix(0, 3)
    settings: dict[str, Any] = {"over": {"slot": sorted(pairs), "layer": None}, "align": align, "reads": "total"}
    if not base.rotates:
        refused(lambda: swept(base, donor, suffix, parts=parts_of(tiny), **settings), "learned positions")
        return
    activations = swept(base, donor, suffix, parts=parts_of(tiny), **settings)
    logits = hooked_pass(tiny, base, donor, suffix, swaps_of(activations, base), pairs)
    assert near(activations.values, logits[:, -1] @ WEIGHTS)
    keys = swept(base, donor, suffix, parts=KEYS_AND_VALUES, **settings)
    logits = patched_pass(tiny, base, donor, suffix, swaps_of(keys, base), pairs, "total")
    assert near(keys.values, logits[:, -1] @ WEIGHTS)


def test_several_last_tokens_can_be_measured(tiny_llama: Model):
    base, donor = two(tiny_llama)
    suffix = base.suffix(0, 4)
    answer = (*suffix.ids[-2:], 4)
    patched = swept(base, donor, suffix, LogProb(answer), over=("slot",), parts=("V", "resid_pre"), reads="total")
    said = hooked_pass(tiny_llama, base, donor, suffix, swaps_of(patched, base)).log_softmax(-1)
    assert near(patched.values, sum(said[:, 1 + place, token] for place, token in enumerate(answer)))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_row_does_not_depend_on_other_rows(tiny_gemma: Model, rows: int):
    base, donor = two(tiny_gemma)
    sweeps = [
        swept(base, donor, base.suffix(0, 3), over=("slot", "layer"), parts=("V", "resid_pre"), reads="total", **how)
        for how in ({}, {"rows": rows})
    ]
    assert sweeps[0].cells == sweeps[1].cells
    assert near(sweeps[0].values, sweeps[1].values)


def test_a_prompt_read_in_parts_with_gaps_between_positions_is_read_again_at_them(tiny: Model):
    base, donor = two(tiny)
    for side in (base, donor):
        side.read({"T3": 3}, gap=4)
    suffix = base.suffix(0, 3)
    patched = swept(base, donor, suffix, over=("segment", "layer"), parts=KEYS_AND_VALUES, reads="total")
    logits = patched_pass(tiny, base, donor, suffix, swaps_of(patched, base), reads="total")
    assert near(patched.values, logits[:, -1] @ WEIGHTS)


def test_padding_is_not_read_again(tiny: Model):
    base = Run(tiny, 1).read({"system": 3}, padding=2).read({"T1": 4}, padding=1)
    donor = Run(tiny, 2).read({"system": 3}).read({"T1": 4})
    suffix = base.suffix(0, 3)
    parts = ("K", "V")
    patched = swept(base, donor, suffix, over=("slot", "layer"), parts=parts, reads="total")
    logits = patched_pass(tiny, base, donor, suffix, swaps_of(patched, base), reads="total")
    assert near(patched.values, logits[:, -1] @ WEIGHTS)
    activations = swept(base, donor, suffix, over=("slot", "layer"), parts=parts_of(tiny), reads="total")
    logits = hooked_pass(tiny, base, donor, suffix, swaps_of(activations, base))
    assert near(activations.values, logits[:, -1] @ WEIGHTS)


# ---- refusals

UNREADABLE: dict[str, Any] = {
    "masked": lambda base: base.mask([2]),
    "masked in a layer": lambda base: base.mask([2], layers=[1]),
    "masked in a head": lambda base: base.mask([2], heads=[0]),
    "masked at its end": lambda base: base.mask([12]),
    "evicted": lambda base: base.evict([2, 3]),
    "evicted and re-indexed": lambda base: base.evict([2, 3]).reindex(),
    "re-indexed naively": lambda base: base.evict([2, 3]).reindex(naively=True),
}


@pytest.mark.parametrize("edit", UNREADABLE)
@pytest.mark.parametrize("part", ["V", "resid_pre"])
@pytest.mark.parametrize("over", [("slot",), {"slot": [0]}, {"slot": [10]}, {"layer": [2], "slot": [10]}])
@pytest.mark.usefixtures("unchecked")
def test_a_prompt_that_cannot_be_read_again_is_refused(tiny_llama: Model, edit: str, part: str, over: Any):
    base, donor = (UNREADABLE[edit](side) for side in two(tiny_llama))
    refused(lambda: swept(base, donor, base.suffix(0, 3), over=over, parts=(part,), reads="total"), "reads='reader'")


@pytest.mark.parametrize("edit", UNREADABLE)
@pytest.mark.usefixtures("unchecked")
def test_a_donor_whose_activations_cannot_be_read_again_is_refused(tiny_llama: Model, edit: str):
    """Its tokens, read again, would give the activations of another run than the one that the donor holds."""
    base, donor = two(tiny_llama)
    UNREADABLE[edit](donor).read({"T3": 2})
    base.read({"T3": 2})
    settings: dict[str, Any] = {"over": {"segment": ["T3"]}, "reads": "total", "align": "start"}
    refused(lambda: swept(base, donor, base.suffix(0, 3), parts=("resid_pre",), **settings), "donor")


def test_a_base_without_its_evicted_end_can_be_read_again(tiny: Model):
    """Slots that no remaining slot attends to may be gone."""
    base, donor = (side.evict([10, 11, 12]) for side in two(tiny))
    suffix = base.suffix(0, 3)
    patched = swept(base, donor, suffix, over=("slot",), parts=("V",), reads="total")
    logits = patched_pass(tiny, base, donor, suffix, swaps_of(patched, base), reads="total")
    assert near(patched.values, logits[:, -1] @ WEIGHTS)
    assert near(patched.base, weighed(logits_of(base.cache, tiny, suffix)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"over": ("head",), "parts": ("resid_pre",)}, "head"),
        ({"over": ("query_head",)}, "reader"),
        ({"over": ("query",)}, "reader"),
        ({"parts": ("hook_resid_pre",)}, "no site at the hook"),
    ],
)
def test_grids_that_only_a_reader_can_run_are_refused(tiny_llama: Model, change: dict[str, Any], part: str):
    base, donor = two(tiny_llama)
    asked: dict[str, Any] = {"over": ("layer",), "parts": ("V",), "reads": "total"}
    refused(lambda: swept(base, donor, base.suffix(0, 3), **asked | change), part)


@pytest.mark.usefixtures("unchecked")
def test_an_activation_that_the_model_does_not_have_is_refused(tiny_models: dict[str, Model]):
    """Attention and MLP in parallel: there is no residual stream between them."""
    base, donor = two(tiny_models["gpt_neox"], SPANS)
    refused(lambda: swept(base, donor, base.suffix(0, 3), parts=("resid_mid",), reads="total"), "resid_mid")


def test_half_precision_reads_the_prompt_again_and_still_sees_that_it_was_edited():
    plain = llama(tokenizer=tiny_tokenizer()).lanes.plain.to(torch.bfloat16)
    model = load(plain)
    base, donor = two(model)
    metric = LogitDiff(right=5, wrong=9)
    swept(base, donor, base.suffix(0, 3), metric, over=("layer", "segment"), reads="total")
    edited = base.cache.corrupt(Zeros(scope=Scope(count=1, layers=[1], parts="v")))
    asked: dict[str, Any] = {"over": ("slot",), "reads": "total", "progress": False}
    refused(lambda: patch_sweep(model, edited, edited, base.suffix(0, 3), metric, **asked), "it was edited after")
