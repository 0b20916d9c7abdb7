"""Patched runs against the plain way: reading on after a cache that was edited by hand, and TransformerLens hooks."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import LATENT
from kvprobe.inference.model import Model, load
from kvprobe.models.lens import HOOKS
from kvprobe.patching import KL, LogitDiff, LogProb, Pair, PatchMap, aligned, attribute, patch_pairs, patch_sweep
from kvprobe.patching.along import split
from kvprobe.patching.grid import ACTIVATIONS, LATENT_PARTS, Cell
from kvprobe.stats import FEWEST
from kvprobe.text.tokens import Tokens
from tests.models import every
from tests.refusals import refused

COUNT, SUFFIX = 14, 4
METRIC = LogitDiff(5, 9)


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt(seed: int) -> Tokens:
    first, second = Tokens.of(ids(seed, 8), "T1"), Tokens.of(ids(seed + 1, COUNT - 8), "T2", 8)
    return first + second


SUFFIX_IDS = ids(9, SUFFIX)


def suffix_of(cache: KVCache) -> Tokens:
    return Tokens.of(SUFFIX_IDS, "question", int(cache.ledger.following[0]))


def edited(model: Model, cache: KVCache, edit: str) -> KVCache:
    one = torch.zeros(1, cache.slots, dtype=torch.bool)
    one[0, 3] = one[0, 9] = True
    match edit:
        case "masked":
            return cache.mask(slots=one)
        case "masked in a head":
            return cache.mask(slots=one, layers=[1], heads=[0])
        case "evicted":
            return cache.evict(slots=one)
        case "re-indexed" if model.geometry.max_position is None:
            return cache.evict(slots=one).reindex()
        case "padded":
            return KVCache.join([cache, model.prefill(Tokens.of(ids(4, 20)))]).rows([0])
        case _:
            return cache


def two(model: Model, edit: str = "") -> tuple[KVCache, KVCache]:
    base, donor = (edited(model, model.prefill(prompt(seed)), edit) for seed in (0, 20))
    return base, donor


def by_hand(model: Model, base: KVCache, donor: KVCache, cell: Cell) -> float:
    base, donor = model.as_seen(base), model.as_seen(donor)
    slots = torch.zeros(1, base.slots, dtype=torch.bool)
    slots[0, list(cell.slots)] = True
    part: Any = None if cell.part == "latent+rope" else cell.part
    patched = base.patch(donor, slots=slots, layers=cell.layers, heads=cell.kv_heads, part=part)
    return float(METRIC(model.extend(patched, suffix_of(base))[1][0]))


@pytest.mark.parametrize("edit", ["", "masked", "masked in a head", "evicted", "re-indexed", "padded"])
@pytest.mark.parametrize("over", [("layer", "slot"), ("band", "head", "segment")], ids=str)
def test_reader_patching_equals_reading_after_a_cache_edited_by_hand(tiny: Model, edit: str, over: Any):
    base, donor = two(tiny, edit)
    patched = patch_sweep(tiny, base, donor, suffix_of(base), METRIC, over, progress=False)
    for number in range(0, len(patched.cells), 5):
        assert patched.values[number] == pytest.approx(by_hand(tiny, base, donor, patched.cells[number]), abs=1e-4)
    assert abs(patched.effect).max() > 1e-2


@pytest.mark.parametrize(("kind", "edit"), [("deepseek_v3", "padded"), ("minicpm3", "re-indexed")])
def test_cells_of_latents_are_what_is_read_after_a_cache_edited_by_hand(kind: str, edit: str):
    model = load(every.tiny(kind))
    base, donor = two(model, edit)
    sweep = partial(patch_sweep, model, base, donor, suffix_of(base), METRIC, progress=False)
    patched = sweep({"layer": [0, 2], "segment": None, "head": None}, parts=LATENT_PARTS)
    for cell, value in zip(patched.cells, patched.values, strict=True):
        assert value == pytest.approx(by_hand(model, base, donor, cell), abs=1e-4)
    by_part = abs(patched.effect).reshape(-1, 3).max(0)
    assert by_part.min() > 1e-3
    heads = sweep({"layer": [3], "query_head": None}, parts=("latent",)).effect
    assert len(set(heads.round(4))) == len(heads)
    refused(lambda: sweep(parts=("K",)), "no part called 'K'", "latent+rope")
    refused(lambda: sweep(parts=("latent",), reads="total"), "use reads='reader'")
    refused(lambda: sweep(parts=("blocks.1.attn.hook_v",)), "no part called 'V'")
    # A small step towards the donor does what the slope says.
    seen, other = model.as_seen(base), aligned(model, base, donor).cache
    pairs = {part: zip(seen.part(part), other.part(part), strict=True) for part in LATENT}
    near = seen.with_parts({part: [a + (b - a) / 100 for a, b in of_layers] for part, of_layers in pairs.items()})
    small = attribute(model, seen, near, suffix_of(base), METRIC, {"layer": [0]}, parts=LATENT_PARTS)
    assert small.linear == pytest.approx(small.checked.effect, rel=0.1, abs=2e-5)
    assert small.score == pytest.approx(small.checked.effect, rel=0.1, abs=2e-5)
    assert abs(small.linear).min() > 5e-5


def test_a_cell_does_not_depend_on_the_size_of_passes_or_on_other_cells(tiny_gemma: Model):
    base, donor = two(tiny_gemma)
    sweep = partial(patch_sweep, tiny_gemma, base, donor, suffix_of(base), METRIC, progress=False)
    whole, parts = sweep(("layer", "slot")), sweep(("layer", "slot"), rows=7)
    assert whole.values == pytest.approx(parts.values, abs=1e-5)
    one = sweep({"layer": [1], "slot": [4]}, parts=("V",))
    cells = dict(zip(whole.cells, whole.values, strict=True))
    assert one.values[0] == pytest.approx(cells[one.cells[0]], abs=1e-5)


def test_swapping_everything_gives_the_donor_and_a_donor_equal_to_the_base_has_no_effect(tiny: Model):
    base, donor = two(tiny)
    whole = patch_sweep(tiny, base, donor, suffix_of(base), METRIC, (), parts=("KV",), progress=False)
    assert whole.normalised[0] == pytest.approx(1, abs=1e-3)
    same = patch_sweep(tiny, base, base, suffix_of(base), METRIC, ("layer", "slot"), progress=False)
    assert abs(same.effect).max() < 1e-5


def test_query_heads_and_tokens_of_the_suffix_read_cells_separately(tiny_llama: Model):
    base, donor = two(tiny_llama)
    sweep = partial(patch_sweep, tiny_llama, base, donor, suffix_of(base), METRIC, parts=("V",), progress=False)
    all_read = sweep({"layer": [2]}).effect[0]
    last = sweep({"layer": [2], "query": [SUFFIX - 1]}).effect[0]
    earlier = sweep({"layer": [2], "query": range(SUFFIX - 1)}).effect
    assert last == pytest.approx(all_read, abs=1e-5)  # what earlier tokens write in the last layer is not read
    assert abs(earlier).max() < 1e-5
    heads = sweep({"layer": [2], "query_head": None}).effect
    assert len(set(heads.round(4))) == len(heads)


@pytest.mark.parametrize("part", ["K", "V", *ACTIVATIONS])
def test_total_patching_equals_TransformerLens_hooks(tiny_llama: Model, part: str):
    base, donor = two(tiny_llama)
    over = {"layer": [0, 1, 2], "slot": [2, 9]}
    patched = patch_sweep(
        tiny_llama, base, donor, suffix_of(base), METRIC, over, parts=(part,), reads="total", progress=False
    )
    bridge = tiny_llama.lanes.hooked.bridge
    name = {"K": "attn.hook_rot_k", "V": "attn.hook_v"}.get(part) or HOOKS[part]  # type: ignore[index]
    positions = torch.arange(COUNT + SUFFIX)[None]
    here, there = (torch.tensor([[*tokens.ids, *SUFFIX_IDS]]) for tokens in (prompt(0), prompt(20)))
    for cell, value in zip(patched.cells, patched.values, strict=True):
        hook, (slot,) = f"blocks.{cell.layers[0]}.{name}", cell.slots
        recorded: list[Tensor] = []

        def record(tensor: Tensor, hook: Any, recorded: list[Tensor] = recorded) -> None:
            recorded.append(tensor.clone())

        def write(tensor: Tensor, hook: Any, recorded: list[Tensor] = recorded, slot: int = slot) -> Tensor:
            tensor = tensor.clone()
            tensor[:, slot] = recorded[0][:, slot]
            return tensor

        with torch.no_grad():
            bridge.run_with_hooks(there, fwd_hooks=[(hook, record)], position_ids=positions)
            logits = bridge.run_with_hooks(here, fwd_hooks=[(hook, write)], position_ids=positions)
        assert value == pytest.approx(float(METRIC(logits[0])), abs=1e-4)
    assert abs(patched.effect).max() > 1e-3


def test_total_and_reader_patching_agree_on_values_of_the_last_layer(tiny: Model):
    base, donor = two(tiny)
    over = {"layer": [tiny.geometry.n_layers - 1], "slot": None}
    total, reader = (
        patch_sweep(tiny, base, donor, suffix_of(base), METRIC, over, parts=("V",), reads=reads, progress=False)
        for reads in ("total", "reader")
    )
    assert total.values == pytest.approx(reader.values, abs=1e-4)


def test_a_segment_of_another_length_needs_align_and_its_keys_are_rotated(tiny_llama: Model):
    base, _ = two(tiny_llama)
    longer = Tokens.of([7, 8], "T1") + Tokens.of(prompt(0).ids[:8], "T1", 2) + Tokens.of(prompt(0).ids[8:], "T2", 10)
    donor = tiny_llama.prefill(longer)
    sweep = partial(patch_sweep, tiny_llama, base, donor, suffix_of(base), METRIC, progress=False)
    refused(lambda: sweep(("layer", "segment")), "'T1' has 8 slots in the base and 10 in the donor; say which")
    first = sweep({"layer": [0], "segment": ["T1"]}, align="end")
    # The same tokens at the first layer have the same keys, once rotated back by two positions.
    assert abs(first.effect).max() < 1e-4
    assert abs(sweep({"layer": [0], "segment": ["T1"]}, align="start").effect).max() > 1e-3


def test_a_donor_whose_hidden_end_was_re_indexed_lends_it_as_it_was_computed(tiny_llama: Model):
    base, donor = two(tiny_llama)
    hidden = donor.mask("T2").reindex()
    assert not hidden.ledger.rotated
    one, other = (
        patch_sweep(tiny_llama, base, lender, suffix_of(base), METRIC, progress=False) for lender in (donor, hidden)
    )
    assert other.values == pytest.approx(one.values, abs=1e-6)


def test_a_swap_along_all_directions_is_the_full_swap_and_leaves_no_rest(tiny_llama: Model):
    base, donor = two(tiny_llama)
    width = base.n_kv_heads * base.keys[0].shape[3]
    whole = {(1, "V"): torch.randn(width, width, generator=torch.Generator().manual_seed(0))}
    over = {"layer": [1], "slot": [5]}
    table = patch_sweep(
        tiny_llama, base, donor, suffix_of(base), METRIC, over, parts=("V",), along=whole, progress=False
    ).df()
    effect = table.set_index("content")["effect"]
    assert effect["along"] == pytest.approx(effect["full"], abs=1e-4)
    assert abs(effect["rest"]) < 1e-4 < abs(effect["full"])
    refused(lambda: split(base, donor, {(1, "V"): torch.ones(1, 3)}), "KV heads × numbers to a head")


def test_attribution_is_exact_patching_to_first_order_in_every_cell(tiny: Model):
    base, donor = two(tiny)

    def near(start: Tensor, other: Tensor) -> Tensor:
        return start + 0.02 * (other - start)

    keys = tuple(map(near, base.keys, donor.keys))
    values = tuple(map(near, base.values, donor.values))
    guess = attribute(tiny, base, base.with_parts({"K": keys, "V": values}), suffix_of(base), METRIC, check=84)
    table = guess.df()
    # In a mixture a small step may send a token to another expert, which no slope predicts: in a tenth of these cells.
    mixture = tiny.name == "MixtralForCausalLM"
    size = table["effect"].abs().quantile(0.9 if mixture else 1.0)
    for score in ("score", "linear"):
        wrong = (table[score] - table["effect"]).abs() > 0.05 * size
        assert wrong.mean() <= (0.2 if mixture else 0)


def test_attribution_ranks_cells_as_patching_does_and_its_scores_agree_for_values(tiny: Model):
    base, donor = two(tiny)
    guess = attribute(tiny, base, donor, suffix_of(base), METRIC, check=84)
    assert guess.agreement["score"] > (0.7 if tiny.name == "MixtralForCausalLM" else 0.8)
    assert isinstance(guess.map, PatchMap)
    table = guess.df()
    checked, count = table.dropna(subset=["effect"]), len(guess.sample) // 10
    top = {name: set(checked[name].abs().nlargest(count).index) for name in ("effect", "score", "linear")}
    shared = {name: len(top["effect"] & top[name]) / count for name in ("score", "linear")}
    assert guess.overlap == pytest.approx(shared)
    assert shared["score"] >= 0.5
    assert (table["score"] - table["linear"])[table["part"] == "V"].abs().max() < 1e-4


def test_metrics_equal_their_definitions(tiny_llama: Model):
    base, donor = two(tiny_llama)
    suffix = suffix_of(base)
    logits = tiny_llama.extend(base, suffix, logits=2)[1][0].log_softmax(-1)
    log_prob = patch_sweep(
        tiny_llama, base, donor, suffix, LogProb((SUFFIX_IDS[-1], 4)), {"layer": [0]}, progress=False
    )
    assert log_prob.base == pytest.approx(float(logits[0, SUFFIX_IDS[-1]] + logits[1, 4]), abs=1e-4)
    kl = patch_sweep(tiny_llama, base, donor, suffix, KL(), {"layer": [0]}, progress=False)
    assert kl.base == pytest.approx(0, abs=1e-6)
    assert kl.donor > 1e-3
    assert (kl.values >= -1e-6).all()


def test_pairs_are_pooled_with_intervals_over_clusters(tiny_llama: Model):
    base, donor = two(tiny_llama)
    ways = ((base, donor, 0), (donor, base, FEWEST // 2))
    pairs = [
        Pair(one, other, suffix_of(base), METRIC, str(first + number))
        for one, other, first in ways
        for number in range(FEWEST // 2)
    ]
    maps = patch_pairs(tiny_llama, pairs, (), parts=("V", "KV"), progress=False)
    table = maps.summary(["part"]).set_index("part")
    assert table.loc["KV", "pairs"] == FEWEST
    assert table.loc["KV", "effect"] == pytest.approx(0, abs=1e-3)  # there and back
    assert table.loc["KV", "effect_low"] < 0 < table.loc["KV", "effect_high"]
    few = patch_pairs(tiny_llama, [pairs[0], pairs[-1]], (), parts=("KV",), progress=False).summary(["part"]).iloc[0]
    assert np.isnan(few["effect_low"])
    assert few["effect_smallest"] < 0 < few["effect_largest"]


REFUSED = [
    ({"over": {"layer": [99]}}, "no layer 99; there are layers 0 to 2"),
    ({"over": ("layers",)}, "no axis called 'layers'; did you mean 'layer'"),
    ({"over": {"segment": ["T9"]}}, "no segment called 'T9'"),
    ({"parts": ("Q",)}, "no part called 'Q'"),
    ({"metric": lambda logits: logits[-1]}, "returned 64 numbers"),
    ({"metric": lambda logits: None}, "returned NoneType"),
    ({"metric": lambda logits: logits.sum() * float("nan")}, "must be a finite number"),
    ({"reads": "both"}, "no choice of reads called 'both'"),
    ({"parts": ("resid_pre",)}, "is not part of a cache"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_impossible_sweeps_are_refused(tiny_llama: Model, change: dict[str, Any], sentence: str):
    base, donor = two(tiny_llama)
    settings: dict[str, Any] = {"metric": METRIC, "over": ("layer",), "parts": ("V",), "reads": "reader"} | change
    refused(lambda: patch_sweep(tiny_llama, base, donor, suffix_of(base), progress=False, **settings), sentence)


def test_a_donor_of_another_model_and_an_edited_base_in_total_are_refused(
    tiny_llama: Model, tiny_models: dict[str, Model]
):
    base, donor = two(tiny_llama)
    refused(
        lambda: kv.patch_sweep(tiny_llama, base, two(tiny_models["gpt_neox"])[1], suffix_of(base), METRIC),
        "give caches of the same model",
    )
    for edit, sentence in (("masked", "cannot be read again"), ("evicted", "edited after it was read")):
        base, donor = two(tiny_llama, edit)
        refused(
            lambda base=base, donor=donor: patch_sweep(
                tiny_llama, base, donor, suffix_of(base), METRIC, ("slot",), reads="total", progress=False
            ),
            sentence,
        )
