"""The ledger says of which slots numbers were changed after they were computed, whatever changed them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.editing import recompute, splice, steer, zero
from kvprobe.editing.numbers import Content
from kvprobe.faults.gaussian import Gaussian
from kvprobe.faults.scope import Scope
from kvprobe.inference.model import Model, load
from kvprobe.text.tokens import Tokens
from tests.models.every import tiny

A, B, C = Tokens.of([5, 9, 33, 17], "a"), Tokens.of([40, 8, 21], "b", 4), Tokens.of([60, 12, 3], "c", 7)
OTHER = Tokens.of([6, 10, 34, 18], "a") + B + C
INSIDE = [*[False] * 4, *[True] * 3, *[False] * 3]


@cache
def held(kind: str = "llama") -> tuple[Model, KVCache, KVCache]:
    """A model, a cache, and another whose first tokens are others."""
    model = load(tiny(kind))
    return model, model.prefill(A + B + C), model.prefill(OTHER)


def directions(past: KVCache) -> torch.Tensor:
    return torch.ones(past.n_layers, 1, past.layers[0]["V"].shape[3])


EDITS: dict[str, Callable[[Model, KVCache, KVCache], KVCache]] = {
    "zero": lambda model, past, other: zero(past, "b"),
    "zero, one layer": lambda model, past, other: zero(past, "b", layers=[1]),
    "steer": lambda model, past, other: steer(past, directions(past), "b"),
    "patch": lambda model, past, other: past.patch(other, "b", part="V"),
    "fault": lambda model, past, other: past.corrupt(Gaussian(scope=Scope(segments="b"))),
    "policy": lambda model, past, other: model.apply("ZeroValues('b')", past),
    "by hand": lambda model, past, other: past.with_parts(
        {"K": [torch.where(past.ledger.in_segments("b")[:, None, :, None], k + 1, k) for k in past.keys]}
    ),
}


@pytest.mark.parametrize("way", EDITS)
def test_whatever_changes_numbers_marks_their_slots(way: str):
    model, past, other = held()
    assert not bool(past.ledger.edited.any())
    edited = EDITS[way](model, past, other)
    assert edited.ledger.edited[0].tolist() == INSIDE
    assert "b 3 edited" in repr(edited.ledger)
    assert "edited" in edited.ledger._repr_html_()
    assert not bool(past.ledger.edited.any()), "the old cache is as it was"


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "lfm2"])
def test_parts_of_every_kind_are_marked(kind: str):
    _, past, _ = held(kind)
    stored = [part for part in get_args(Content) if any(part in layer for layer in past.layers)]
    assert stored
    for part in stored:
        assert zero(past, "b", part=part).ledger.edited[0].tolist() == INSIDE


@pytest.mark.parametrize(
    "kept",
    [
        lambda model, past: past.mask("b"),
        lambda model, past: model.as_seen(past.evict("a").reindex()),
        lambda model, past: model.apply("Quantise(bits=4)", past),
        lambda model, past: splice(past.evict("b"), past.select("b"), at=4),
        lambda model, past: past.patch(past, "b"),
        lambda model, past: model.extend(past, [Tokens.of([7], "next", 10)])[0],
    ],
)
def test_what_hides_moves_or_stores_slots_marks_none(kept: Callable[[Model, KVCache], KVCache]):
    model, past, _ = held()
    assert not bool(kept(model, past).ledger.edited.any())


def test_marks_stay_with_their_slots(tmp_path: Path):
    model, past, _ = held()
    edited = zero(past, "b")
    assert edited.evict("a").ledger.edited[0].tolist() == INSIDE[4:]
    assert splice(past.evict("b"), edited.select("b"), at=4).ledger.edited[0].tolist() == INSIDE
    joined = KVCache.join([edited, past]).ledger.edited
    assert joined.tolist() == [INSIDE, [False] * len(INSIDE)]
    edited.save(tmp_path / "edited.safetensors")
    assert torch.equal(kv.KVCache.load(tmp_path / "edited.safetensors").ledger.edited, edited.ledger.edited)
    longer = model.extend(edited, [Tokens.of([7], "next", 10)])[0]
    assert longer.ledger.edited[0].tolist() == [*INSIDE, False]


def test_what_is_read_again_is_not_edited():
    model, past, _ = held()
    edited = zero(past, "b")
    assert not bool(recompute(model, edited, "b").ledger.edited.any())
    back: Any = edited.patch(past, "b", part="V")
    assert torch.equal(back.values[0], past.values[0])
    assert back.ledger.edited[0].tolist() == INSIDE, "the ledger remembers"
