"""`diff` of caches with recurrent layers: a state that was lost or folded twice is named, in its layer and slots."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.floors import floor_between
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import WRITES
from kvprobe.cache.places import Distances, damage_of
from kvprobe.cache.recurrence import fold
from kvprobe.detection.diff import diff
from kvprobe.inference.model import Model, load
from tests.models.every import tiny

IDS = np.random.default_rng(11).integers(1, 60, 32).tolist()
LOST = 16
"""So many first slots lose what they wrote."""
KINDS = ("qwen3_next", "granitemoehybrid")
"""The gated delta rule, and Mamba-2, beside layers that attend."""


@cache
def read(kind: str) -> tuple[Model, KVCache, KVCache]:
    """A model, what it reads, and the same in portions."""
    model = load(tiny(kind))
    return model, model.prefill(IDS), model.extend(model.prefill(IDS[:20]), [IDS[20:]])[0]


def changed(cache: KVCache, number: int, parts: Mapping[str, Tensor]) -> KVCache:
    layers: list[Layer] = [
        {name: parts.get(name, part) for name, part in layer.items()} if place == number else layer
        for place, layer in enumerate(cache.layers)
    ]
    return replace(cache, layers=tuple(layers))


def without_first(part: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(part[:, :, :LOST]), part[:, :, LOST:]], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_portions_of_a_text_are_alike(kind: str):
    _, right, portions = read(kind)
    assert not diff(portions, right).differs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False], ids=["all that was written", "how much was written"])
def test_a_lost_state_is_named(kind: str, whole: bool):
    model, right, portions = read(kind)
    number = model.geometry.recurrent[1]
    layer = portions.layers[number]
    amount = "gain" if "gain" in layer else "step"
    lost = {name: without_first(layer[name]) for name in layer if name in (WRITES if whole else (amount,))}
    later = {name: part[:, :, LOST:] for name, part in layer.items()}
    assert torch.allclose(fold({**layer, **lost}), fold(later), atol=1e-6)
    found = diff(changed(portions, number, lost), right)
    assert (found.kind, found.layers) == ("state lost", (number,)), str(found)
    assert found.causes[0].slots == f"0 to {LOST - 1}"
    assert "wrote nothing to the state" in found.causes[0].evidence


@pytest.mark.parametrize("kind", KINDS)
def test_a_doubled_state_is_named(kind: str):
    model, right, portions = read(kind)
    number = model.geometry.recurrent[1]
    layer = portions.layers[number]
    for amount in ("value", "gain") if "gain" in layer else ("value",):
        doubled = {amount: 2 * layer[amount]}
        state = fold(layer)
        assert torch.allclose(fold({**layer, **doubled}), 2 * state, atol=1e-5 * float(state.abs().max()))
        found = diff(changed(portions, number, doubled), right)
        assert (found.kind, found.layers) == ("state doubled", (number,)), str(found)
        assert found.causes[0].numbers["factor"] == pytest.approx(2.0, rel=1e-3)
        half = diff(changed(portions, number, {amount: 0.5 * layer[amount]}), right)
        assert half.kind == "scale error"


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid"])
def test_a_block_of_one_repeated_token_is_seen_and_not_guessed(kind: str):
    """What it writes to a state is alike in all slots, as no rows of a text are that are attended to."""
    model, right, _ = read(kind)
    repeated = model.prefill([*IDS[:8], *[7] * 16, *IDS[24:]])
    number = model.geometry.recurrent[1]
    ours, theirs = right.layers[number], repeated.layers[number]
    foreign = {
        name: torch.cat([part[:, :, :8], theirs[name][:, :, 8:24], part[:, :, 24:]], 2) for name, part in ours.items()
    }
    found = diff(changed(right, number, foreign), right)
    assert (found.kind, found.layers, found.causes[0].slots) == ("unknown", (number,), "8 to 23"), str(found)


@pytest.mark.parametrize(("part", "times", "differs"), [("K", 1.5, True), ("step", 1.5, False), ("step", 6.0, True)])
def test_the_delta_rule_hands_on_slots_that_were_rounded_badly(part: str, times: float, differs: bool):
    off = torch.full((1, 2, 64), 1e-6)
    off[0, 1, 40] *= times * floor_between("float32", "float32").times(64)
    compared = (torch.ones(1, 64, dtype=torch.bool),) * 4
    damage = damage_of(Distances(({part: off},) * 4, compared), floor_between("float32", "float32"), 16)
    assert bool(damage.layers) == differs
