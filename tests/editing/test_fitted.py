"""Slots without tokens: fitted ones stand for a span, trained ones steer away from it, and what needs tokens refuses
them."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import kvprobe as kv
from kvprobe.attention import attend
from kvprobe.cache.cache import KVCache
from kvprobe.detection.audit import audit
from kvprobe.editing import (
    attention_error,
    concatenate,
    divergence,
    erratum,
    match_attention,
    recompute,
    replace_text,
    train_eraser,
)
from kvprobe.editing.matching import fit_head
from kvprobe.editing.queries import Readings
from kvprobe.engines.plain import save_plain
from kvprobe.inference.model import Model, load
from kvprobe.policies.policy import Scene
from kvprobe.text.tokens import WITHOUT_TOKEN, Tokens, token_texts
from tests.models import llama, tiny_tokenizer
from tests.models.every import tiny
from tests.refusals import refused

RNG = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 64, (40,), generator=RNG).tolist()
QUERIES, HELD_OUT = torch.randint(3, 64, (4, 20), generator=RNG).tolist(), torch.randint(3, 64, (2, 20), generator=RNG)
SPAN = range(8, 32)
KINDS = ["llama", "gemma3n_text", "gpt_oss", "gemma2"]
"""Grouped heads, shared layers with windows, sinks of the model's own, and scores that saturate."""


@cache
def held(kind: str) -> tuple[Model, KVCache]:
    model = load(tiny(kind))
    pieces = (Tokens.of(IDS[:8], "a"), Tokens.of(IDS[8:32], "b", 8), Tokens.of(IDS[32:], "c", 32))
    return model, model.prefill(pieces[0] + pieces[1] + pieces[2])


@cache
def fitted(kind: str, keep: int) -> KVCache:
    model, past = held(kind)
    return match_attention(model, past, "b", keep=keep, queries=QUERIES)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_fitted_slots_as_the_span_has_give_back_the_cache(kind: str):
    model, past = held(kind)
    same = fitted(kind, len(SPAN))
    assert same.ledger.fitted[0].tolist() == [slot in SPAN for slot in range(40)]
    assert all(torch.equal(a, b) for a, b in zip(same.tensors, model.as_seen(past).tensors, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_queries_read_less_truly_from_fewer_slots_but_more_than_from_others_kept_at_random(kind: str):
    model, past = held(kind)
    errors = [float(attention_error(model, past, fitted(kind, keep), HELD_OUT).mean()) for keep in (24, 16, 8, 2)]
    assert errors == sorted(errors)
    kept = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    at_random = past.evict(slots=[8 + int(slot) for slot in kept[16:]])
    gone = float(attention_error(model, past, past.evict("b"), HELD_OUT).mean())
    assert 1.3 * errors[1] < float(attention_error(model, past, at_random, HELD_OUT).mean()) < gone
    assert errors[3] < gone
    if kind == "llama":  # as the page on editing says
        assert errors[1] < 0.06 < 0.25 < gone


def test_the_span_gets_the_attention_that_it_got():
    """Eight keys of 24 get half of it by themselves."""
    model, past = held("llama")
    read = Readings.of(model, past, model.tokens_after(past, QUERIES))
    for asked in read.heads(0, list(SPAN), list(SPAN)[-8:]):
        whole = asked.shares(asked.key, asked.seen)[0]
        eight = whole.square().mean(0).topk(8).indices
        mass, own = whole.sum(1), asked.shares(asked.key[eight], asked.seen[:, eight])[0].sum(1)
        got = asked.shares(fit_head(asked, 8)[0], asked.seen_kept)[0].sum(1)
        assert float((got - mass).abs().mean()) < 0.4 * float((own - mass).abs().mean())
        assert float(own.mean() / mass.mean()) < 0.65
        assert 0.9 < float(got.mean() / mass.mean()) < 1.1


def test_fitted_slots_keep_their_distance_when_gaps_close():
    model, edited = held("llama")[0], fitted("llama", 8)
    assert edited.ledger.positions[0].tolist() == [*range(8), *range(24, 40)]
    closed = edited.reindex()
    after = [
        model.extend(one, [Tokens.of([7, 11], "next", int(one.ledger.following[0]))])[1] for one in (edited, closed)
    ]
    # Those before the span come nearer, the fitted ones do not.
    only = [one.mask("a") for one in (edited, closed)]
    near = [model.extend(one, [Tokens.of([7, 11], "next", int(one.ledger.following[0]))])[1] for one in only]
    assert torch.allclose(near[0], near[1], atol=2e-4)
    assert not torch.allclose(after[0], after[1], atol=2e-4)


def test_fitted_slots_are_saved_joined_and_shown(tmp_path: Path):
    model, past = held("llama")
    edited = fitted("llama", 8)
    edited.save(tmp_path / "cache")
    again = KVCache.load(tmp_path / "cache")
    assert torch.equal(again.ledger.tokens, edited.ledger.tokens)
    assert int(again.ledger.fitted.sum()) == 8
    assert all(torch.equal(a, b) for a, b in zip(again.tensors, edited.tensors, strict=True))
    assert int(concatenate([edited, past]).ledger.fitted.sum()) == 8
    assert "b 8 fitted" in repr(again)
    two = KVCache.join([edited, edited])
    of_one = two.evict(slots=two.ledger.fitted & torch.tensor([[True], [False]])).ledger
    assert of_one.fitted.sum(1).tolist() == [0, 8], "padding in the place of an evicted slot is not fitted"
    assert token_texts([3, -1], cast("Any", tiny_tokenizer()))[1] == WITHOUT_TOKEN
    assert attend(model, [7, 11], again).weights.shape[-1] == 26


@pytest.mark.parametrize("keep", [8, len(SPAN)])
@pytest.mark.parametrize("closed", [False, True])
def test_whatever_is_computed_with_fitted_slots_in_view_counts_as_recomputed(keep: int, closed: bool):
    model, edited = held("llama")[0], fitted("llama", keep)
    edited = edited.reindex() if closed else edited
    new = Tokens.of([7, 11, 30], "next", int(edited.ledger.following[0]))
    ways = {
        "read again": (recompute(model, edited, "c"), "c"),
        "other text": (replace_text(model, edited, "c", [9, 4]), "c"),
        "a window": (replace_text(model, model.extend(edited, new)[0], "c", [9, 4], window=1), "c"),
        "read": (model.extend(edited, new)[0], "next"),
        "watched": (model.watch(new, Scene(edited)).cache, "next"),
    }
    for way, (after, name) in ways.items():
        ledger = after.ledger
        assert bool(ledger.recomputed[ledger.in_segments(name)].all()), way
    assert not edited.ledger.recomputed.any(), "what is retained had the span in view"
    rows = model.extend(KVCache.join([edited, held("llama")[1]]), [new, Tokens.of([7, 11], "next", 40)])[0].ledger
    assert (rows.recomputed & rows.in_segments("next")).sum(1).tolist() == [3, 0], "row by row, and no padding"
    hidden = model.extend(edited.mask(slots=edited.ledger.fitted), new)[0]
    assert not hidden.ledger.recomputed.any()


def test_what_is_generated_with_fitted_slots_in_view_counts_as_recomputed():
    model = llama(tokenizer=tiny_tokenizer())
    past = model.prefill("the mill has 4")
    told = erratum(model, match_attention(model, past, slots=[1, 2, 3], keep=2), "on Friday")
    ledger = model.generate(told, "the inn", max_new_tokens=3).cache.ledger
    later = torch.arange(ledger.slots) >= past.slots - 1
    assert later.sum() > told.slots - past.slots + 3
    assert torch.equal(ledger.recomputed[0], later)


def test_what_needs_tokens_refuses_fitted_slots(tmp_path: Path):
    model, past = held("llama")
    edited = fitted("llama", 8)
    refused(lambda: recompute(model, edited, "b"), "was fitted and has no token")
    refused(lambda: match_attention(model, edited, "b", keep=2), "was fitted and has none")
    refused(lambda: past.patch(fitted("llama", len(SPAN)), "b"), "was fitted")
    refused(lambda: save_plain(edited, tmp_path / "plain.json"), "was fitted and has none")
    refused(lambda: audit(model, edited), "was fitted and has none")
    refused(lambda: kv.diff(edited, model), "was fitted and has none")
    refused(lambda: model.apply("RestartInPlace('a')", edited), "was fitted and has")
    refused(lambda: match_attention(model, past, "b", keep=25), "24 slots")
    refused(lambda: match_attention(model, past.mask("b"), "b", keep=2), "hidden")
    refused(lambda: match_attention(model, past.fork(2), "b", keep=2), "2 rows")
    refused(lambda: attention_error(model, past, edited.reindex(), [7]), "another position")
    refused(lambda: attention_error(model, past, edited.fork(2), [7]), "2 rows")


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "lfm2"])
def test_layers_with_something_else_than_k_and_v_are_refused(kind: str):
    model = load(tiny(kind))
    past = model.prefill(Tokens.of(IDS[:8], "a"))
    refused(lambda: match_attention(model, past, "a", keep=2), "latents, an index or states")


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_after_a_trained_eraser_held_out_texts_go_on_more_as_if_the_span_had_never_been(kind: str):
    model = load(tiny(kind))
    a, b, c = Tokens.of(IDS[:4], "a"), Tokens.of(IDS[4:16], "b", 4), Tokens.of(IDS[16:24], "c", 16)
    past, never = model.prefill(a + b + c), model.prefill(a + c)

    def far(edited: KVCache) -> float:
        return float(divergence(model, edited, never, HELD_OUT).mean())

    def trained(seed: int) -> KVCache:
        return train_eraser(model, past, never, "b", texts=QUERIES, keep=3, steps=30, seed=seed)

    erased, again = trained(0), trained(0)
    assert far(never) < 1e-9
    assert 2 * far(erased) < far(past.evict("b")) < far(past)
    assert all(torch.equal(one, other) for one, other in zip(erased.tensors, again.tensors, strict=True))
    assert not torch.equal(erased.tensors[0], trained(1).tensors[0])
    assert not any(tensor.requires_grad for tensor in erased.tensors)
    assert erased.ledger.fitted[0].tolist() == [False] * 4 + [True] * 3 + [False] * 8
    assert erased.ledger.positions[0].tolist() == [0, 1, 2, 3, *range(13, 24)]
    rest = [*range(4), *range(7, 15)], [*range(4), *range(16, 24)]
    assert torch.equal(erased.tensors[0][:, :, rest[0]], past.tensors[0][:, :, rest[1]])


def test_an_eraser_that_cannot_be_trained_is_refused():
    model, past = held("llama")
    refused(lambda: train_eraser(model, past, past, "b", texts=QUERIES, keep=25), "24 slots")
    refused(lambda: train_eraser(model, past, past.fork(2), "b", texts=QUERIES), "2 rows")
    states = load(tiny("qwen3_next"))
    other = states.prefill(Tokens.of(IDS[:8], "a"))
    refused(lambda: train_eraser(states, other, other, "a", texts=QUERIES), "keeps states")
    refused(lambda: train_eraser(model, past, other, "b", texts=QUERIES), "The target has")
