"""Named policies hold their budgets, on a cache of noise."""

from dataclasses import replace

import pytest
import torch

from kvprobe.cache.footprint import footprint
from kvprobe.policies import Scene
from kvprobe.policies.catalogue import CATALOGUE, SINKS, WINDOW
from kvprobe.policies.policy import acting
from tests.policies.scenes import random_scene
from tests.random_caches import assert_bit_identical

SLOTS = 160
EVICTING = [name for name, policy in CATALOGUE.items() if not policy.rounds]


@pytest.fixture(scope="module")
def scene() -> Scene:
    """A conversation whose last queries, as many as SnapKV looks at, were watched."""
    drawn = random_scene(1, batch=1, slots=SLOTS)
    assert drawn.attention is not None
    recent = torch.rand(*drawn.attention.total.shape[:3], WINDOW, SLOTS, generator=torch.Generator().manual_seed(0))
    return replace(drawn, attention=replace(drawn.attention, recent=recent), samples=(0,))


def acted(scene: Scene, name: str, level: int) -> Scene:
    for part in acting(CATALOGUE[name].at(level, SLOTS), 0):
        scene = part.act(scene)
    return scene


@pytest.mark.parametrize("name", EVICTING)
def test_a_policy_that_may_keep_everything_changes_nothing(scene: Scene, name: str):
    assert_bit_identical(acted(scene, name, 100).cache, scene.cache)


@pytest.mark.parametrize("name", [*EVICTING, "sinks-quantised"])
@pytest.mark.parametrize("level", [10, 20, 50])
def test_a_budget_is_the_share_of_memory_that_is_kept(scene: Scene, name: str, level: int):
    cache, budget = acted(scene, name, level).cache, round(level * SLOTS / 100)
    whole = footprint(scene.cache.ledger, scene.cache.shape, 2)
    kept = footprint(cache.ledger, cache.shape, 2) / whole * SLOTS
    if name == "pyramidkv":  # its published steps between layers are rounded down
        assert budget <= kept <= budget + (cache.n_layers - 2) / 2
    elif name == "adakv":  # its published shares of heads are rounded
        assert budget - 1.5 <= kept <= budget + 0.5
    elif name in EVICTING:
        assert kept == pytest.approx(budget, rel=1e-9)
    else:
        assert kept <= budget


def test_fewer_bits_take_less_memory(scene: Scene):
    caches = [acted(scene, "quantise", bits).cache for bits in CATALOGUE["quantise"].bits]
    taken = [footprint(cache.ledger, cache.shape, 2) for cache in caches]
    assert taken == sorted(set(taken), reverse=True)


def test_the_baseline_that_spares_sinks_differs_in_nothing_else(scene: Scene):
    spared, drawn = (acted(scene, name, 20).cache.ledger.origins[0].tolist() for name in ("random-sinks", "random"))
    assert spared[:SINKS] == list(range(SINKS))
    assert len(spared) == len(drawn)
    assert set(spared[SINKS:]) <= set(drawn)
