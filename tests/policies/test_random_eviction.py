"""Random eviction draws uniformly and reproducibly."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.editing import concatenate
from kvprobe.policies import RandomEviction, Scene
from tests.models import any_model
from tests.policies.loops import best, few, live_at, places, seeds
from tests.policies.scenes import empty_cache, random_scene, scenes, with_token
from tests.random_caches import random_tokens


def drawn(rows: int, slots: int, policy: RandomEviction, seed: int = 0) -> torch.Tensor:
    """Which positions stay in each row."""
    scene = replace(random_scene(seed, rows, slots), attention=None)
    return policy.act(scene).cache.ledger.positions


def chi_square(counts: torch.Tensor, draws: int, kept: int) -> float:
    """Of how often each of some slots was among the `kept` of `draws` draws without replacement; n − 1 degrees."""
    slots = len(counts)
    expected = draws * kept / slots
    return float(((counts - expected) ** 2).sum() / expected / (1 - kept / slots) * (slots - 1) / slots)


CHI_SQUARE_9, CHI_SQUARE_19 = 27.9, 43.8  # exceeded by chance once in a thousand


def test_random_eviction_draws_every_slot_equally_often():
    counts = drawn(1500, 10, RandomEviction(3, seed=0)).flatten().bincount(minlength=10)
    assert int(counts.sum()) == 4500
    assert chi_square(counts, 1500, 3) < CHI_SQUARE_9


def test_random_eviction_per_head_draws_each_head_independently():
    live = RandomEviction(3, seed=0, per_head=True).act(random_scene(0, 300, 10)).cache.ledger.live
    assert not bool((live == live[:1, :, :1]).all())
    scene = random_scene(0, 300, 10)
    kept = RandomEviction(3, seed=0, per_head=True).keep(scene)
    assert chi_square(kept.sum((0, 1, 2)), 3 * 300 * 2, 3) < CHI_SQUARE_9
    # Heads agree on a slot as often as chance has it: 3 of 10, squared, summed over slots.
    for one, other in (((0, 0), (2, 0)), ((1, 0), (1, 1)), ((0, 0), (2, 1))):
        agreed = (kept[one[0], :, one[1]] & kept[other[0], :, other[1]]).sum(1).float()
        assert abs(float(agreed.mean()) - 0.9) < 4 * float(agreed.std()) / 300**0.5


@given(scene=scenes(), sinks=st.integers(0, 4), per_head=st.booleans())
@few
def test_random_eviction_spares_the_sinks_and_draws_the_rest_as_without_them(scene: Scene, sinks: int, per_head: bool):
    kept = RandomEviction(4, 7, per_head=per_head, sinks=sinks).keep(scene)
    drawn = RandomEviction(1, 7, per_head=per_head).scores(scene)
    for place in places(scene):
        live = live_at(scene, place)
        expected = set(live[:sinks]) | best(live[sinks:], lambda slot, p=place: float(drawn[p][slot]), 4 - sinks)
        assert set(torch.nonzero(kept[place])[:, 0].tolist()) == expected


def test_random_eviction_is_the_same_in_all_layers_and_heads_unless_asked_otherwise():
    assert RandomEviction(3, seed=0).act(random_scene(0)).cache.ledger.uniform


def test_random_eviction_depends_on_seed_and_sample_alone():
    base = drawn(20, 12, RandomEviction(4, seed=1))
    assert torch.equal(drawn(20, 12, RandomEviction(4, seed=1), seed=9), base)
    assert not torch.equal(drawn(20, 12, RandomEviction(4, seed=2)), base)
    assert len({tuple(row) for row in base.tolist()}) > 10


@given(seed=seeds, order=st.permutations(range(4)), per_head=st.booleans())
@few
def test_a_rows_draw_does_not_depend_on_the_rows_beside_it(seed: int, order: list[int], per_head: bool):
    scene = random_scene(seed, 4, 10, padded=True)
    policy = RandomEviction(3, seed=5, per_head=per_head)
    together = policy.keep(replace(scene, samples=(7, 8, 9, 10)))
    shuffled = Scene(scene.cache.rows(order), samples=tuple(7 + row for row in order))
    assert torch.equal(policy.keep(shuffled), together[:, order])
    for row in range(4):
        alone = policy.keep(Scene(scene.cache.rows([row]), samples=(7 + row,)))
        assert torch.equal(alone, together[:, row : row + 1])


def test_random_eviction_is_a_uniform_draw_from_all_slots_so_far_at_every_step():
    policy, rows, read = RandomEviction(4, seed=3), 400, 20
    cache = empty_cache(rows)
    kept_before: list[set[int]] = [set() for _ in range(rows)]
    for token in range(read):
        cache = policy.act(Scene(with_token(cache, token))).cache
        kept = [set(row) for row in cache.ledger.tokens.tolist()]
        assert all(now <= before | {token} for now, before in zip(kept, kept_before, strict=True))
        kept_before = kept
    assert cache.slots == 4
    assert chi_square(cache.ledger.tokens.flatten().bincount(minlength=read), rows, 4) < CHI_SQUARE_19


@given(scene=scenes(), budget=st.integers(1, 5), per_head=st.booleans())
@few
def test_random_evictions_of_several_budgets_are_nested(scene: Scene, budget: int, per_head: bool):
    small, large = (RandomEviction(count, 4, per_head=per_head).keep(scene) for count in (budget, budget + 2))
    assert not bool((small & ~large).any())


@pytest.mark.parametrize("edit", ["splice", "reindex"])
def test_slots_that_were_computed_at_one_position_are_drawn_apart(edit: str):
    """Documents that were read by themselves, and tokens read after gaps were closed: half of 8 slots stay, and by
    chance both of a pair in 3 of 14 draws."""
    model = any_model()
    if edit == "splice":
        cache = concatenate([model.prefill(random_tokens(seed, {"T1": 4})) for seed in range(2)])
    else:
        late = model.prefill(random_tokens(0, {"T1": 8})).evict(slots=range(4)).reindex()
        cache = model.extend(late, random_tokens(1, {"T2": 4}, start=4))[0]
    assert cache.ledger.origins.tolist()[0][:4] == cache.ledger.origins.tolist()[0][4:]
    kept = RandomEviction(4, seed=0).keep(Scene(cache.fork(2000)))[0, :, 0]
    both = (kept[:, :4] & kept[:, 4:]).float()
    assert abs(float(both.mean()) - 3 / 14) < 0.03
