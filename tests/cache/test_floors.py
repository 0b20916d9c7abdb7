"""Noise floors: of sound caches as few exceed a limit as is stated, and caches with a fault do."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.cache.computed import Computed
from kvprobe.cache.floors import (
    MeasuredPair,
    NoiseFloor,
    Place,
    Tail,
    distances_of_rows,
    fitted,
    floor_between,
    floor_of,
    floor_of_dtype,
)
from kvprobe.cache.layer import Layer
from kvprobe.cache.places import Distances, damage_of
from kvprobe.fingerprint import Maker
from kvprobe.inference.model import Model
from kvprobe.stats import binomial
from kvprobe.text.tokens import Tokens
from tests.models import llama, qwen3
from tests.refusals import refused

RATE = 0.05
RECORDED = Path(__file__).parent.parent / "engines" / "recorded"


def ids_of(rows: int, seed: int, slots: int = 64) -> torch.Tensor:
    return torch.randint(2, 60, (rows, slots), generator=torch.Generator().manual_seed(seed))


class Pair:
    """A model, and the same weights in bfloat16."""

    def __init__(self, model: Model) -> None:
        self.plain: Any = model.lanes.plain
        self.half: Any = copy.deepcopy(model.lanes.plain).to(torch.bfloat16)

    def apart(self, ids: torch.Tensor) -> list[np.ndarray]:
        """Of each row."""
        half, plain = layers_of(self.half, ids), layers_of(self.plain, ids)
        return [distances_of_rows(row_of(half, row), row_of(plain, row)) for row in range(len(ids))]


def layers_of(plain: Any, ids: torch.Tensor) -> list[Layer]:
    past = DynamicCache()
    with torch.no_grad():
        plain(ids, past_key_values=past)
    return [{"K": layer.keys, "V": layer.values} for layer in past.layers]


def row_of(layers: Sequence[Layer], row: int) -> list[Layer]:
    return [{name: part[row : row + 1] for name, part in layer.items()} for layer in layers]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(llama())


@pytest.fixture(scope="module")
def floor(pair: Pair) -> MeasuredPair:
    return fitted({"tiny": pair.apart(ids_of(120, 0))})


@pytest.fixture(scope="module")
def fresh(pair: Pair) -> list[np.ndarray]:
    return pair.apart(ids_of(100, 1))


@pytest.mark.parametrize("place", ["vector", "layer", "outlier", "block"])
def test_sound_caches_of_new_texts_exceed_a_limit_as_rarely_as_stated(
    place: Place, fresh: list[np.ndarray], floor: MeasuredPair
):
    alarms = [floor.exceeds(off, place, RATE) for off in fresh]
    assert binomial(sum(alarms), len(alarms)).low <= RATE
    # A limit that nothing exceeds would pass the above.
    assert np.mean([floor.exceeds(_worse(off, place), place, RATE) for off in fresh]) > 0.9


def _worse(off: np.ndarray, place: Place) -> np.ndarray:
    """With a vector, a block or all of a part of a layer farther off."""
    off = off.copy()
    if place == "layer":
        off[1, 1] *= 3
    elif place == "block":
        off[1, 1, :, 16:32] *= 3
    else:
        off[1, 1, 0, 20] *= 10
    return off


def test_a_block_of_another_text_exceeds_the_limit_in_its_layer(pair: Pair, floor: MeasuredPair):
    ids = ids_of(2, 2)
    half, true = layers_of(pair.half, ids), row_of(layers_of(pair.plain, ids), 0)
    assert not floor.exceeds(distances_of_rows(row_of(half, 0), true), "block")
    wrong = [{name: part.clone() for name, part in layer.items()} for layer in half]
    wrong[1]["V"][0, :, 16:32] = half[1]["V"][1, :, 16:32]
    assert floor.exceeds(distances_of_rows(row_of(wrong, 0), true), "block")


def test_a_limit_is_higher_for_more_slots_and_fewer_false_alarms():
    tail = Tail(200, tuple(np.log(np.linspace(3, 2, 40)).tolist()), 0.2)
    assert tail.limit(10, 0.01) < tail.limit(100, 0.01) < tail.limit(100, 0.001)
    assert tail.limit(100, 0.001) / tail.limit(100, 0.0001) == pytest.approx(10**-0.2)
    low, high = tail.interval(1, 0.05)
    assert low < tail.limit(1, 0.05) < high < 3
    assert tail.interval(1, 0.01)[1] == np.inf
    refused(lambda: tail.limit(1, 0.5), "rates below 0.20")


def test_the_rate_of_a_limit_is_that_of_caches_like_those_measured():
    """Of maxima that fall off as a power, limits at a rate below what the caches show hold, too."""
    rng = np.random.default_rng(0)

    def caches(count: int) -> list[np.ndarray]:
        size = [rng.uniform(0.9, 1.1, (2, 2, 1, int(rng.integers(4, 12)))) for _ in range(count)]
        for off in size:
            off[1, 1, 0, 2] *= rng.pareto(4) + 1
        return size

    for count, rate in ((200, 0.05), (50, 0.01)):
        shares = []
        for _ in range(6):
            learnt = fitted({"made up": caches(count)})
            shares.append(np.mean([learnt.exceeds(off, "vector", rate) for off in caches(100)]))
        assert 0.2 * rate < np.mean(shares) < 2.5 * rate


def test_pairs_that_were_not_measured_are_as_far_apart_as_both_from_float32():
    one, other = floor_between("bfloat16", "float32"), floor_between("float16", "float32")
    both = floor_between("float16", "bfloat16")
    assert both.usual("K", 0.3) == pytest.approx(one.usual("K", 0.3) + other.usual("K", 0.3))
    assert both.times(64, rate=0.01) == max(each.times(64, rate=0.005) for each in (one, other))
    assert both.allowed("V", 0.5, 64, place="block") == both.usual("V", 0.5) * both.times(64, place="block")
    assert floor_between("float32", "bfloat16").measured == one.measured
    assert floor_between("float32", "float32").usual("latent", 1.0) < 1e-5 < one.usual("latent", 1.0)
    refused(lambda: floor_between("float32", "int3"), "int3")
    refused(lambda: floor_of_dtype(torch.float64), "two caches in float64 lie apart was not measured")
    refused(lambda: floor_of_dtype(torch.bfloat16, "Mamba-2"), "two caches in bfloat16 lie apart (Mamba-2) was not")


def test_a_model_that_was_measured_has_a_floor_of_its_own(smol: Model):
    """A finetuned one, too, where it has the same config and stop tokens."""
    known, pair = smol.lanes.maker.config, ("llama.cpp q8_0", "float32")
    own, other = floor_between(*pair, model=known), floor_between(*pair, model="00000000")
    assert own.own
    assert not other.own
    assert other == floor_between(*pair)
    assert [one.models for one in own.measured] == [("smollm2-135m",)]
    assert own.allowed("V", 0.5, 100, place="block") < 0.3 * other.allowed("V", 0.5, 100, place="block")
    cache = smol.prefill("A short text of several tokens")
    assert floor_of(cache, cache).own
    assert not floor_of(replace(cache, made_by=None), replace(cache, made_by=None)).own
    assert not floor_between("float32", "float32", "Mamba-2", model=known).own  # states were measured in others


def test_a_floor_is_of_one_model_alone(smol: Model):
    """A model whose config is not known says nothing; of two configs neither floor holds."""
    cache = smol.prefill("A short text of several tokens")
    foreign, unknown = (replace(cache, made_by=Maker(name)) for name in ("0-1-2", "of another format"))
    assert floor_of(unknown, cache).own
    assert floor_of(cache, unknown).own
    assert not floor_of(cache, foreign).own
    assert not floor_of(foreign, cache).own
    makers = cache.ledger.makers.clone()
    makers[:, 2] = 0
    mixed = replace(cache, ledger=replace(cache.ledger, makers=makers, others=(Maker("0-1-2"),)))
    assert not floor_of(mixed, mixed).own
    unused = replace(cache, ledger=replace(cache.ledger, others=(Maker("0-1-2"),)))
    assert floor_of(unused, unused).own


@pytest.mark.parametrize("name", ["clean", "other"])
def test_a_dump_of_vllm_is_within_the_floor_of_vllm(name: str):
    model = kv.load(str(RECORDED / "model"), device="cpu", dtype="float32")
    dumped = kv.open_cache(RECORDED / f"{name}.json")
    true = model.prefill(Tokens.of(dumped.ledger.tokens[0].tolist()))
    floor = kv.diff(dumped, true).floor
    assert floor.name == "vLLM float32 and float32"
    (known,) = floor.measured
    off = distances_of_rows(dumped.layers, true.layers)
    assert not any(known.exceeds(off, place) for place in ("vector", "layer", "block"))
    moved = [{name: part * (1 + 1e-3) for name, part in layer.items()} for layer in true.layers]
    assert known.exceeds(distances_of_rows(moved, true.layers), "vector")


@pytest.mark.parametrize(("computed", "differs"), [("float32", True), ("vLLM float32", False)])
def test_a_sound_cache_of_vllm_is_farther_off_than_by_another_kernel_of_transformers(
    computed: Computed, differs: bool, smol: Model
):
    """That of one text of 120 in float32, of which the distances to transformers' are recorded."""
    layers = torch.from_numpy(np.load(RECORDED / "distances.npy"))[:, :, None].unbind()
    every = torch.ones(1, layers[0].shape[-1], dtype=torch.bool)
    distances = Distances(tuple({"K": keys, "V": values} for keys, values in layers), (every,) * len(layers))
    floor = floor_between(computed, "float32", model=smol.lanes.maker.config)
    assert floor.own
    assert bool(damage_of(distances, floor, 16).layers) == differs


def test_a_short_vector_counts_as_long_as_the_median_of_its_head():
    true = torch.ones(1, 1, 9, 4)
    true[0, 0, 3] = 0
    layer, other = {"K": true + 0.01, "V": true}, {"K": true, "V": true}
    off = distances_of_rows([layer], [other])
    assert off[0, 0] == pytest.approx(0.01, rel=1e-4)
    assert not off[0, 1].any()
    layer["V"] = true / 0
    assert np.isinf(distances_of_rows([layer], [other])[0, 1]).all()


def test_another_architecture_is_about_as_far_apart(floor: MeasuredPair):
    assert all(0.3 < floor.scores(off)["layer"] < 3 for off in Pair(qwen3()).apart(ids_of(10, 4)))


def test_nothing_measured_is_refused():
    refused(lambda: fitted({"none": []}), "no distances")
    short = NoiseFloor("float32", "float32", (fitted({"short": [np.full((4, 2, 2, 12), 0.01)]}),), own=True)
    assert short.times(12) > 0
    refused(lambda: short.times(12, place="block"), "a whole block")
