"""The guard: what it finds is known, it raises as many false alarms as it was asked to, and eviction is exact."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvprobe.cache.cache import KVCache
from kvprobe.cache.rotary import Rotary, Rotation
from kvprobe.inference.guarding import learn
from kvprobe.inference.model import Model, load
from kvprobe.policies import Guard
from kvprobe.policies.guard import Sound
from kvprobe.policies.written import as_policy
from tests.models import any_model, llama
from tests.models.every import tiny
from tests.random_caches import assert_bit_identical, random_cache, random_tokens
from tests.refusals import refused

STRUCK = [3, 7, 20]


@pytest.fixture(scope="module")
def model() -> Model:
    return any_model()


@pytest.fixture(scope="module")
def guard(model: Model) -> Guard:
    return learn(model, [[random_tokens(seed, {"T1": 40})] for seed in range(24)], 0.01)


@pytest.fixture(scope="module")
def sound(model: Model) -> KVCache:
    return model.prefill(random_tokens(100, {"T1": 40}))


def times(cache: KVCache, slots: Sequence[int], factor: float) -> KVCache:
    """The cache with the numbers of these slots so many times as large."""
    factors = torch.ones(cache.slots)
    factors[list(slots)] = factor
    keys, values = (tuple(tensor * factors[:, None] for tensor in part) for part in (cache.keys, cache.values))
    return cache.with_parts({"K": keys, "V": values})


def found(guard: Guard, cache: KVCache) -> list[int]:
    return guard.evicted(cache)[0].nonzero()[:, 0].tolist()


def test_slots_of_numbers_ten_times_too_large_are_all_found_and_none_else(guard: Guard, sound: KVCache):
    assert found(guard, sound) == []
    assert found(guard, times(sound, STRUCK, 10.0)) == STRUCK
    assert found(guard, times(sound, [0], 10.0)) == [0], "a sink is no exception"
    assert found(guard, times(sound, STRUCK, math.nan)) == STRUCK


def test_of_slots_of_sound_caches_as_many_are_evicted_as_was_asked_for():
    rotaries = [Rotary(torch.tensor([1.0, 0.1]))] * 3
    for rate in (0.02, 0.1):
        guard = Guard(Sound.of([random_cache(seed, 1, 100) for seed in range(60)], rotaries, rate))
        alarms = torch.cat([guard.evicted(random_cache(seed, 1, 100)) for seed in range(1000, 1030)])
        deviation = math.sqrt(2 * rate * (1 - rate) / alarms.numel())
        assert abs(float(alarms.float().mean()) - rate) < 4 * deviation


def test_it_leaves_the_cache_that_eviction_by_hand_leaves(model: Model, guard: Guard, sound: KVCache):
    damaged = times(sound, STRUCK, 10.0)
    assert_bit_identical(model.apply(guard, damaged), damaged.evict(slots=STRUCK))
    assert_bit_identical(model.apply(guard, sound), sound)


def test_rows_that_lose_other_slots_read_on_as_alone_even_beside_numbers_that_are_not_finite(
    model: Model, guard: Guard, sound: KVCache
):
    rows = KVCache.join([sound, times(sound, STRUCK, 10.0), times(sound, STRUCK[:1], math.inf)])
    _, together = model.extend(model.apply(guard, rows), [random_tokens(7, {"T2": 3}, 40)] * 3)
    for row, slots in enumerate(([], STRUCK, STRUCK[:1])):
        _, alone = model.extend(sound.evict(slots=slots), [random_tokens(7, {"T2": 3}, 40)])
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-5)


def test_a_slot_is_judged_alike_wherever_it_stands():
    rotary = Rotary(torch.tensor([1.0, 0.1]))
    sound = Sound.of([random_cache(seed, 1, 20) for seed in range(4)], [rotary] * 3, 0.1)
    cache = random_cache(9, 1, 20)
    later = cache.ledger.origins + 57 * (cache.ledger.origins > 0)
    turned = tuple(Rotation.between(rotary, cache.ledger.origins, later).of(keys) for keys in cache.keys)
    moved = replace(cache.with_parts({"K": turned}), ledger=replace(cache.ledger, origins=later, positions=later))
    torch.testing.assert_close(sound.scores(moved), sound.scores(cache), rtol=0, atol=1e-4)


def test_sound_slots_are_sound_wherever_the_ledger_has_them_computed():
    """A naive re-index, and `Model.as_seen`, put other slots at position 0, and move the first to another."""

    def with_sink(seed: int) -> KVCache:
        cache = random_cache(seed, 1, 20)
        sink = torch.zeros(20, 1)
        sink[0] = 50
        return cache.with_parts({part: tuple(held + sink for held in cache.part(part)) for part in ("K", "V")})

    guard = Guard(Sound.of([with_sink(seed) for seed in range(8)], [None] * 3, 0.05))
    cache = with_sink(9)
    alarms = found(guard, cache)
    moved = replace(cache, ledger=replace(cache.ledger, origins=cache.ledger.origins + 5))
    assert found(guard, moved) == alarms
    headless = cache.evict(slots=[0, 1]).reindex("naive")
    assert found(guard, headless) == [slot - 2 for slot in alarms if slot > 1]
    assert found(guard, times(moved, [0], 10.0)) == [0, *alarms]
    assert 0 in found(guard, times(headless, [0], 20.0))


def test_what_was_learnt_is_read_back_from_a_file_that_a_policy_names(guard: Guard, sound: KVCache, tmp_path: Path):
    assert isinstance(guard.sound, Sound)
    guard.sound.save(tmp_path / "guard.safetensors")
    again = as_policy(f"Guard('{tmp_path}/guard.safetensors')")
    assert isinstance(again, Guard)
    damaged = times(sound, STRUCK, 10.0)
    assert torch.equal(again.evicted(damaged), guard.evicted(damaged))
    other = llama(seed=1)
    refused(lambda: again.evicted(other.prefill(random_tokens(0, {"T1": 4}))), "another model")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    refused(lambda: Guard(str(tmp_path / "other.safetensors")), "holds no guard")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "guard.safetensors").read_bytes()[:200])
    refused(lambda: Guard(str(tmp_path / "cut.safetensors")), "truncated")
    refused(lambda: Guard(str(tmp_path / "none.safetensors")), "no file of a guard")


def test_what_cannot_be_learnt_from_or_judged_is_refused():
    caches, rotaries = [random_cache(seed, 1, 20) for seed in range(4)], [None] * 3
    refused(lambda: Sound.of(caches[:3], rotaries), "4 conversations or more")
    refused(lambda: Sound.of(caches, rotaries, 0.01), "of at least 200 in all")
    refused(lambda: Sound.of([cache.evict(slots=[0]) for cache in caches], rotaries, 0.2), "from position 0 on")
    other = random_cache(0, 1, 20, kv_heads=1)
    refused(lambda: Sound.of(caches, rotaries, 0.2).scores(other), "another shape")
    refused(lambda: Sound.of([*caches[:2], other, caches[3]], rotaries, 0.2), "Cache 2", "same model")
    refused(lambda: learn(any_model(), "the bus is late" * 20, 0.2), "this is one")


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nothing_is_learnt_from_numbers_that_are_not_finite(damaged: int, number: float):
    caches = [random_cache(seed, 1, 20) for seed in range(4)]
    caches[damaged] = times(caches[damaged], [5], number)
    refused(lambda: Sound.of(caches, [None] * 3, 0.2), "slot 5", "NaN or infinity")


@pytest.mark.parametrize("foreign", [2, 3])
def test_nothing_is_learnt_from_two_models(model: Model, foreign: int):
    other, tokens = llama(seed=1), [random_tokens(seed, {"T1": 20}) for seed in range(4)]
    caches = [(other if number == foreign else model).prefill(row) for number, row in enumerate(tokens)]
    refused(lambda: Sound.of(caches, model.lanes.rotaries, 0.2), f"Cache {foreign}", "another model")


@pytest.mark.parametrize("kind", ["deepseek_v3", "falcon_h1", "nemotron_h"])
def test_layers_that_store_more_or_less_than_keys_and_values_are_not_judged(kind: str, guard: Guard):
    other = load(tiny(kind))
    texts = [[random_tokens(seed, {"T1": 20})] for seed in range(4)]
    for judge in (lambda: learn(other, texts, 0.2), lambda: guard.evicted(other.prefill(texts[0]))):
        refused(judge, "judges K and V")


def test_a_guard_without_a_limit_is_not_read(guard: Guard, tmp_path: Path):
    assert isinstance(guard.sound, Sound)
    replace(guard.sound, limit=math.inf).save(tmp_path / "guard.safetensors")
    refused(lambda: Guard(str(tmp_path / "guard.safetensors")), "limit is inf")


def test_frequencies_from_a_file_turn_keys_on_another_device():
    at = torch.arange(3, device="meta")[None]
    assert Rotation.between(Rotary(torch.tensor([1.0, 0.1])), at, at).cos.device.type == "meta"
