"""What is taken from another cache is of the same model, and its keys are at the same positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvprobe.attention import attend, dangling, lift
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import apart, changed_slots, relative_distance
from kvprobe.erasing import Subspace, interchange, mix
from kvprobe.faults import Distractor, FaultContext, ForeignBlock, Splice, StaleBlock, Zeros
from kvprobe.inference.model import Model
from kvprobe.patching import LogitDiff, patch_sweep
from kvprobe.patching.grid import Cell
from kvprobe.patching.swaps import swap_cells
from kvprobe.text.tokens import Tokens
from tests.models import llama, tiny_tokenizer
from tests.random_caches import assert_close, random_cache, random_tokens
from tests.refusals import refused

SPANS = {"system": 3, "T1": 4, "T2": 5}
OTHER = llama(seed=1, tokenizer=tiny_tokenizer())
TAKING: dict[str, Callable[[KVCache, KVCache], object]] = {
    "patch": lambda base, donor: base.patch(donor, "T2"),
    "mix": lambda base, donor: mix(base, donor, "T2"),
    "interchange": lambda base, donor: interchange(base, donor, {(0, "K"): Subspace.spanned(torch.eye(16))}, "T2"),
    "join": lambda base, donor: KVCache.join([base, donor]),
    "append": lambda base, donor: base.append(donor),
    "differences": lambda base, donor: changed_slots(base, donor),
    "apart": lambda base, donor: apart(base, donor, [0]),
    "distance": lambda base, donor: relative_distance(donor, base, ["T2"]),
    **{
        type(fault).__name__: lambda base, donor, fault=fault: base.corrupt(
            fault, contexts=[FaultContext(base, {"donor": donor})]
        )
        for fault in (
            Distractor("donor"), ForeignBlock(donor="donor"), StaleBlock(donor="donor"), Splice(above=0, donor="donor")
        )
    },
    "context": lambda base, donor: base.corrupt(Zeros(), contexts=[FaultContext(donor)]),
}  # fmt: skip


@pytest.mark.parametrize("take", TAKING.values(), ids=TAKING)
def test_a_donor_of_another_model_of_the_same_shape_is_refused(
    take: Callable[[KVCache, KVCache], object], tiny_llama: Model
):
    tokens = random_tokens(0, SPANS)
    base, donor = (model.prefill(tokens) for model in (tiny_llama, OTHER))
    refused(lambda: take(base, donor), "made by another model than the base (it differs in weights)")


@pytest.mark.parametrize("take", ["patch", "mix", "interchange"])
def test_keys_of_a_reindexed_base_are_not_taken_from_a_fresh_donor(take: str, tiny_llama: Model):
    tokens = random_tokens(0, SPANS)
    base = tiny_llama.prefill(tokens).evict("T1").reindex()
    donor = tiny_llama.prefill(tokens[:3] + tokens[tokens.span("T2")].shifted(3))
    refused(lambda: TAKING[take](base, donor), "position 7 in the base and at 3 in the donor", "Model.as_seen")
    seen = tiny_llama.as_seen(base)
    for cache in (base, donor):
        refused(lambda cache=cache: OTHER.as_seen(cache), "was made by another model")
    suffix = Tokens.of([1, 2], start=8)
    whole = seen.patch(donor, slots=range(8))
    assert_close(tiny_llama.extend(whole, suffix)[1], tiny_llama.extend(donor, suffix)[1])
    values = base.patch(donor, "T2", part="V")
    assert torch.equal(values.values[0][:, :, 3:], donor.values[0][:, :, 3:])


def test_slots_that_hold_no_token_are_not_taken():
    base = random_cache(0, batch=1)
    donor = KVCache.join([random_cache(1, batch=1, slots=6), random_cache(2, batch=1)]).rows([0])
    refused(lambda: base.patch(donor, slots=[5, 6]), "Slot 6 of row 0 of the donor holds no token")
    base.patch(donor, slots=[5])


def test_a_donor_that_still_owes_a_rotation_is_refused_and_its_remedy_works(tiny_llama: Model):
    tokens = random_tokens(0, SPANS)
    base, donor = tiny_llama.prefill(tokens), tiny_llama.prefill(tokens).evict("T1").reindex()
    refused(lambda: FaultContext(base, {"distractor": donor}), "Model.as_seen")
    FaultContext(base, {"distractor": tiny_llama.as_seen(donor)})


def test_a_scaffold_at_other_positions_is_refused():
    base = random_cache(0, batch=1, d_head=5)
    context = FaultContext(base, {"scaffold": random_cache(1, batch=1, d_head=5, gaps=True)})
    refused(lambda: base.corrupt(Splice(above=0), contexts=[context]), "each at the same position")


def test_what_is_read_after_a_cache_of_another_model_is_refused(tiny_llama: Model):
    tokens = random_tokens(0, SPANS)
    base, donor, suffix = tiny_llama.prefill(tokens), OTHER.prefill(tokens), Tokens.of([1, 2], start=12)
    metric = LogitDiff(3, 4)
    cell = Cell((0,), (1,), "KV")
    for call in (
        lambda: attend(tiny_llama, suffix, donor),
        lambda: tiny_llama.capture(suffix, ["v"], past=donor),
        lambda: patch_sweep(tiny_llama, base, donor, suffix, metric),
        lambda: swap_cells(tiny_llama, base, donor, suffix, [cell], {"difference": metric}),
        lambda: tiny_llama.sweep(base, [Distractor()], "x", donors={"distractor": donor}),
    ):
        refused(call, "another model")


def test_patterns_of_two_models_are_not_compared(tiny_llama: Model):
    tokens, suffix = random_tokens(0, SPANS), Tokens.of([1, 2], start=12)
    before, after = (attend(model, suffix, model.prefill(tokens)) for model in (tiny_llama, OTHER))
    refused(lambda: dangling(before, after, ["T1"]), "another model")
    refused(lambda: lift(before, after, [4]), "another model")


@pytest.mark.usefixtures("unchecked")
def test_a_donor_of_unknown_origin_may_be_of_any_model_and_something_else_is_no_donor(tiny_llama: Model):
    tokens = random_tokens(0, SPANS)
    base, donor = tiny_llama.prefill(tokens), replace(OTHER.prefill(tokens), made_by=None)
    assert torch.equal(base.patch(donor, "T2").keys[0][:, :, 7:], donor.keys[0][:, :, 7:])
    refused(lambda: base.patch("T2", "T2"), "donor='T2', a str; give a KVCache")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("take", ["patch", "mix", "interchange", "values"])
def test_slots_of_which_the_donor_has_other_tokens_are_not_taken(take: str, tiny_llama: Model):
    """Slot 4 of a base without token 3, and of a donor without token 5, hold tokens 5 and 4."""
    takes = TAKING | {"values": lambda base, donor: base.patch(donor, "T2", part="V")}
    base = tiny_llama.prefill(random_tokens(0, SPANS))
    other = tiny_llama.prefill(random_tokens(1, SPANS))
    if take == "values":
        refused(lambda: takes[take](base.evict(slots=[8]), other.evict(slots=[10])), "'T2' other tokens are gone")
        takes[take](base.evict(slots=[8]), other.evict(slots=[8]))
    named = tiny_llama.prefill(random_tokens(1, {"system": 2, "T1": 3, "T2": 7}))
    refused(lambda: takes[take](named, base), "Slot 5 of row 0 is of segment 'T2', which the donor has in other slots")
    takes[take](base, tiny_llama.prefill(random_tokens(1, {"all": 12})))
    named.patch(base, slots=[5])


@pytest.mark.parametrize(
    ("ours", "theirs", "edit"),
    [
        ([8], [10], KVCache.fork),
        ([7], [11], KVCache.fork),
        ([8], [10], KVCache.reindex),
        ([8, 9], [9, 10], KVCache.reindex),
    ],
)
def test_segments_of_which_other_tokens_are_gone_are_not_aligned_in_silence(
    ours: list[int], theirs: list[int], edit: Callable[[KVCache], KVCache], tiny_llama: Model
):
    base, donor = (tiny_llama.prefill(random_tokens(seed, SPANS)) for seed in (0, 1))
    pair = edit(base.evict(slots=ours)), edit(donor.evict(slots=theirs))
    suffix = random_tokens(3, {"ask": 2}, start=12)

    def sweep(base: KVCache, donor: KVCache, align: Any = None) -> object:
        return patch_sweep(tiny_llama, base, donor, suffix, LogitDiff(5, 9), align=align, progress=False)

    refused(lambda: sweep(*pair), "'T2' other tokens are gone in the donor than in the base", "align")
    sweep(*pair, align="start")
    sweep(base.evict(slots=ours), donor.evict(slots=ours))
    shorter = random_tokens(1, SPANS | {"T2": 5 - len(ours)})
    sweep(base.evict(slots=ours), tiny_llama.prefill(shorter))
