"""Which slots stay under each policy, by loops over slots written from its docstring; helpers for tests."""

import cmath
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from kvprobe.cache.rotary import Rotary
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.policies import (
    H2O,
    TOVA,
    Attention,
    Guard,
    HeadBudgets,
    LayerBudgets,
    MaskSpans,
    Policy,
    PruneToolResults,
    Quantise,
    RestartInPlace,
    RestartRebuilt,
    Scene,
    SinkWindow,
    SlidingWindow,
    SnapKV,
    ZeroValues,
)
from kvprobe.policies.guard import Sound
from tests.random_caches import NAMES, random_cache, random_tokens

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
    return newest(live_at(scene, place), policy.slots)


def sinks_by_loop(policy: SinkWindow, scene: Scene, place: Place) -> Slots:
    live = live_at(scene, place)
    return set(live[: policy.sinks]) | newest(live, policy.slots)


def h2o_worth(policy: H2O, scene: Scene, place: Place) -> Callable[[int], float]:
    recent = newest(live_at(scene, place), policy.slots // 2 if policy.recent is None else policy.recent)
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
        at = live.index(slot)
        return max(paid[other] for other in live[max(0, at - reach) : at + reach + 1] if other not in window)

    return worth


WORTH: dict[type[Policy], Callable[..., Callable[[int], float]]] = {
    H2O: h2o_worth,
    TOVA: tova_worth,
    SnapKV: snapkv_worth,
}


def scored_by_loop(policy: Any, scene: Scene, place: Place) -> Slots:
    return best(live_at(scene, place), WORTH[type(policy)](policy, scene, place), policy.slots)


PROTECTED: dict[type[Policy], Callable[..., int]] = {
    H2O: lambda policy: policy.slots // 2 if policy.recent is None else policy.recent,
    TOVA: lambda policy: 0,
    SnapKV: lambda policy: policy.window,
}


def pyramid_by_hand(layers: int, budget: int, window: int, beta: int, length: int, once: bool) -> list[int]:
    """The slots of each layer as PyramidKV's code has them, written from its description: the last layer is given a
    share of what is chosen beside the window, the first as much as brings their mean back, and layers between them fall
    in whole steps. Short prompts are cut to the same budget everywhere."""
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
    inner, length = policy.policy, max(len(live_at(scene, other)) for other in places(scene) if other[1] == place[1])
    window = PROTECTED[type(inner)](inner)
    counts = pyramid_by_hand(scene.cache.n_layers, inner.slots, window, policy.beta, length, inner.every is None)
    return best(live_at(scene, place), WORTH[type(inner)](inner, scene, place), counts[place[0]])


def ada_by_hand(scores: list[list[float]], choose: int, floor: float) -> list[int]:
    """How many of its slots each head keeps, as Ada-KV's code has it, beside its window: its number among the best of
    all heads, drawn towards an equal share, and rounded."""
    if choose > len(scores[0]):
        return [len(head) for head in scores]
    ranked = sorted(((score, head) for head, row in enumerate(scores) for score in row), reverse=True)
    among = [0] * len(scores)
    for _, head in ranked[: choose * len(scores)]:
        among[head] += 1
    return [round(number * (1 - floor) + int(choose * floor)) for number in among]


def heads_by_loop(policy: Any, scene: Scene, place: Place) -> Slots:
    layer, row, this_head = place
    inner, heads = policy.policy, range(scene.cache.n_kv_heads)
    worth = {head: WORTH[type(inner)](inner, scene, (layer, row, head)) for head in heads}
    live = {head: live_at(scene, (layer, row, head)) for head in heads}
    protected = {head: {slot for slot in live[head] if worth[head](slot) == float("inf")} for head in heads}
    free = {head: [slot for slot in live[head] if slot not in protected[head]] for head in heads}
    budgets = {head: inner.slots - len(protected[head]) for head in heads}
    if sum(budgets.values()) >= sum(map(len, free.values())):
        return set(live[this_head])
    ranked = sorted(((worth[head](slot), slot, head) for head in heads for slot in free[head]), reverse=True)
    among = [head for _, _, head in ranked[: sum(budgets.values())]]
    share = {head: round(among.count(head) * (1 - policy.floor) + int(budgets[head] * policy.floor)) for head in heads}
    if PROTECTED[type(inner)](inner) == 0:
        share = {head: max(1, count) for head, count in share.items()}
    kept = {head: best(free[head], worth[head], share[head]) for head in heads}
    lacking = sum(max(0, share[head] - len(free[head])) for head in heads)
    for _, slot, head in [candidate for candidate in ranked if candidate[1] not in kept[candidate[2]]][:lacking]:
        kept[head].add(slot)
    return protected[this_head] | kept[this_head]


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
    text = [slot for slot in live_at(scene, place) if not bool(ledger.delimiters[row, slot])]
    held = dict.fromkeys(NAMES[int(ledger.segments[row, slot])] for slot in text)
    results = [name for name in held if name.startswith(policy.prefix)]
    gone = results[: max(0, len(results) - policy.keep_last)]
    return {
        slot
        for slot in live_at(scene, place)
        if NAMES[int(ledger.segments[row, slot])] not in gone or bool(ledger.delimiters[row, slot])
    }


def all_by_loop(policy: Policy, scene: Scene, place: Place) -> Slots:
    return set(live_at(scene, place))


def guard_by_loop(policy: Guard, scene: Scene, place: Place) -> Slots:
    return {slot for slot in live_at(scene, place) if worst_by_loop(policy.sound, scene, place[1], slot) <= LIMIT}


def worst_by_loop(sound: Any, scene: Scene, row: int, slot: int) -> float:
    """How far a slot's worst number is away from first slots or from the others, whichever is nearer, number by number;
    pairs of a key are turned back as complex numbers."""
    cache, worst = scene.cache, [0.0, 0.0]
    origin = int(cache.ledger.origins[row, slot])
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            key = cache.keys[layer][row, head, slot].tolist()
            half = len(key) // 2
            turned = [complex(*pair) * cmath.exp(-1j * origin * f) for pair, f in
                      zip(zip(key[:half], key[half:], strict=True), FREQUENCIES, strict=True)]  # fmt: skip
            numbers = [z.real for z in turned] + [z.imag for z in turned]
            numbers += cache.values[layer][row, head, slot].tolist()
            for channel, number in enumerate(numbers):
                for kind in (0, 1):
                    middle, span = (float(kinds[layer][kind, head, channel]) for kinds in (sound.middles, sound.ranges))
                    worst[kind] = max(worst[kind], abs(number - middle) / span)
    return min(worst)


FREQUENCIES, LIMIT = (1.0, 0.1), 1.4
GUARD = Guard(
    replace(
        Sound.of([random_cache(seed, 1, 12) for seed in range(8)], [Rotary(torch.tensor(FREQUENCIES))] * 3, 0.2),
        limit=LIMIT,
    )
)
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
    (GUARD, guard_by_loop),
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
    """The policy leaves these slots, in order and as they were; others are gone or dead; positions follow its position
    mode."""
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
        turns = old.positions[row, held] - old.origins[row, held]
        if policy.mode == "naive":
            assert (new.positions[row, : len(held)] - new.origins[row, : len(held)]).tolist() == turns.tolist()
        else:
            assert new.origins[row, : len(held)].tolist() == old.origins[row, held].tolist()
        for layer, head in {(place[0], place[2]) for place in kept}:
            alive = [held.index(slot) for slot in sorted(kept[layer, row, head])]
            assert live_at(Scene(after), (layer, row, head)) == alive
        if not isinstance(policy, Quantise | ZeroValues):
            for new_tensor, tensor in zip(
                after.keys + after.values, before.cache.keys + before.cache.values, strict=True
            ):
                assert torch.equal(new_tensor[row][:, : len(held)], tensor[row][:, held])


def live_counts(scene: Scene) -> torch.Tensor:
    return scene.live.sum(3)


def assert_budget_of_five_is_held(model: Model, policy: Policy) -> None:
    generation = generate(model.lanes, [random_tokens(0, {"T1": 10})], max_new_tokens=5, stop=(), policy=policy)
    shape = model.geometry
    for kept in generation.trace:
        live = kept.ledger.live.expand(shape.n_layers, -1, shape.n_kv_heads, -1)
        assert int(live.sum()) == 5 * shape.n_layers * shape.n_kv_heads
