"""Budgets that differ between layers or heads."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.policies import H2O, Attention, HeadBudgets, LayerBudgets, Policy, SnapKV
from tests.policies.loops import ada_by_hand, live_counts, places, pyramid_by_hand, record, seeds
from tests.policies.scenes import random_scene
from tests.random_caches import random_tokens


@pytest.mark.parametrize(
    ("budget", "window", "beta", "length", "layers", "expected"),
    [
        # Chosen 48, so the last of 31 layers gets 48 // 20 = 2, the first 96 - 2 = 94, the step (94 - 2) // 30 = 3.
        (64, 16, 20, 1000, 31, [110 - 3 * layer for layer in range(31)]),
        (64, 16, 2, 1000, 7, [16 + 72 - 8 * layer for layer in range(7)]),
        # Of 100 slots the first layer can choose 84, so the last gets 96 - 84 = 12.
        (64, 16, 20, 100, 4, [16 + 84 - 24 * layer for layer in range(4)]),
        (64, 16, 20, 96, 4, [16 + 80 - 21 * layer for layer in range(4)]),
        (64, 16, 20, 95, 4, [64] * 4),
        (64, 16, 20, 40, 4, [64] * 4),
        (320, 64, 20, 8000, 32, [64 + 500 - 15 * layer for layer in range(32)]),
        (64, 16, 1, 1000, 4, [64] * 4),
        (64, 16, 20, 1000, 1, [64]),
    ],
)
def test_layer_budgets_are_those_of_pyramidkv(
    budget: int, window: int, beta: int, length: int, layers: int, expected: list[int]
):
    counts = LayerBudgets(SnapKV(budget, window), beta).slot_count.layer_counts(layers, length)
    assert counts == expected == pyramid_by_hand(layers, budget, window, beta, length, once=True)


@given(data=st.data(), layers=st.integers(1, 12), length=st.integers(1, 200), beta=st.integers(1, 30))
@settings(max_examples=100)
def test_layer_budgets_fall_and_add_up_to_the_whole_up_to_rounding(
    data: st.DataObject, layers: int, length: int, beta: int
):
    budget = data.draw(st.integers(1, 40))
    policy = H2O(budget, data.draw(st.integers(0, budget)), every=data.draw(st.sampled_from([None, 1])))
    counts = LayerBudgets(policy, beta).slot_count.layer_counts(layers, length)
    assert min(counts) >= 1
    assert counts == sorted(counts, reverse=True)
    assert max(counts) <= max(length, budget)
    # A layer without any slot keeps one after all.
    assert layers * budget <= sum(counts) <= layers * (budget + max(0, (layers - 2) / 2)) + 1


def test_head_budgets_are_those_of_ada_kv():
    scene = random_scene(0, batch=1, slots=128)
    # The window of 16 stays; of the 96 best of the other slots, 92 are the first head's.
    paid = torch.rand(3, 1, 2, 16, 128, generator=torch.Generator().manual_seed(0))
    paid[:, :, 0, :, :92] += 4
    paid[:, :, 1, :, :4] += 3
    scene = replace(scene, attention=Attention(record(scene).total, paid))
    counts = {floor: HeadBudgets(SnapKV(64, 16, 1), floor).act(scene) for floor in (0.0, 0.2, 0.5, 1.0)}
    assert {floor: live_counts(after)[0, 0].tolist() for floor, after in counts.items()} == {
        0.0: [108, 20],
        0.2: [99, 28],
        0.5: [86, 42],
        1.0: [64, 64],
    }


@given(
    seed=seeds, budget=st.integers(1, 12), window=st.integers(1, 4), floor=st.sampled_from([0.0, 0.2, 0.25, 0.5, 1.0])
)
@settings(max_examples=60)
def test_every_head_keeps_what_ada_kv_gives_it(seed: int, budget: int, window: int, floor: float):
    scene, window = random_scene(seed, slots=12), min(window, budget)
    paid = torch.rand(record(scene).recent.shape, generator=torch.Generator().manual_seed(seed))
    scene = replace(scene, attention=Attention(record(scene).total, paid))
    counts = live_counts(HeadBudgets(SnapKV(budget, window, 1), floor).act(scene))
    scores = paid[..., -window:, : 12 - window].sum(3)
    for layer, row, _ in places(scene):
        shares = ada_by_hand(scores[layer, row].tolist(), budget - window, floor)
        assert (counts[layer, row] - window).tolist() == shares


def test_head_budgets_give_more_to_heads_with_more_attention():
    scene = random_scene(0, batch=1, slots=12)
    record(scene).total[:, :, 0] += 100
    assert live_counts(HeadBudgets(H2O(4, recent=0), floor=0.25).act(scene))[:, 0].tolist() == [[7, 1]] * 3


@pytest.mark.parametrize("wrap", [LayerBudgets, HeadBudgets])
def test_budgets_of_a_policy_that_acts_on_the_prompt_act_on_the_prompt(tiny_llama: Model, wrap: Callable[..., Policy]):
    generation = generate(
        tiny_llama.lanes, [random_tokens(0, {"T1": 10})], max_new_tokens=4, stop=(), policy=wrap(SnapKV(4, window=2))
    )
    counts = [int(kept.ledger.live.expand(3, -1, 2, -1).sum()) for kept in generation.trace]
    assert counts[0] <= 4 * 6
    assert counts == [counts[0] + step * 6 for step in range(4)]
