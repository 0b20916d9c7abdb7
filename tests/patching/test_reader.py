"""Patches that only the suffix sees, against one pass without a cache in which only the suffix sees them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.patching import KL, Cell, LogitDiff, LogProb, patch_sweep
from kvprobe.patching import reader as reading
from kvprobe.text.tokens import Tokens
from tests.models import N_LAYERS, WINDOW
from tests.patching.oracle import EDITS, Op, Run, Swap, patched_pass, swaps_of, twins
from tests.patching.pairs import SPANS, TOLERANCE, WEIGHTS, near, swept, two, weighed
from tests.random_caches import assert_bit_identical, copy_of, random_tokens
from tests.refusals import refused

EVERYTHING: list[Op] = [(kind, seed) for seed, kind in enumerate(["read", "read padded", "mask", *EDITS, "read"])]
seeds = st.integers(0, 2**31)
few = settings(max_examples=6)


def logits_of(cache: KVCache, model: Model, suffix: Tokens) -> Tensor:
    """After each token of the suffix, nothing patched."""
    return model.extend(cache, suffix, logits=len(suffix))[1][0]


# ---- any history, any grid


@st.composite
def histories(draw: st.DrawFn) -> list[Op]:
    kinds = ("read", "read padded", *EDITS)
    middle = draw(st.lists(st.tuples(st.sampled_from(kinds), seeds), min_size=1, max_size=5))
    return [(draw(st.sampled_from(["read", "read padded"])), draw(seeds)), ("read", draw(seeds)), *middle]


def run(model: Model, seed: int, history: Sequence[Op]) -> Run:
    made = Run(model, seed)
    for kind, of in history:
        made.do(kind, of)
    return made


def some_grid(base: Run, count: int, rng: random.Random) -> dict[str, Any]:
    """Some axes, and all their values or a few; slots may be masked, but are never padding."""
    held = [slot for slot, token in enumerate(base.row.held) if token is not None]
    names = [name for name in base.cache.ledger.names if base.slots_of(name)]
    axes: list[list[tuple[str, Any]]] = [
        [("layer", None), ("layer", [2, 0]), ("band", [range(2), [2, 0], range(3)]), ("band", None)],
        [("slot", held), ("slot", rng.sample(held, 1)), ("segment", names), ("segment", names[-1:])],
        [("head", None), ("head", [base.row.kv_heads - 1])],
        [("query_head", [0, 3])],
        [("query", sorted({0, count - 1}))],
    ]
    return dict(rng.choice(axis) for axis in rng.sample(axes, rng.randint(1, 4)))


@given(
    history=histories(),
    alone=st.lists(st.tuples(st.sampled_from(["mask", "mask ragged", "reindex"]), seeds), max_size=2),
    count=st.integers(1, 8),
    seed=seeds,
)
@example(history=EVERYTHING, alone=[], count=8, seed=1)
@example(history=EVERYTHING[:4], alone=[("reindex", 3)], count=1, seed=2)
@few
def test_any_cell_after_any_history_equals_one_pass_without_a_cache(
    tiny: Model, history: list[Op], alone: list[Op], count: int, seed: int
):
    """The donor shares the base's history, but for what happens to it `alone` at the end."""
    rng = random.Random(seed)
    base, donor = run(tiny, seed, history), run(tiny, seed + 1, [*history, *alone])
    suffix = base.suffix(seed, count, gap=rng.choice([0, 0, 2]))
    over, parts = some_grid(base, count, rng), rng.sample(["K", "V", "KV"], rng.randint(1, 3))
    patched = swept(base, donor, suffix, over=over, parts=parts)
    numbers = rng.sample(range(len(patched.cells)), min(len(patched.cells), 30))
    swaps = swaps_of(patched, base)
    logits = patched_pass(tiny, base, donor, suffix, [swaps[number] for number in numbers])
    assert near(patched.values[numbers], logits[:, -1] @ WEIGHTS)
    assert near(patched.base, weighed(logits_of(base.cache, tiny, suffix)))


@pytest.mark.parametrize("count", [1, 8])
def test_single_layers_slots_and_heads_are_patched_separately(tiny: Model, count: int):
    """The whole product of the axes; effects differ, so a cell that is mistaken for its neighbour would show."""
    base, donor = two(tiny)
    suffix = base.suffix(0, count)
    patched = swept(base, donor, suffix, over=("head", "slot", "layer"), parts=("V", "K"))
    logits = patched_pass(tiny, base, donor, suffix, swaps_of(patched, base))
    assert near(patched.values, logits[:, -1] @ WEIGHTS)
    gaps = torch.as_tensor(patched.values).sort().values.diff()
    assert float((gaps > TOLERANCE).float().mean()) > 0.5


def test_a_cell_equals_reading_after_an_overwritten_cache(tiny: Model):
    base, donor = two(tiny)
    suffix = base.suffix(0, 3)
    patched = swept(base, donor, suffix, over=("layer", "segment"), parts=("K", "V", "KV"))
    for cell, value in zip(patched.cells, patched.values, strict=True):
        slots = torch.zeros(1, base.cache.slots, dtype=torch.bool)
        slots[0, list(cell.slots)] = True
        cache = base.cache.patch(donor.cache, slots=slots, layers=cell.layers, part=cell.part)
        assert near(value, weighed(logits_of(cache, tiny, suffix)))


def test_reader_patching_equals_TransformerLens_hooks(tiny_llama: Model):
    """By public hooks alone: the patched layer's z is computed again for the suffix, from its own q, k and v."""
    base, donor = two(tiny_llama)
    suffix = base.suffix(0, 4)
    bridge, length = tiny_llama.lanes.hooked.bridge, base.cache.slots

    def read(ids: Sequence[int], hooks: list[tuple[str, Callable[..., Any]]]) -> Tensor:
        positions = torch.arange(len(ids))[None]
        with torch.no_grad():
            return bridge.run_with_hooks(
                torch.tensor([ids]), fwd_hooks=hooks, position_ids=positions, return_type="logits"
            )

    def keep(tensors: dict[str, Tensor], layer: int) -> list[tuple[str, Callable[..., Any]]]:
        names = {name: f"blocks.{layer}.attn.{name}" for name in ("hook_rot_q", "hook_rot_k", "hook_v")}

        def keeping(name: str) -> Callable[..., None]:
            return lambda tensor, hook: tensors.__setitem__(name, tensor[0].transpose(0, 1).clone())

        return [(path, keeping(name)) for name, path in names.items()]

    patched = swept(base, donor, suffix, over={"layer": None, "slot": [0, 7, 12], "head": [1]}, parts=("K", "V"))
    for cell, value in zip(patched.cells, patched.values, strict=True):
        [layer] = cell.layers
        ours: dict[str, Tensor] = {}
        theirs: dict[str, Tensor] = {}
        read(donor.row.ids, keep(theirs, layer))

        def rewrite(z: Tensor, hook: Any, cell: Any = cell, ours: Any = ours, theirs: Any = theirs) -> Tensor:
            name = {"K": "hook_rot_k", "V": "hook_v"}[cell.part]
            for head, slot in product(cell.kv_heads, cell.slots):
                ours[name][head, slot] = theirs[name][head, slot]
            keys, values = (ours[name].repeat_interleave(2, 0) for name in ("hook_rot_k", "hook_v"))
            scores = ours["hook_rot_q"] @ keys.transpose(1, 2) / 8**0.5
            weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
            z = z.clone()
            z[0, length:] = (weights @ values).transpose(0, 1)[length:]
            return z

        hooks = [*keep(ours, layer), (f"blocks.{layer}.attn.hook_z", rewrite)]
        assert near(value, weighed(read([*base.row.ids, *suffix.ids], hooks)[0]))


# ---- slots without effect


def test_a_slot_beyond_the_window_has_no_effect_in_windowed_layers(tiny_gemma: Model):
    base, donor = two(tiny_gemma, {"T1": 12})
    suffix = base.suffix(0, 4)
    patched = swept(base, donor, suffix, over={"slot": range(12), "layer": None}, parts=("KV",))
    cells = list(zip(patched.cells, patched.effect, strict=True))
    assert base.row.ids[0] == donor.row.ids[0]  # by chance, so slot 0 has no effect
    for cell, effect in cells[len(tiny_gemma.geometry.windows) :]:
        visible = cell.layers == (2,) or suffix.positions[0] - cell.slots[0] < WINDOW
        assert (abs(effect) > TOLERANCE) == visible
    # The window ends among these slots: some are seen by the suffix's first tokens and not by its last.
    assert {cell.slots[0] for cell, effect in cells if cell.layers == (0,) and abs(effect) > TOLERANCE} == {
        *range(5, 12)
    }
    logits = patched_pass(tiny_gemma, base, donor, suffix, swaps_of(patched, base))
    assert near(patched.values, logits[:, -1] @ WEIGHTS)


def test_a_masked_slot_has_an_effect_only_where_it_is_not_masked(tiny: Model):
    base, donor = two(tiny)
    base.mask([2, 5]).mask([7], layers=[1]).mask([8], heads=[0])
    over = {"slot": [2, 5, 6, 7, 8], "layer": None, "head": [0, 1]}
    patched = swept(base, donor, base.suffix(0, 3), over=over, parts=("KV",))
    for cell, effect in zip(patched.cells, patched.effect, strict=True):
        [slot], [layer], [head] = cell.slots, cell.layers, cell.kv_heads or ()
        masked = slot in (2, 5) or (slot, layer) == (7, 1) or (slot, head) == (8, 0)
        assert (abs(effect) < 1e-6) == masked, cell


def test_a_donor_that_equals_the_base_has_no_effect(tiny_llama: Model):
    base, _ = two(tiny_llama)
    for donor in (base, Run(tiny_llama, 1).read(SPANS)):
        patched = swept(base, donor, base.suffix(0, 3), over=("layer", "slot"), parts=("K", "V", "KV"))
        assert near(patched.effect, torch.zeros(len(patched.cells)))
        assert torch.as_tensor(patched.normalised).isnan().all()


def test_slots_that_the_donor_masked_are_patched_too(tiny_llama: Model):
    base, donor = two(tiny_llama)
    hidden = Run(tiny_llama, 2).read(SPANS).mask([4, 5, 6, 7])
    one, other = (swept(base, lender, base.suffix(0, 3), over=("layer", "slot")) for lender in (donor, hidden))
    assert near(one.values, other.values)
    assert not near(one.donor, other.donor)


# ---- rows


def test_a_row_does_not_depend_on_other_rows(tiny: Model):
    base, donor = two(tiny)
    suffix = base.suffix(0, 3)
    together = swept(base, donor, suffix, over=("layer", "slot", "head"), parts=("K", "V", "KV"))
    for index in random.Random(0).sample(range(len(together.cells)), 8):
        cell = together.cells[index]
        over = {"slot": cell.slots, "head": cell.kv_heads, "layer": cell.layers}
        [alone] = swept(base, donor, suffix, over=over, parts=(cell.part,)).values
        assert near(together.values[index], alone)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_sweep_in_small_batches_is_the_same_sweep(tiny_gemma: Model, rows: int):
    base, donor = two(tiny_gemma)
    base.mask([3, 4], layers=[0])
    sweeps = [
        swept(base, donor, base.suffix(0, 2), LogProb.of([3, 5]), over=("segment", "layer"), parts=("K", "V"), **how)
        for how in ({}, {"rows": rows})
    ]
    assert sweeps[0].cells == sweeps[1].cells
    assert near(sweeps[0].values, sweeps[1].values)


def test_cells_in_passes_are_the_cells_at_once(tiny_gemma: Model, monkeypatch: pytest.MonkeyPatch):
    base, donor = two(tiny_gemma)
    monkeypatch.setattr(reading, "ROWS", 2)
    reader = reading.Reader(tiny_gemma.lanes, base.cache, {"full": donor.cache}, base.suffix(0, 3))
    cells = [Cell((layer,), (slot,), "KV") for layer in range(N_LAYERS) for slot in (0, 3, 5)]
    passes = list(reader.passes(cells, 2))
    assert [len(logits) for logits in passes] == [1, 2, 2, 2, 2, 1]
    assert near(torch.cat(passes), reader.logits(cells, 2))


def test_a_sweep_leaves_both_caches_and_the_model_as_they_were(tiny_llama: Model):
    base, donor = run(tiny_llama, 1, EVERYTHING[:5]), run(tiny_llama, 2, EVERYTHING[:5])
    before = [copy_of(side.cache) for side in (base, donor)]
    suffix, config = base.suffix(0, 3), tiny_llama.lanes.plain.config
    attention, logits = config._attn_implementation, logits_of(base.cache, tiny_llama, suffix)

    def failing(logits: Tensor) -> Tensor:
        raise KeyError("a metric of the user's own")

    with pytest.raises(KeyError, match="own"):
        swept(base, donor, suffix, failing)
    swept(base, donor, suffix)
    for side, copy in zip((base, donor), before, strict=True):
        assert_bit_identical(side.cache, copy)
    assert config._attn_implementation == attention
    assert torch.equal(logits_of(base.cache, tiny_llama, suffix), logits)


# ---- from base to donor and back


@pytest.mark.parametrize("history", [[("read", 5), ("read", 6)], [*EVERYTHING, ("reindex", 0)]])
def test_patching_all_slots_and_layers_gives_the_donor(tiny: Model, history: list[Op]):
    base, donor = run(tiny, 1, history), run(tiny, 2, history)
    suffix = base.suffix(0, 4)
    patched = swept(base, donor, suffix, over={"band": [range(N_LAYERS)]}, parts=("KV",))
    assert near(patched.values, [patched.donor])
    assert patched.normalised[0] == pytest.approx(1, abs=1e-3)
    assert near(patched.donor, weighed(logits_of(donor.cache, tiny, suffix)))


def test_noising_is_denoising_with_base_and_donor_swapped(tiny_gemma: Model):
    one, other = two(tiny_gemma)
    suffix = one.suffix(0, 3)
    there, back = (swept(*pair, suffix, over=("layer", "segment")) for pair in ((one, other), (other, one)))
    assert near([there.base, there.donor], [back.donor, back.base])
    logits = patched_pass(tiny_gemma, other, one, suffix, swaps_of(back, other))
    assert near(back.values, logits[:, -1] @ WEIGHTS)
    assert not near(there.values, back.values)


def test_effects_are_differences_from_the_base_and_shares_of_the_way_to_the_donor(tiny_llama: Model):
    base, donor = two(tiny_llama)
    patched = swept(base, donor, base.suffix(0, 3))
    values = torch.as_tensor(patched.values)
    assert near(patched.effect, values - patched.base)
    assert near(patched.normalised, (values - patched.base) / (patched.donor - patched.base))


# ---- donors of another length


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("history", [[], [("mask ragged", 1)], [("evict", 2), ("reindex", 3)]])
def test_segments_of_unequal_length_meet_at_start_or_end_with_keys_rotated(tiny: Model, align: str, history: list[Op]):
    base, donor = Run(tiny, 1), Run(tiny, 2)
    for side, spans in ((base, {"system": 4, "T1": 3, "T2": 5}), (donor, {"system": 3, "T1": 6, "T2": 5})):
        side.read(spans)
        for kind, seed in history:
            side.do(kind, seed)
    pairs = twins(base, donor, from_end=align == "end")
    suffix = base.suffix(0, 3)
    slots = [base.row.held.index(token) for token in sorted(pairs)]
    parts = ("K", "V", "KV")
    settings: dict[str, Any] = {"over": {"slot": slots, "layer": None}, "parts": parts, "align": align}
    if not base.rotates:
        refused(lambda: swept(base, donor, suffix, **settings), "learned positions")
        return
    patched = swept(base, donor, suffix, **settings)
    assert len(patched.cells) == len(slots) * N_LAYERS * len(parts)
    logits = patched_pass(tiny, base, donor, suffix, swaps_of(patched, base), pairs)
    assert near(patched.values, logits[:, -1] @ WEIGHTS)


@pytest.mark.parametrize("align", ["start", "end"])
def test_slots_without_a_donor_slot_are_left_unchanged(tiny_llama: Model, align: str):
    base = Run(tiny_llama, 1).read({"system": 4, "T1": 6, "T2": 2})
    donor = Run(tiny_llama, 2).read({"system": 4, "T1": 3, "T2": 2})
    suffix = base.suffix(0, 3)
    patched = swept(base, donor, suffix, over=("segment",), parts=("KV",), align=align)
    [cell] = [cell for cell in patched.cells if cell.labels["segment"] == "T1"]
    assert cell.slots == ((4, 5, 6) if align == "start" else (7, 8, 9))
    pairs = twins(base, donor, from_end=align == "end")
    logits = patched_pass(tiny_llama, base, donor, suffix, swaps_of(patched, base), pairs)
    assert near(patched.values, logits[:, -1] @ WEIGHTS)


# ---- what is measured


def test_metrics_equal_their_definitions(tiny_llama: Model):
    base, donor = two(tiny_llama)
    answer = [7, 11, 3]
    suffix = base.suffix(0, 2) + Tokens.of(answer[:2], "answer", base.row.following + 2)
    over = {"layer": None, "segment": ["T1"]}

    def values(metric: Any) -> Tensor:
        return torch.as_tensor(swept(base, donor, suffix, metric, over=over, parts=("KV",)).values)

    swaps = [Swap([layer], base.tokens_at(base.slots_of("T1")), range(base.row.kv_heads), "KV") for layer in range(3)]
    logits = patched_pass(tiny_llama, base, donor, suffix, swaps)
    said, clean = logits.log_softmax(-1), logits_of(base.cache, tiny_llama, suffix).log_softmax(-1)
    assert near(values(LogitDiff(right=5, wrong=9)), logits[:, -1, 5] - logits[:, -1, 9])
    assert near(values(LogProb.of(answer)), sum(said[:, 1 + place, token] for place, token in enumerate(answer)))
    assert near(values(LogProb.of(answer[2:])), said[:, 3, 3])
    assert near(values(KL()), (clean.exp() * (clean - said)).sum(-1)[:, -1])
    assert near(values(lambda logits: float(logits.max())), logits[:, -1].amax(-1))


def test_a_text_suffix_starts_where_the_base_ends(tiny_llama: Model):
    base, donor = two(tiny_llama)
    base.read({"T3": 2}, gap=3)
    donor.read({"T3": 2}, gap=3)
    ids = tiny_llama.tokenizer("the bus.", add_special_tokens=False)["input_ids"]
    suffixes = ("the bus.", Tokens.of(ids, "text", base.row.following))
    one, other = (
        patch_sweep(tiny_llama, base.cache, donor.cache, suffix, weighed, progress=False) for suffix in suffixes
    )
    assert near(one.values, other.values)
    assert near([one.base, one.donor], [other.base, other.donor])


# ---- KVCache.patch


@given(
    seed=seeds,
    layers=st.none() | st.lists(st.integers(0, 2), min_size=1, unique=True),
    heads=st.none() | st.lists(st.integers(0, 1), min_size=1, unique=True),
    part=st.sampled_from(["K", "V", "KV"]),
    named=st.booleans(),
)
@settings(max_examples=20)
def test_a_patched_cache_equals_one_overwritten_by_hand(
    tiny_llama: Model, seed: int, layers: list[int] | None, heads: list[int] | None, part: Any, named: bool
):
    spans = {"system": 3, "T1": 4}
    base, donor = (
        tiny_llama.prefill([random_tokens(seed + of, spans), random_tokens(seed + of + 1, spans)]) for of in (0, 7)
    )
    base = base.mask(slots=torch.rand(2, 7, generator=torch.Generator().manual_seed(seed)) < 0.3, layers=[1])
    slots = torch.rand(2, 7, generator=torch.Generator().manual_seed(seed)) < 0.5
    before = copy_of(base), copy_of(donor)
    where: dict[str, Any] = {"layers": layers, "heads": heads, "part": part}
    patched = base.patch(donor, "T1", **where) if named else base.patch(donor, slots=slots, **where)

    expected = copy_of(base)
    chosen = base.ledger.in_segments(["T1"]) if named else slots
    for layer, head, row, slot in product(layers or range(3), heads or range(2), range(2), range(7)):
        if chosen[row, slot]:
            for name, ours, theirs in (("K", expected.keys, donor.keys), ("V", expected.values, donor.values)):
                if name in part:
                    ours[layer][row, head, slot] = theirs[layer][row, head, slot]
    changed = [(new != old).any(3).any(1) for new, old in zip(expected.tensors, base.tensors, strict=True)]
    expected = replace(expected, ledger=replace(expected.ledger, edited=torch.stack(changed).any(0)))
    assert_bit_identical(patched, expected)
    assert_bit_identical(base, before[0])
    assert_bit_identical(donor, before[1])
