"""Chains of policies, and when their members act."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.models.unproved import Lane
from kvprobe.policies import (
    H2O,
    TOVA,
    Chain,
    MaskSpans,
    Policy,
    Quantise,
    RandomEviction,
    SinkWindow,
    SlidingWindow,
    SnapKV,
    ZeroValues,
)
from tests.policies.loops import assert_budget_of_five_is_held, few, record, seeds
from tests.policies.scenes import random_scene
from tests.random_caches import assert_bit_identical, random_tokens

PAIRS = [
    (H2O(6), TOVA(3)),
    (SinkWindow(2, 4), Quantise(2, group=5, tail=1)),
    (MaskSpans("T1"), SlidingWindow(2, mode="contiguous")),
    (H2O(5), SnapKV(3, window=2, kernel=3)),
    (RandomEviction(6, 1), RandomEviction(6, 2)),
    (ZeroValues("T2"), MaskSpans("system")),
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
@given(seed=seeds, batch=st.integers(1, 3))
@few
def test_a_chain_is_its_members_in_turn(first: Policy, second: Policy, seed: int, batch: int):
    scene = random_scene(seed, batch, 10)
    chained, expected = (first | second).act(scene), second.act(first.act(scene))
    assert_bit_identical(chained.cache, expected.cache)
    assert chained.attention is not None
    assert torch.equal(chained.attention.total, record(expected).total)


def test_chains_of_chains_are_chains_and_observe_what_their_members_observe():
    window, snap, h2o = SlidingWindow(4), SnapKV(8, window=5), H2O(6)
    assert (window | snap) | h2o == window | (snap | h2o) == Chain((window, snap, h2o))
    assert (window | snap | h2o).observes == 5
    assert (window | h2o).observes == 0
    assert (window | window).observes is None
    assert str(window | h2o) == "SlidingWindow(window=4) | H2O(budget=6)"


def slots_traced(model: Model, policy: Policy, lane: Lane | str = "auto", count: int = 9) -> list[int]:
    """Slots held at each step of a generation from a prompt of ten tokens."""
    generation = generate(
        model.lanes, [random_tokens(0, {"T1": 10})], max_new_tokens=count, stop=(), policy=policy, lane=lane
    )
    assert [kept.step for kept in generation.trace] == list(range(count))
    return [kept.ledger.slots for kept in generation.trace]


def test_a_policy_acts_after_the_prompt_and_then_every_so_many_tokens(tiny_llama: Model):
    assert slots_traced(tiny_llama, SlidingWindow(5)) == [5] * 9
    assert slots_traced(tiny_llama, SlidingWindow(5, every=3)) == [5, 6, 7, 5, 6, 7, 5, 6, 7]
    assert slots_traced(tiny_llama, SlidingWindow(5, every=None)) == list(range(5, 14))
    assert slots_traced(tiny_llama, SlidingWindow(30)) == list(range(10, 19))


def test_the_members_of_a_chain_keep_their_own_pace(tiny_llama: Model):
    chain = SlidingWindow(8, every=4) | RandomEviction(4, 0, every=None) | SlidingWindow(6, every=3)
    assert slots_traced(tiny_llama, chain) == [4, 5, 6, 6, 7, 8, 6, 7, 8]


def test_a_chain_that_scores_holds_its_budget_with_any_model(tiny: Model):
    assert_budget_of_five_is_held(tiny, H2O(6) | TOVA(5))
