"""Texts and numbers with which no edit can be made are refused in a sentence that names the argument."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kvprobe.attention import attend
from kvprobe.attention.views import logits_in_view
from kvprobe.cache.cache import KVCache
from kvprobe.editing import (
    attention_error,
    concatenate,
    divergence,
    match_attention,
    replace_text,
    splice,
    steer,
    train_eraser,
)
from kvprobe.faults import PositionShift
from kvprobe.inference.model import Model, load
from kvprobe.patching.reader import suffix_after
from kvprobe.policies.policy import Scene
from kvprobe.text.tokens import Tokens
from tests.models import llama, tiny_tokenizer
from tests.models.every import tiny
from tests.refusals import refused

A, B, C = Tokens.of([5, 9, 33, 17], "a"), Tokens.of([40, 8, 21, 7, 7], "b", 4), Tokens.of([60, 12, 3], "c", 9)

READERS: dict[str, Callable[[Model, KVCache, Any], object]] = {
    "text of extend": lambda model, past, text: model.extend(past, text),
    "text of watch": lambda model, past, text: model.watch(text, Scene(past)),
    "text of capture": lambda model, past, text: model.capture(text, ["resid_post"], past=past),
    "text of attend": lambda model, past, text: attend(model, text, past),
    "text of attention_error": lambda model, past, text: attention_error(model, past, past, text),
    "text of replace_text": lambda model, past, text: replace_text(model, past, "b", text),
    "texts of divergence": lambda model, past, text: divergence(model, past, past, text),
    "texts of train_eraser": lambda model, past, text: train_eraser(model, past, past, "b", texts=text, steps=1),
    "queries of match_attention": lambda model, past, text: match_attention(model, past, "b", keep=2, queries=text),
    "suffix of logits_in_view": lambda model, past, text: logits_in_view(model, past, text, "b", [[(0, 0)]]),
}
"""What reads texts after a cache, by the argument that gives them."""

ONE = ("attend", "replace_text", "logits_in_view")
"""What reads one text."""


@cache
def held() -> tuple[Model, KVCache]:
    model = llama(tokenizer=tiny_tokenizer())
    return model, model.prefill(A + B + C)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("nothing", [[], (), "", [""], ["the mill", ""], ["", ""], [[]], [[5, 6], []]])
def test_nothing_to_read_is_refused_by_the_name_of_its_argument(reader: str, nothing: Any):
    model, past = held()
    refused(lambda: READERS[reader](model, past, nothing), "nothing to read", f"`{reader.split()[0]}`")


def test_a_suffix_without_tokens_is_refused():
    model, past = held()
    for nothing in ("", Tokens.of([])):
        refused(lambda nothing=nothing: suffix_after(model, past, nothing), "nothing to read in `suffix`")


@pytest.mark.parametrize("reader", [name for name in READERS if name.endswith(ONE)])
def test_several_texts_are_refused_where_one_is_read(reader: str):
    model, past = held()
    refused(
        lambda: READERS[reader](model, past, [[50, 51], [52, 53, 54]]),
        f"`{reader.split()[0]}` gives 2 rows",
        "one text",
    )


@pytest.mark.parametrize("reader", [name for name in READERS if not name.endswith("replace_text")])
@pytest.mark.parametrize("place", [2**31, 2**62, 2**63 - 1, 2**70])
def test_text_at_a_position_that_no_slot_can_have_is_refused(reader: str, place: int):
    model, past = held()
    refused(lambda: READERS[reader](model, past, Tokens.of([4, 5], "next", place)), f"position {place}")


def test_what_comes_next_stands_where_a_slot_can():
    model = held()[0]
    for end in (-3, 2**31 + 1, 2**70):
        refused(lambda end=end: model.prefill(replace(A, end=end)), f"position {end - 1}")


@pytest.mark.parametrize("place", [2**31, 2**63 - 20, 2**63 - 1, 2**63, 2**70])
def test_positions_and_distances_that_overflow_are_refused(place: int):
    _, past = held()
    refused(lambda: splice(past.evict("b"), past.select("b"), at=place), f"at={place}")
    for wrong in (place, -place):
        refused(lambda wrong=wrong: past.rewind(position=wrong), f"position={wrong}")
        refused(lambda wrong=wrong: past.rewind(slots=wrong), f"slots={wrong}")
        refused(lambda wrong=wrong: PositionShift(by=wrong), f"by={wrong}")
        refused(lambda wrong=wrong: past.mask(slots=[wrong]), f"slot {wrong}")
        refused(lambda wrong=wrong: past.mask("b", layers=[wrong]), f"layer {wrong}")


def test_slots_do_not_move_beyond_the_last_position():
    _, past = held()
    far = splice(past, past.select("b"), at=2**31 - 1 - len(B))
    assert int(far.ledger.following[0]) == 2**31 - 1
    refused(lambda: splice(past, past.select("b"), at=2**31 - 2), f"position {2**31 + 2}", "smaller `at`")
    refused(lambda: concatenate([far, past]), "would reach position", "reindex()")


def test_an_eraser_whose_training_diverges_is_refused():
    model, past = held()
    never = model.prefill(A + C)

    def trained(rate: float, model: Model = model, past: KVCache = past, never: KVCache = never) -> KVCache:
        return train_eraser(model, past, never, "b", texts=[[5, 6, 7]], steps=3, rate=rate)

    for rate in (-1.0, 1e30, 1e300):
        refused(lambda rate=rate: trained(rate), f"rate={rate}")
    assert all(bool(tensor.isfinite().all()) for tensor in trained(1000.0).tensors)
    half = load(tiny("llama").half())
    past, never = (half.prefill(run) for run in (A + B + C, A + C))
    refused(lambda: trained(1000.0, half, *(large(cache) for cache in (past, never))), "rate of 1000.0; give a smaller")


def large(past: KVCache) -> KVCache:
    """Values that are as large as half precision holds, more or less."""
    return past.with_parts({"V": [value * 1e4 for value in past.values]})


def test_caches_that_are_not_finite_are_neither_compared_nor_fitted():
    model, past = held()
    last = past.ledger.in_segments("c")[:, None, :, None]
    spoilt = past.with_parts({"V": [value.masked_fill(last, torch.nan) for value in past.values]})
    for call in (
        lambda: divergence(model, past, spoilt, "the mill"),
        lambda: divergence(model, spoilt, past, "the mill"),
        lambda: attention_error(model, past, spoilt, "the mill"),
        lambda: match_attention(model, spoilt, "b", keep=2),
        lambda: train_eraser(model, past, spoilt, "b", texts="the mill"),
        lambda: train_eraser(model, spoilt, past, "b", texts="the mill"),
    ):
        refused(call, "V of layer 0, KV head 0, slot 9", "NaN")
    directions = torch.ones(past.n_layers, 1, past.layers[0]["V"].shape[3])
    refused(lambda: steer(past, directions, "b", scale=1e39), "V of layer 0 overflows", "smaller scale")
