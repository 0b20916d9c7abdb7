"""Where two caches differ by more than numerics."""

import math

import numpy as np
import pytest
import torch

from kvprobe.cache.floors import MeasuredPair, NoiseFloor, Tail, fitted, floor_between
from kvprobe.cache.places import Distances, damage_of

FLOOR = floor_between("float32", "float32")


@pytest.mark.parametrize(("dropped", "differs"), [(True, False), (False, True)])
def test_a_slot_that_deeper_layers_dropped_is_not_taken_to_be_equal_there(dropped: bool, differs: bool):
    """A slot that is off, and equal in the next layers bit for bit, is held against one rounding."""
    off = torch.full((4, 1, 1, 32), 1e-6)
    off[1, ..., 3], off[2:, ..., 3] = 4 * FLOOR.single, 0
    compared = torch.ones(4, 1, 32, dtype=torch.bool)
    compared[2:, :, 3] = not dropped
    distances = Distances(tuple({"V": layer} for layer in off), tuple(compared))
    assert bool(damage_of(distances, FLOOR, 16).layers) == differs


@pytest.mark.parametrize("slots", [64, 512, 4096])
@pytest.mark.parametrize("noise", [0.02, 0.035])
def test_what_is_lost_is_no_numerics_however_long_and_coarse_the_cache(slots: int, noise: float):
    """A block of which nothing is left, from one layer on, or one slot that is off by more than it holds."""
    floor = floor_between("bfloat16", "bfloat16")
    for struck, by in ((slice(16, 32), 1.0), (slice(20, 21), 1.4)):
        off = torch.rand(8, 1, 2, slots, generator=torch.Generator().manual_seed(0)) * noise + noise / 2
        off[0] /= 50  # there K and V are functions of the token
        compared = torch.ones(8, 1, slots, dtype=torch.bool)
        assert not damage_of(Distances(tuple({"V": layer} for layer in off), tuple(compared)), floor, 16).layers
        off[3:, ..., struck] = by
        damage = damage_of(Distances(tuple({"V": layer} for layer in off), tuple(compared)), floor, 16)
        assert damage.layers == [3, 4, 5, 6, 7]


def test_texts_that_differ_from_the_first_token_on_have_no_place_in_common():
    nothing = Distances(
        tuple({"V": torch.zeros(1, 2, 0)} for _ in range(2)), tuple(torch.ones(2, 1, 0, dtype=torch.bool))
    )
    assert not damage_of(nothing, FLOOR, 16).layers


@pytest.mark.parametrize("before", [8, 24, 56])
@pytest.mark.parametrize("engine_first", [True, False])
def test_a_cache_that_went_on_elsewhere_has_the_noise_of_an_engine_in_some_slots_alone(before: int, engine_first: bool):
    """The first part of llama.cpp and the second of transformers, whose slots are off from the second layer on, since
    they read the first; or the first of transformers, stored in 16 bits."""
    floor = floor_between("llama.cpp f16", "float32")
    layers, slots = 12, 64
    off = torch.rand(layers, 1, 2, slots, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.75
    for layer in range(layers):
        off[layer] *= floor.usual("V", layer / (layers - 1))
        if engine_first:
            off[layer, ..., before:] *= min(1.0, layer / 10)
        else:
            off[layer, ..., :before] = 1e-4
    compared = torch.ones(layers, 1, slots, dtype=torch.bool)
    assert not damage_of(Distances(tuple({"V": layer} for layer in off), tuple(compared)), floor, 16).layers
    off[5, ..., 32:48] = 0.5
    assert damage_of(Distances(tuple({"V": layer} for layer in off), tuple(compared)), floor, 16).layers == [5]


@pytest.mark.parametrize(("own", "seen"), [(False, True), (True, False)])
def test_what_sound_caches_of_this_very_model_hold_is_not_lost(own: bool, seen: bool):
    """Slots that are off by more than they hold: in Qwen2.5 whose keys llama.cpp rounds to 8 bits every other text has
    one. Of another model nobody knows that."""
    rng = np.random.default_rng(0)
    sound = [rng.uniform(0.02, 0.1, (8, 2, 2, 64)) for _ in range(60)]
    for off in sound:
        off[4, 1, 0, 20] = rng.uniform(1.3, 1.6)
    floor = NoiseFloor("bfloat16", "float32", (fitted({"made up": sound}),), own=own)
    off = torch.rand(8, 1, 2, 64, generator=torch.Generator().manual_seed(0)) * 0.08 + 0.02
    off[4, 0, 0, 20] = 1.5
    compared = tuple(torch.ones(8, 1, 64, dtype=torch.bool))
    damage = damage_of(Distances(tuple({"V": layer} for layer in off), compared), floor, 16)
    assert bool(damage.layers) == seen


@pytest.mark.parametrize("measured", [True, False])
def test_blocks_are_allowed_what_sound_caches_were_measured_to_have(measured: bool):
    rng = np.random.default_rng(0)
    sound = [rng.uniform(0.02, 0.1, (8, 2, 2, 64)) for _ in range(60)]
    for off in sound if measured else []:
        off[4, 1, 0, 16:32] = rng.uniform(0.4, 0.6)
    floor = NoiseFloor("bfloat16", "float32", (fitted({"made up": sound}),))
    off = torch.rand(8, 1, 2, 64, generator=torch.Generator().manual_seed(0)) * 0.08 + 0.02
    off[4, 0, 0, 16:32] = 0.45
    compared = tuple(torch.ones(8, 1, 64, dtype=torch.bool))
    damage = damage_of(Distances(tuple({"V": layer} for layer in off), compared), floor, 16)
    assert damage.layers == ([] if measured else [4])


@pytest.mark.parametrize("struck", [slice(20, 21), slice(16, 32)], ids=["a slot", "a block"])
@pytest.mark.parametrize(("times", "seen"), [(150.0, False), (250.0, True)])
def test_limits_of_slots_and_of_blocks_have_half_of_the_rate_each(struck: slice, times: float, seen: bool):
    """Of 400 sound caches two may be beyond the limit of a slot, and two beyond that of a block: four are."""
    worst = (300.0, 200.0, 110.0, 100.0, *[50.0] * 36)
    tail, of_layers = (Tail(400, tuple(map(math.log, sizes)), 0.0) for sizes in (worst, [2.0] * 40))
    usual = ((1e-3,) * 7, (1e-3,) * 7)
    tails = {"vector": tail, "layer": of_layers, "outlier": tail, "block": tail}
    measured = MeasuredPair({"K": usual, "V": usual}, tails, ("made up",), (12, 4096))
    off = torch.full((8, 1, 1, 64), 1e-3)
    off[4, ..., struck] *= times
    compared = tuple(torch.ones(8, 1, 64, dtype=torch.bool))
    floor = NoiseFloor("bfloat16", "float32", (measured,))
    damage = damage_of(Distances(tuple({"V": layer} for layer in off), compared), floor, 16)
    assert bool(damage.layers) == seen
