"""Properties of all policies, over the registries `POLICIES` and `SPANS`."""

from dataclasses import replace
from inspect import isabstract

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import policies
from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import prefill
from kvprobe.inference.model import Model
from kvprobe.inference.under_policy import apply
from kvprobe.policies import (
    H2O,
    TOVA,
    Attention,
    Chain,
    HeadBudgets,
    LayerBudgets,
    Policy,
    RandomEviction,
    Scene,
    Scored,
    SinkWindow,
    SlidingWindow,
    SnapKV,
)
from kvprobe.text.tokens import Tokens
from tests.policies.loops import (
    POLICIES,
    SPANS,
    Loop,
    assert_acted,
    assert_budget_of_five_is_held,
    expected_kept,
    few,
    live_counts,
    named,
    record,
    seeds,
)
from tests.policies.scenes import random_scene, scenes
from tests.random_caches import assert_bit_identical


def test_the_registries_hold_every_policy():
    exported = [kind for kind in vars(policies).values() if isinstance(kind, type) and issubclass(kind, Policy)]
    tested = {type(policy) for policy, _ in (*POLICIES, *SPANS)} | {Chain, RandomEviction}
    assert tested == {kind for kind in exported if not isabstract(kind)}


@pytest.mark.parametrize(("policy", "loop"), POLICIES, ids=named)
@given(scene=scenes())
@few
def test_a_policy_keeps_what_a_loop_over_slots_keeps(policy: Policy, loop: Loop, scene: Scene):
    assert_acted(policy, scene, expected_kept(policy, loop, scene))


@pytest.mark.parametrize(("policy", "loop"), POLICIES, ids=named)
def test_slots_that_are_dead_everywhere_are_treated_as_in_the_loop(policy: Policy, loop: Loop):
    scene = random_scene(0, slots=12, ragged=True)
    dead = torch.zeros(2, 12, dtype=torch.bool)
    dead[0, 0] = dead[1, 7] = True
    scene = scene.with_cache(scene.cache.mask(slots=dead))
    assert_acted(policy, scene, expected_kept(policy, loop, scene))


@pytest.mark.parametrize(("policy", "loop"), SPANS, ids=named)
@given(seed=seeds, batch=st.integers(1, 3), gaps=st.booleans())
@few
def test_spans_are_dropped_as_by_a_loop_over_slots(policy: Policy, loop: Loop, seed: int, batch: int, gaps: bool):
    scene = random_scene(seed, batch, gaps=gaps)
    assert_acted(policy, scene, expected_kept(policy, loop, scene))


@pytest.mark.parametrize(("policy", "loop"), [*POLICIES, *SPANS], ids=named)
def test_rows_that_have_ended_stay_as_they_are(policy: Policy, loop: Loop):
    scene = random_scene(0, slots=12)

    def held(cache: KVCache, row: int) -> list[torch.Tensor]:
        live = cache.ledger.live.expand(cache.n_layers, -1, cache.n_kv_heads, -1)[:, row]
        pairs = zip((*cache.keys, *cache.values), (*live, *live), strict=True)
        return [tensor[row][at] for tensor, at in pairs] + [cache.ledger.positions[row, live.any((0, 1))]]

    acted, ended = (policy.act(replace(scene, ended=rows)).cache for rows in ((), (1,)))
    assert all(map(torch.equal, held(ended, 0), held(acted, 0)))
    assert all(map(torch.equal, held(ended, 1), held(scene.cache, 1)))


@given(scene=scenes(), count=st.integers(1, 6), mode=st.sampled_from(["gapped", "contiguous", "naive"]))
@few
def test_the_record_of_attention_follows_its_slots(scene: Scene, count: int, mode: str):
    after = H2O(count, mode=mode).act(scene)
    for row in range(scene.cache.batch):
        old, new = scene.cache.ledger, after.cache.ledger
        held = [int(slot) for slot in torch.nonzero(~new.padding[row])[:, 0]]
        # Noise tells slots apart: the key of a slot is like no other.
        twins = (after.cache.keys[0][row, 0, held][:, None] == scene.cache.keys[0][row, 0]).all(-1).nonzero()[:, 1]
        assert twins.shape == (len(held),)
        assert torch.equal(record(after).total[:, row][..., held], record(scene).total[:, row][..., twins])
        assert torch.equal(record(after).recent[:, row][..., held], record(scene).recent[:, row][..., twins])
        assert not bool(record(after).total[:, row][..., len(held) :].any())
        assert old.names == new.names


@pytest.mark.parametrize(
    "policy", [H2O(4), TOVA(4), SnapKV(4, window=2, kernel=3), RandomEviction(4, 0, per_head=True)]
)
@given(scene=scenes())
@few
def test_a_budget_is_met_exactly_where_there_are_enough_slots(policy: Scored, scene: Scene):
    assert torch.equal(live_counts(policy.act(scene)), live_counts(scene).clamp(max=4))


@pytest.mark.parametrize(
    "policy", [H2O(3, recent=0), TOVA(3), SnapKV(3, window=1, kernel=1), HeadBudgets(TOVA(3), 0.0)]
)
def test_the_newest_of_equal_slots_stays(policy: Policy):
    scene = random_scene(0, batch=1, slots=8)
    same = Attention(torch.ones_like(record(scene).total), torch.ones_like(record(scene).recent))
    after = policy.act(replace(scene, attention=same))
    assert after.cache.ledger.positions[0].tolist() == [5, 6, 7]


def test_a_policy_prints_as_it_is_constructed():
    assert str(SlidingWindow(4, mode="contiguous", every=3)) == "SlidingWindow(mode=contiguous, every=3, window=4)"


@pytest.mark.parametrize("policy", [H2O(5), TOVA(5), LayerBudgets(H2O(5)), HeadBudgets(TOVA(5))], ids=str)
def test_policies_that_score_hold_their_budget_through_a_generation(tiny_gemma: Model, policy: Policy):
    assert_budget_of_five_is_held(tiny_gemma, policy)


def test_a_head_that_was_empty_before_does_not_stop_a_policy():
    scene = random_scene(0)
    gone = torch.ones(2, 9, dtype=torch.bool)
    cache = scene.cache.mask(slots=gone, layers=[1], heads=[0])
    after = SlidingWindow(3).act(Scene(cache))
    assert live_counts(after)[:, 0].tolist() == [[3, 3], [0, 3], [3, 3]]


def test_acting_does_not_change_the_scene(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [Tokens.of(list(range(9)), "T1")])
    before = cache.reindex("gapped")
    apply(tiny_llama.lanes, SinkWindow(1, 3) | RandomEviction(2, 0, every=None), Scene(cache))
    assert_bit_identical(cache, before)
