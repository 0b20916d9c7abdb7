"""Keys rotated to wrong positions."""

import itertools
from typing import Any

import pytest
import torch

from kvprobe.cache.rotary import Rotary, Rotation
from kvprobe.faults import FaultContext, PositionShift, Scope
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import prepare
from kvprobe.text.tokens import Tokens
from tests.faults import HEADS, after, both, context_of, square_cache
from tests.refusals import refused


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("by", [-5, 1, 400])
def test_a_shift_rotates_struck_keys_and_nothing_else(layout: Any, by: int):
    cache = square_cache(0, gaps=True)
    rotary = Rotary(torch.tensor([1.0, 0.1, 0.01]), layout)
    context = FaultContext(cache, rotaries=(rotary, None, rotary))
    slots = [2, 5, 21]
    shifted, _ = after(PositionShift(by=by, scope=Scope(slots=slots)), cache, context=context)
    for (part, layer, now), (_, _, before) in zip(both(shifted), both(cache), strict=True):
        expected = before.clone()
        if part == "k" and layer != 1:
            for head, slot, pair in itertools.product(range(HEADS), slots, range(3)):
                one, other = (pair, pair + 3) if layout == "half" else (2 * pair, 2 * pair + 1)
                turn = torch.polar(torch.tensor(1.0), by * rotary.frequencies[pair])
                turned = torch.complex(before[head, slot, one], before[head, slot, other]) * turn
                expected[head, slot, one], expected[head, slot, other] = turned.real, turned.imag
        assert torch.allclose(now, expected, atol=2e-4)
        assert part == "k" or torch.equal(now, before)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "mixtral"])
def test_a_shifted_key_is_the_one_that_the_model_makes_at_that_position(tiny_models: dict[str, Model], name: str):
    """A single token sees only itself, so its keys at two positions differ by the rotation alone, in every layer."""
    model = tiny_models[name]
    here, there = (model.prefill(Tokens.of([11], "T1", position)) for position in (4, 17))
    fault = PositionShift(by=13)
    shifted = here.corrupt(fault, contexts=[prepare(model.lanes, here, [fault])])
    for now, expected in zip(shifted.keys, there.keys, strict=True):
        assert torch.allclose(now, expected, atol=1e-5)
    assert all(map(torch.equal, shifted.values, here.values))


def test_a_model_with_learned_positions_has_no_keys_to_rotate(tiny_models: dict[str, Model]):
    model = tiny_models["gpt2"]
    refused(lambda: prepare(model.lanes, model.prefill(Tokens.of([1, 2])), [PositionShift(by=1)]), "learned positions")


def test_a_shift_of_the_whole_cache_is_the_librarys_rotation():
    cache = square_cache(0)
    context = context_of(cache)
    assert context.rotaries is not None
    assert context.rotaries[0] is not None
    shifted, _ = after(PositionShift(by=6), cache, context=context)
    turn = Rotation.between(context.rotaries[0], cache.ledger.positions, cache.ledger.positions + 6)
    assert all(torch.equal(now, turn.of(before)) for now, before in zip(shifted.keys, cache.keys, strict=True))
