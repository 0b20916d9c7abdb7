"""Who stays under each policy, against loops over slots written from its docstring; when it acts; what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import UserError
from kvprobe.inference.forward import prefill
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.under_policy import apply
from kvprobe.models.unproved import Lane
from kvprobe.policies import (
    H2O,
    TOVA,
    Attention,
    Chain,
    HeadBudgets,
    LayerBudgets,
    MaskSpans,
    Policy,
    PruneToolResults,
    Quantise,
    RandomEviction,
    RestartInPlace,
    RestartRebuilt,
    Scene,
    Scored,
    SinkWindow,
    SlidingWindow,
    SnapKV,
    ZeroValues,
)
from kvprobe.text.transcript import Tokens
from tests.policies.scenes import empty_cache, random_scene, scenes, with_token
from tests.random_caches import NAMES, assert_bit_identical, random_tokens

seeds = st.integers(0, 2**31)
few = settings(max_examples=15)

Slots = set[int]
Place = tuple[int, int, int]
"""A layer, a row and a KV head."""


def places(scene: Scene) -> list[Place]:
    cache = scene.cache
    return [
        (layer, row, head)
        for layer in range(cache.n_layers)
        for row in range(cache.batch)
        for head in range(cache.n_kv_heads)
    ]


def live_at(scene: Scene, place: Place) -> list[int]:
    """The live slots of a layer, row and head, oldest first."""
    layer, row, head = place
    live = scene.cache.ledger.live
    where = live[layer if live.shape[0] > 1 else 0, row, head if live.shape[2] > 1 else 0]
    return [slot for slot, alive in enumerate(where.tolist()) if alive]


def best(slots: list[int], worth: Callable[[int], float], count: int) -> Slots:
    """The slots of highest worth; of equals, the newer."""
    return set(sorted(slots, key=lambda slot: (worth(slot), slot), reverse=True)[: max(0, count)])


def newest(slots: list[int], count: int) -> Slots:
    return set(slots[max(0, len(slots) - count) :])


def record(scene: Scene) -> Attention:
    assert scene.attention is not None
    return scene.attention


def named(given: Any) -> str:
    """The same in each process, which a function's address is not."""
    return getattr(given, "__name__", None) or str(given)


def window_by_loop(policy: SlidingWindow, scene: Scene, place: Place) -> Slots:
    return newest(live_at(scene, place), policy.window)


def sinks_by_loop(policy: SinkWindow, scene: Scene, place: Place) -> Slots:
    live = live_at(scene, place)
    return set(live[: policy.sinks]) | newest(live, policy.window)


def h2o_worth(policy: H2O, scene: Scene, place: Place) -> Callable[[int], float]:
    recent = newest(live_at(scene, place), policy.budget // 2 if policy.recent is None else policy.recent)
    return lambda slot: float("inf") if slot in recent else float(record(scene).total[place][slot])


def tova_worth(policy: TOVA, scene: Scene, place: Place) -> Callable[[int], float]:
    layer, row, _ = place
    return lambda slot: sum(float(paid) for paid in record(scene).recent[layer, row, :, -1, slot])


def snapkv_worth(policy: SnapKV, scene: Scene, place: Place) -> Callable[[int], float]:
    live = live_at(scene, place)
    window = newest(live, policy.window)
    paid = {slot: float(record(scene).recent[place][-policy.window :, slot].sum()) for slot in live}
    reach = policy.kernel // 2

    def worth(slot: int) -> float:
        if slot in window:
            return float("inf")
        return max(paid[other] for other in live if other not in window and abs(other - slot) <= reach)

    return worth


WORTH: dict[type[Policy], Callable[..., Callable[[int], float]]] = {
    H2O: h2o_worth,
    TOVA: tova_worth,
    SnapKV: snapkv_worth,
}


def scored_by_loop(policy: Any, scene: Scene, place: Place) -> Slots:
    return best(live_at(scene, place), WORTH[type(policy)](policy, scene, place), policy.budget)


PROTECTED: dict[type[Policy], Callable[..., int]] = {
    H2O: lambda policy: policy.budget // 2 if policy.recent is None else policy.recent,
    TOVA: lambda policy: 0,
    SnapKV: lambda policy: policy.window,
}


def pyramid_by_hand(layers: int, budget: int, window: int, beta: int, length: int, once: bool) -> list[int]:
    """The slots of each layer as PyramidKV's code has them, written from its description: the last layer is given a share of
    what is chosen beside the window, the first as much as brings their mean back, and layers between them fall in whole
    steps. Short prompts are cut to the same budget everywhere."""
    choose = budget - window
    if length < budget or layers == 1 or (once and length < choose * 2):
        return [budget] * layers
    smallest = choose // beta
    largest = choose * 2 - smallest
    if largest >= length - window:
        largest = length - window
        smallest = choose * 2 - largest
    step = (largest - smallest) // (layers - 1)
    return [max(1, largest - step * layer + window) for layer in range(layers)]


def layers_by_loop(policy: Any, scene: Scene, place: Place) -> Slots:
    inner, length = policy.policy, max(len(live_at(scene, each)) for each in places(scene) if each[1] == place[1])
    window = PROTECTED[type(inner)](inner)
    counts = pyramid_by_hand(scene.cache.n_layers, inner.budget, window, policy.beta, length, inner.every is None)
    return best(live_at(scene, place), WORTH[type(inner)](inner, scene, place), counts[place[0]])


def ada_by_hand(scores: list[list[float]], choose: int, floor: float) -> list[int]:
    """How many of its slots each head keeps, as Ada-KV's code has it, beside its window: its number among the best of all heads,
    drawn towards an equal share, and rounded."""
    if choose > len(scores[0]):
        return [len(head) for head in scores]
    ranked = sorted(((score, head) for head, row in enumerate(scores) for score in row), reverse=True)
    among = [0] * len(scores)
    for _, head in ranked[: choose * len(scores)]:
        among[head] += 1
    return [round(number * (1 - floor) + int(choose * floor)) for number in among]


def heads_by_loop(policy: Any, scene: Scene, place: Place) -> Slots:
    layer, row, own = place
    inner, heads = policy.policy, range(scene.cache.n_kv_heads)
    worth = {head: WORTH[type(inner)](inner, scene, (layer, row, head)) for head in heads}
    live = {head: live_at(scene, (layer, row, head)) for head in heads}
    protected = {head: {slot for slot in live[head] if worth[head](slot) == float("inf")} for head in heads}
    free = {head: [slot for slot in live[head] if slot not in protected[head]] for head in heads}
    budgets = {head: inner.budget - len(protected[head]) for head in heads}
    if sum(budgets.values()) >= sum(map(len, free.values())):
        return set(live[own])
    ranked = sorted(((worth[head](slot), slot, head) for head in heads for slot in free[head]), reverse=True)
    among = [head for _, _, head in ranked[: sum(budgets.values())]]
    share = {head: round(among.count(head) * (1 - policy.floor) + int(budgets[head] * policy.floor)) for head in heads}
    if PROTECTED[type(inner)](inner) == 0:
        share = {head: max(1, count) for head, count in share.items()}
    kept = {head: best(free[head], worth[head], share[head]) for head in heads}
    lacking = sum(max(0, share[head] - len(free[head])) for head in heads)
    for _, slot, head in [each for each in ranked if each[1] not in kept[each[2]]][:lacking]:
        kept[head].add(slot)
    return protected[own] | kept[own]


def spans_by_loop(policy: Any, scene: Scene, place: Place) -> Slots:
    ledger, row = scene.cache.ledger, place[1]
    return {
        slot
        for slot in live_at(scene, place)
        if NAMES[int(ledger.segments[row, slot])] not in policy.names
        or (policy.delimiters == "kept" and bool(ledger.delimiters[row, slot]))
    }


def tools_by_loop(policy: PruneToolResults, scene: Scene, place: Place) -> Slots:
    ledger, row = scene.cache.ledger, place[1]
    results = [name for name in NAMES if name.startswith(policy.prefix)]
    gone = results[: max(0, len(results) - policy.keep_last)]
    return {
        slot
        for slot in live_at(scene, place)
        if NAMES[int(ledger.segments[row, slot])] not in gone or bool(ledger.delimiters[row, slot])
    }


def all_by_loop(policy: Policy, scene: Scene, place: Place) -> Slots:
    return set(live_at(scene, place))


Loop = Callable[..., Slots]
POLICIES: list[tuple[Policy, Loop]] = [
    (SlidingWindow(1), window_by_loop),
    (SlidingWindow(4), window_by_loop),
    (SinkWindow(0, 3), sinks_by_loop),
    (SinkWindow(2, 3), sinks_by_loop),
    (SinkWindow(2, 1, mode="gapped"), sinks_by_loop),
    (H2O(1), scored_by_loop),
    (H2O(5), scored_by_loop),
    (H2O(4, recent=0, mode="contiguous"), scored_by_loop),
    (H2O(4, recent=4), scored_by_loop),
    (TOVA(3), scored_by_loop),
    (TOVA(1, mode="naive"), scored_by_loop),
    (SnapKV(3, window=3, kernel=3), scored_by_loop),
    (SnapKV(5, window=2, kernel=5), scored_by_loop),
    (SnapKV(5, window=1, kernel=1, mode="contiguous"), scored_by_loop),
    (LayerBudgets(H2O(3)), layers_by_loop),
    (LayerBudgets(TOVA(4), beta=1), layers_by_loop),
    (LayerBudgets(TOVA(4, every=None), beta=3), layers_by_loop),
    (LayerBudgets(SnapKV(5, window=2, kernel=3), beta=2), layers_by_loop),
    (LayerBudgets(SnapKV(4, window=1, kernel=3)), layers_by_loop),
    (HeadBudgets(H2O(3)), heads_by_loop),
    (HeadBudgets(SnapKV(5, window=2, kernel=3), floor=0.0), heads_by_loop),
    (HeadBudgets(TOVA(4), floor=1.0), heads_by_loop),
    (HeadBudgets(H2O(4, recent=1), floor=0.5), heads_by_loop),
    (Quantise(4, group=5, tail=2), all_by_loop),
    (ZeroValues(("T1", "summary")), all_by_loop),
]
SPANS: list[tuple[Policy, Loop]] = [
    (MaskSpans("T1"), spans_by_loop),
    (MaskSpans(("T1", "summary"), delimiters="kept"), spans_by_loop),
    (RestartInPlace("summary"), spans_by_loop),
    (RestartRebuilt(("system",)), spans_by_loop),
    (PruneToolResults(0, prefix="T"), tools_by_loop),
    (PruneToolResults(1, prefix="T", mode="contiguous"), tools_by_loop),
    (PruneToolResults(2, prefix="T"), tools_by_loop),
]


def expected_kept(policy: Policy, loop: Loop, scene: Scene) -> dict[Place, Slots]:
    return {place: loop(policy, scene, place) for place in places(scene)}


def assert_acted(policy: Policy, before: Scene, kept: dict[Place, Slots]) -> None:
    """The policy leaves these slots, in order and as they were; others are gone or dead; positions follow its position mode."""
    after = policy.act(before).cache
    for row in range(before.cache.batch):
        old, new = before.cache.ledger, after.ledger
        held = sorted(set().union(*(slots for place, slots in kept.items() if place[1] == row)))
        if isinstance(policy, Quantise):
            # It rounds where it stands: slots that were dead in every layer and head before stay where they are.
            held = (~old.padding[row]).nonzero()[:, 0].tolist()
        for name in ("tokens", "segments", "recomputed", "delimiters"):
            assert torch.equal(getattr(new, name)[row, : len(held)], getattr(old, name)[row, held]), name
        assert bool(new.padding[row, len(held) :].all())
        positions = old.positions[row, held].tolist() if policy.mode == "gapped" else list(range(len(held)))
        assert new.positions[row, : len(held)].tolist() == positions
        assert new.following[row] == (old.following[row] if policy.mode == "gapped" else len(held))
        origins = positions if policy.mode == "naive" else old.origins[row, held].tolist()
        assert new.origins[row, : len(held)].tolist() == origins
        for layer, head in {(place[0], place[2]) for place in kept}:
            alive = [held.index(slot) for slot in sorted(kept[layer, row, head])]
            assert live_at(Scene(after), (layer, row, head)) == alive
        if not isinstance(policy, Quantise | ZeroValues):
            for found, tensor in zip(after.keys + after.values, before.cache.keys + before.cache.values, strict=True):
                assert torch.equal(found[row][:, : len(held)], tensor[row][:, held])


@pytest.mark.parametrize(("policy", "loop"), POLICIES, ids=named)
@given(scene=scenes())
@few
def test_a_policy_keeps_what_a_loop_over_slots_keeps(policy: Policy, loop: Loop, scene: Scene):
    assert_acted(policy, scene, expected_kept(policy, loop, scene))


@pytest.mark.parametrize(("policy", "loop"), POLICIES, ids=named)
def test_slots_that_were_dead_everywhere_are_met_as_the_loop_meets_them(policy: Policy, loop: Loop):
    scene = random_scene(0, slots=12, ragged=True)
    dead = torch.zeros(2, 12, dtype=torch.bool)
    dead[0, 0] = dead[1, 7] = True
    scene = scene.with_cache(scene.cache.mask(slots=dead))
    assert_acted(policy, scene, expected_kept(policy, loop, scene))


@pytest.mark.parametrize(("policy", "loop"), SPANS, ids=named)
@given(seed=seeds, batch=st.integers(1, 3), gaps=st.booleans())
@few
def test_spans_go_as_a_loop_over_slots_has_it(policy: Policy, loop: Loop, seed: int, batch: int, gaps: bool):
    scene = random_scene(seed, batch, gaps=gaps)
    assert_acted(policy, scene, expected_kept(policy, loop, scene))


@given(scene=scenes(), count=st.integers(1, 6), mode=st.sampled_from(["gapped", "contiguous", "naive"]))
@few
def test_the_record_of_attention_goes_with_its_slots(scene: Scene, count: int, mode: str):
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


def live_counts(scene: Scene) -> torch.Tensor:
    return scene.live.sum(3)


@pytest.mark.parametrize(
    "policy", [H2O(4), TOVA(4), SnapKV(4, window=2, kernel=3), RandomEviction(4, 0, per_head=True)]
)
@given(scene=scenes())
@few
def test_a_budget_is_met_exactly_wherever_there_are_slots_enough(policy: Scored, scene: Scene):
    assert torch.equal(live_counts(policy.act(scene)), live_counts(scene).clamp(max=4))


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
def test_layer_budgets_fall_and_add_up_to_the_whole_but_for_their_rounding(
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
    assert {floor: live_counts(found)[0, 0].tolist() for floor, found in counts.items()} == {
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


def test_head_budgets_give_more_to_heads_that_are_looked_at():
    scene = random_scene(0, batch=1, slots=12)
    record(scene).total[:, :, 0] += 100
    assert live_counts(HeadBudgets(H2O(4, recent=0), floor=0.25).act(scene))[:, 0].tolist() == [[7, 1]] * 3


@pytest.mark.parametrize(
    "policy", [H2O(3, recent=0), TOVA(3), SnapKV(3, window=1, kernel=1), HeadBudgets(TOVA(3), 0.0)]
)
def test_the_newest_of_equal_slots_stays(policy: Policy):
    scene = random_scene(0, batch=1, slots=8)
    same = Attention(torch.ones_like(record(scene).total), torch.ones_like(record(scene).recent))
    after = policy.act(replace(scene, attention=same))
    assert after.cache.ledger.positions[0].tolist() == [5, 6, 7]


def test_slots_that_are_dead_lend_no_weight_to_their_neighbours():
    scene = random_scene(0, batch=1, slots=7)
    record(scene).recent.zero_()
    record(scene).recent[..., 1] = 9.0
    record(scene).recent[..., 4] = 1.0
    gone = torch.arange(7)[None] == 1
    after = SnapKV(2, window=1, kernel=3).act(scene.with_cache(scene.cache.mask(slots=gone)))
    # Of the slots beside the fourth the newest stays: the first, now dead, was looked at more.
    assert after.cache.ledger.positions[0].tolist() == [5, 6]


def test_snapkv_takes_the_neighbours_of_what_was_looked_at():
    scene = random_scene(0, batch=1, slots=12)
    record(scene).recent.zero_()
    record(scene).recent[..., 3] = 1.0
    after = SnapKV(5, window=2, kernel=3).act(scene)
    assert after.cache.ledger.positions[0].tolist() == [2, 3, 4, 10, 11]


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


def test_random_eviction_per_head_draws_every_head_for_itself():
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


def test_random_eviction_depends_on_the_seed_and_the_sample_and_on_nothing_else():
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


def test_random_eviction_is_a_uniform_draw_from_all_slots_so_far_whenever_one_looks():
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
    found, expected = (first | second).act(scene), second.act(first.act(scene))
    assert_bit_identical(found.cache, expected.cache)
    assert found.attention is not None
    assert torch.equal(found.attention.total, record(expected).total)


def test_chains_of_chains_are_chains_and_ask_for_what_their_members_ask():
    window, snap, h2o = SlidingWindow(4), SnapKV(8, window=5), H2O(6)
    assert (window | snap) | h2o == window | (snap | h2o) == Chain((window, snap, h2o))
    assert (window | snap | h2o).observes == 5
    assert (window | h2o).observes == 0
    assert (window | window).observes is None
    assert str(window | h2o) == "SlidingWindow(window=4) | H2O(budget=6)"


def test_a_policy_is_written_as_it_is_made():
    assert str(SlidingWindow(4, mode="contiguous", every=3)) == "SlidingWindow(mode=contiguous, every=3, window=4)"


def slots_traced(model: Model, policy: Policy, lane: Lane | str = "auto", count: int = 9) -> list[int]:
    """Slots held at each step of a generation from a prompt of ten tokens."""
    found = generate(
        model.lanes, [random_tokens(0, {"T1": 10})], max_new_tokens=count, stop=(), policy=policy, lane=lane
    )
    assert [kept.step for kept in found.trace] == list(range(count))
    return [kept.ledger.slots for kept in found.trace]


def test_a_policy_acts_after_the_prompt_and_then_every_so_many_tokens(tiny_llama: Model):
    assert slots_traced(tiny_llama, SlidingWindow(5)) == [5] * 9
    assert slots_traced(tiny_llama, SlidingWindow(5, every=3)) == [5, 6, 7, 5, 6, 7, 5, 6, 7]
    assert slots_traced(tiny_llama, SlidingWindow(5, every=None)) == list(range(5, 14))
    assert slots_traced(tiny_llama, SlidingWindow(30)) == list(range(10, 19))


def test_the_members_of_a_chain_keep_their_own_pace(tiny_llama: Model):
    chain = SlidingWindow(8, every=4) | RandomEviction(4, 0, every=None) | SlidingWindow(6, every=3)
    assert slots_traced(tiny_llama, chain) == [4, 5, 6, 6, 7, 8, 6, 7, 8]


def assert_budget_of_five_is_held(model: Model, policy: Policy) -> None:
    found = generate(model.lanes, [random_tokens(0, {"T1": 10})], max_new_tokens=5, stop=(), policy=policy)
    shape = model.geometry
    for kept in found.trace:
        live = kept.ledger.live.expand(shape.n_layers, -1, shape.n_kv_heads, -1)
        assert int(live.sum()) == 5 * shape.n_layers * shape.n_kv_heads


@pytest.mark.parametrize("policy", [H2O(5), TOVA(5), LayerBudgets(H2O(5)), HeadBudgets(TOVA(5))], ids=str)
def test_policies_that_score_hold_their_budget_through_a_generation(tiny_gemma: Model, policy: Policy):
    assert_budget_of_five_is_held(tiny_gemma, policy)


def test_a_chain_that_scores_holds_its_budget_with_any_model(tiny: Model):
    assert_budget_of_five_is_held(tiny, H2O(6) | TOVA(5))


@pytest.mark.parametrize("wrap", [LayerBudgets, HeadBudgets])
def test_budgets_of_a_policy_that_acts_on_the_prompt_act_on_the_prompt(tiny_llama: Model, wrap: Callable[..., Policy]):
    found = generate(
        tiny_llama.lanes,
        [random_tokens(0, {"T1": 10})],
        max_new_tokens=4,
        stop=(),
        policy=wrap(SnapKV(4, window=2)),
    )
    counts = [int(kept.ledger.live.expand(3, -1, 2, -1).sum()) for kept in found.trace]
    assert counts[0] <= 4 * 6
    assert counts == [counts[0] + step * 6 for step in range(4)]


def refused(call: Callable[[], Any], *said: str) -> None:
    """The call is refused in one sentence that says all this."""
    with pytest.raises(UserError, match=r"^[^\n]*[^ ][.?]$") as refusal:
        call()
    for piece in said:
        assert piece in str(refusal.value)


BAD: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (lambda: SlidingWindow(0), ("SlidingWindow", "window=0", "at least 1")),
    (lambda: SlidingWindow(-3), ("window=-3",)),
    (lambda: SinkWindow(-1, 4), ("SinkWindow", "sinks=-1", "at least 0")),
    (lambda: SinkWindow(2, 0), ("window=0",)),
    (lambda: H2O(0), ("H2O", "budget=0")),
    (lambda: H2O(4, recent=5), ("recent=5", "4")),
    (lambda: H2O(4, recent=-1), ("recent=-1",)),
    (lambda: TOVA(0), ("TOVA", "budget=0")),
    (lambda: SnapKV(8, window=16), ("SnapKV", "budget=8", "at least 16")),
    (lambda: SnapKV(8, window=0), ("window=0",)),
    (lambda: SnapKV(20, kernel=4), ("kernel=4", "odd")),
    (lambda: SnapKV(20, kernel=-1), ("kernel=-1",)),
    (lambda: RandomEviction(0, 0), ("RandomEviction", "budget=0")),
    (lambda: RandomEviction(1, -1), ("seed=-1",)),
    (lambda: RandomEviction(4, 0, mode="contiguous"), ("mode='contiguous'", "every=None")),
    (lambda: RandomEviction(4, 0, sinks=5), ("sinks=5", "0 to 4")),
    (lambda: RandomEviction(4, 0, sinks=-1), ("sinks=-1",)),
    (lambda: LayerBudgets(H2O(4), beta=0), ("LayerBudgets has beta=0", "at least 1")),
    (lambda: HeadBudgets(H2O(4), floor=1.5), ("floor=1.5",)),
    (lambda: HeadBudgets(LayerBudgets(H2O(4))), ("HeadBudgets", "shares of LayerBudgets(policy=H2O(budget=4))")),
    (lambda: RandomEviction(4, 0).act(replace(random_scene(0), samples=(3,))), ("2 rows", "1 sample numbers")),
    (lambda: Quantise(0), ("bits=0", "1 to 8")),
    (lambda: Quantise(9), ("bits=9", "1 to 8")),
    (lambda: Quantise(4, group=0), ("group=0",)),
    (lambda: Quantise(4, tail=-1), ("tail=-1",)),
    (lambda: Quantise(4, mode="contiguous"), ("Quantise moves", "mode")),
    (lambda: Quantise(4, provenance="recomputed"), ("Quantise moves",)),
    (lambda: MaskSpans(()), ("MaskSpans names no segment",)),
    (lambda: RestartRebuilt(""), ("RestartRebuilt names no segment",)),
    (lambda: MaskSpans("T1", delimiters="keep"), ("treatment of delimiters", "'keep'")),
    (lambda: ZeroValues(()), ("ZeroValues names no segment",)),
    (lambda: ZeroValues("T1", provenance="recomputed"), ("ZeroValues writes values",)),
    (lambda: PruneToolResults(-1), ("keep_last=-1",)),
    (lambda: PruneToolResults(1, placeholder=" "), ("empty placeholder",)),
    (lambda: SlidingWindow(4, mode="closed"), ("position mode", "'closed'", "'gapped'")),
    (lambda: SlidingWindow(4, mode="contigous"), ("did you mean 'contiguous'?",)),
    (lambda: SlidingWindow(4, provenance="kept"), ("provenance", "'kept'", "'retained'")),
    (lambda: SlidingWindow(4, every=0), ("every=0", "at least 1")),
    (lambda: MaskSpans("sumary").act(random_scene(0)), ("'sumary'", "did you mean 'summary'?")),
    (lambda: ZeroValues("T3").act(random_scene(0)), ("'T3'",)),
    (lambda: ZeroValues("T1", layers=[3]).act(random_scene(0)), ("beyond the cache's 0 to 2",)),
    (lambda: MaskSpans(NAMES).act(random_scene(0)), ("would leave layer 0, KV head 0 of row 0 without",)),
    (lambda: H2O(4).act(Scene(random_scene(0).cache)), ("H2O needs", "Model.watch")),
    (lambda: (H2O(4) | TOVA(2)).act(Scene(random_scene(0).cache)), ("H2O needs", "Model.watch")),
    (lambda: SnapKV(9, window=6).act(random_scene(0)), ("SnapKV needs", "last 6 queries", "5")),
    (lambda: HeadBudgets(SnapKV(9, window=6)).act(random_scene(0)), ("last 6 queries", "5")),
    (lambda: Quantise(4, group=2, tail=0).act(random_scene(0)), ("Values of 5 numbers", "groups of 2")),
    (
        lambda: (Quantise(4, group=1, tail=0) | Quantise(2, group=1, tail=0)).act(random_scene(0)),
        ("bits=4", "Quantise(bits=2, group=1, tail=0)"),
    ),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[" ".join(said) for _, said in BAD])
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_in_one_sentence(call: Callable[[], Any], said: tuple[str, ...]):
    refused(call, *said)


def test_a_policy_that_scores_is_refused_on_the_plain_lane_by_name(tiny_llama: Model):
    prompt = [random_tokens(0, {"T1": 6})]
    for policy in (H2O(4), SlidingWindow(4) | LayerBudgets(TOVA(4))):
        said = (str(policy), "needs attention scores", "lane='hooked'")
        refused(lambda policy=policy: generate(tiny_llama.lanes, prompt, policy=policy, lane="plain"), *said)
        refused(lambda policy=policy: tiny_llama.prefill(prompt, policy=policy, lane="plain"), *said)
        refused(lambda policy=policy: tiny_llama.prefill(prompt, policy=policy, chunk=2, lane="plain"), *said)


def test_a_policy_that_scores_is_refused_at_a_cut_that_nobody_watched(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 6})])
    refused(lambda: tiny_llama.apply(TOVA(4), cache), "TOVA needs", "Model.watch")
    scene = tiny_llama.watch(random_tokens(0, {"T1": 6}), queries=3)
    refused(lambda: tiny_llama.apply(SnapKV(5, window=4), scene), "last 4 queries")
    assert tiny_llama.apply(SnapKV(5, window=3), scene).ledger.kept.sum() >= 5


@pytest.mark.parametrize("policy", [SinkWindow(1, 3), SlidingWindow(3, mode="contiguous")])
def test_closing_up_learned_positions_is_refused_before_anything_is_done(tiny_models: dict[str, Model], policy: Policy):
    gpt2 = tiny_models["gpt2"]
    cache = prefill(gpt2.lanes, [random_tokens(0, {"T1": 6})])
    refused(lambda: gpt2.apply(policy, cache), "learned positions", "mode='gapped'")
    again = replace(policy, provenance="recomputed")
    assert gpt2.apply(again, cache).ledger.positions[0].tolist() == list(
        range(int(policy.keep(Scene(cache))[0, 0, 0].sum()))
    )


def test_slots_kept_by_some_heads_alone_cannot_be_computed_again(tiny_llama: Model):
    scene = tiny_llama.watch(random_tokens(0, {"T1": 24}))
    refused(lambda: tiny_llama.apply(H2O(6, recent=0, provenance="recomputed"), scene), "different slots", "'retained'")


def test_reading_in_chunks_refuses_rows_that_do_not_end_together(tiny_llama: Model):
    rows = [random_tokens(0, {"T1": 4}), random_tokens(1, {"T1": 5})]
    refused(lambda: tiny_llama.prefill(rows, policy=SlidingWindow(3), chunk=2), "rows of equal length")
    refused(lambda: tiny_llama.prefill(rows[:1], policy=SlidingWindow(3), chunk=0), "chunk=0")
    refused(lambda: tiny_llama.prefill(rows[:1], chunk=2), "give a policy")


def test_a_head_that_was_empty_before_does_not_stop_a_policy():
    scene = random_scene(0)
    gone = torch.ones(2, 9, dtype=torch.bool)
    cache = scene.cache.mask(slots=gone, layers=[1], heads=[0])
    after = SlidingWindow(3).act(Scene(cache))
    assert live_counts(after)[:, 0].tolist() == [[3, 3], [0, 3], [3, 3]]


def test_acting_leaves_the_scene_alone(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [Tokens.of(list(range(9)), "T1")])
    before = cache.reindex("gapped")
    apply(tiny_llama.lanes, SinkWindow(1, 3) | RandomEviction(2, 0), Scene(cache))
    assert_bit_identical(cache, before)
