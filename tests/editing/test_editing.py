"""Edits of caches over every kind of memory: known answers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.editing import concatenate, erratum, recompute, replace_text, splice, steer, summarise, zero
from kvprobe.inference.model import Model, load
from kvprobe.text.tokens import Tokens
from tests.models import any_model, llama, tiny_tokenizer
from tests.models.every import tiny
from tests.refusals import refused

A, B, C = Tokens.of([5, 9, 33, 17], "a"), Tokens.of([40, 8, 21], "b", 4), Tokens.of([60, 12, 3], "c", 7)
NEXT = Tokens.of([7, 11, 30], "next")
ROUNDING = dict.fromkeys(("qwen3_next", "granitemoehybrid", "gemma3n_text"), 3e-6)
"""What is read in other portions rounds otherwise: by up to 2.6e-6 with the delta rule, and in Gemma 3n 2.1e-6; without
states by 1e-6 at most."""
KINDS = ["llama", "deepseek_v3", "gemma3n_text", "qwen3_next", "granitemoehybrid", "lfm2"]


@cache
def held(kind: str) -> tuple[Model, KVCache]:
    model = load(tiny(kind))
    return model, model.prefill(A + B + C)


def after(model: Model, past: KVCache) -> torch.Tensor:
    return model.extend(past, [NEXT.shifted(int(past.ledger.following[0]))], logits=3)[1]


def close(one: KVCache, other: KVCache, model: Model) -> bool:
    """Whether two caches hold the same at the same positions, and the model goes on alike."""
    assert torch.equal(one.ledger.tokens, other.ledger.tokens)
    assert torch.equal(one.ledger.positions, other.ledger.positions)
    assert torch.equal(one.ledger.following, other.ledger.following)
    pairs = zip(
        [*model.as_seen(one).tensors, after(model, one)], [*model.as_seen(other).tensors, after(model, other)],
        strict=True,
    )  # fmt: skip
    rounding = ROUNDING.get(model.lanes.plain.config.model_type, 1e-6)
    return all(float((a - b).abs().max()) <= rounding * max(1.0, float(b.abs().max())) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_spliced_where_it_stood_gives_the_cache_itself(kind: str):
    model, past = held(kind)
    for rest in (past.evict("b"), past.evict("b").reindex()):
        assert close(splice(rest, past.select("b"), at=4), past, model)
    assert close(splice(past.evict("c"), past.select("c"), at=7), past, model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_spliced_elsewhere_is_reindexed(kind: str):
    model, past = held(kind)
    assert close(splice(past.select("a").reindex(), past.select("c"), at=4), past.select("a", "c").reindex(), model)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_joined_and_read_again_are_one_prefill(kind: str):
    model, past = held(kind)
    documents = {"a": A, "b": B.shifted(0), "c": C.shifted(0)}
    joined = concatenate({name: model.prefill(run) for name, run in documents.items()})
    assert joined.ledger.recomputed[0].tolist() == [False] * 4 + [True] * 6
    assert joined.ledger.origins[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert not close(joined, past, model)
    assert close(recompute(model, joined, "b", "c"), past, model)
    some = recompute(model, joined, slots=[4, 7])
    assert some.ledger.recomputed[0].tolist() == [False] * 5 + [True, True, False, True, True]
    assert not close(some, joined, model)


@pytest.mark.parametrize("kind", KINDS)
def test_text_replaced_and_all_read_again_is_a_fresh_prefill(kind: str):
    model, past = held(kind)
    new = Tokens.of([2, 50, 51, 52, 53], "b", 4)
    fresh = model.prefill(A + new + C.shifted(9))
    kept = replace_text(model, past, "b", list(new.ids))
    assert close(replace_text(model, past, "b", list(new.ids), window="all"), fresh, model)
    assert not close(kept, fresh, model)
    assert close(kept.rewind("c"), fresh.rewind("c"), model)
    assert replace_text(model, past, "b", list(new.ids), window=2).ledger.recomputed[0, 9:].tolist() == [1, 1, 0]
    same = replace_text(model, past, "b", list(B.ids), window=1)
    assert close(same, past, model)


def with_padding(model: Model) -> KVCache:
    """A + B + C as the row of a batch in which another row was longer."""
    longer = [Tokens.of([1, 2, 3, 4, 5, 6], "a"), Tokens.of([7], "b", 6), Tokens.of([8], "c", 7)]
    past = None
    for row, own in zip(longer, (A, B, C), strict=True):
        past = model.extend(past, [row, own])[0]
    assert past is not None
    return past.rows([1])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_of_a_row_with_padding_are_read_again_from_what_stands_before_them(kind: str):
    model, past = held(kind)
    padded = with_padding(model)
    assert padded.slots > past.slots
    for edited in (
        recompute(model, padded, "b"),
        recompute(model, padded, slots=padded.ledger.in_segments(["a", "c"])),
        replace_text(model, padded, "b", list(B.ids), window="all"),
    ):
        assert close(edited, past, model)


def test_slots_read_again_without_text_that_was_evicted_or_hidden_count_as_recomputed():
    model, past = held("llama")
    hidden, gone = (recompute(model, left, "b").ledger.recomputed[0] for left in (past.mask("a"), past.evict("a")))
    assert hidden[4:].tolist() == gone.tolist() == [True] * 3 + [False] * 3
    closed = recompute(model, past.evict("a").reindex(), "b").ledger.recomputed[0]
    partly = recompute(model, past.mask("a", layers=[0]), "b").ledger.recomputed[0]
    assert closed.tolist() == [True] * 3 + [False] * 3
    assert partly.tolist() == [False] * 4 + [True] * 3 + [False] * 3
    assert not recompute(model, with_padding(model), "b").ledger.recomputed.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segment", [A, B, C])
def test_text_in_place_of_hidden_text_takes_positions_of_its_own(kind: str, segment: Tokens):
    model, past = held(kind)
    [name] = {*segment.segments}
    for hidden in (past.mask(name), past.mask(name).reindex()):
        assert close(replace_text(model, hidden, name, list(segment.ids), window="all"), past, model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_replaced_text_stands_as_far_behind_it_as_before(kind: str):
    model, past = held(kind)
    for gone, name, run in (("c", "b", B), ("b", "a", A)):
        left = past.evict(gone)
        if "decay" in past.layers[0]:
            refused(
                lambda left=left, name=name: replace_text(model, left, name, [2]), "decays where slots were evicted"
            )
        else:
            assert close(replace_text(model, left, name, list(run.ids)), left, model)
            assert int(replace_text(model, left, name, [2]).ledger.following[0]) == 11 - len(run)


@pytest.mark.parametrize(("kind", "part"), [("llama", "V"), ("deepseek_v3", "latent"), ("qwen3_next", "value")])
def test_zero_and_steer_change_the_chosen_part_of_the_chosen_slots_and_are_undone(kind: str, part):
    model, past = held(kind)
    empty = zero(past, "b", part=part)
    layer = next(number for number, layer in enumerate(past.layers) if part in layer)
    assert not empty.layers[layer][part][:, :, 4:7].any()
    assert torch.equal(empty.layers[layer][part][:, :, 7:], past.layers[layer][part][:, :, 7:])
    assert close(empty.patch(past, "b"), past, model)
    held_parts = {name: tensor * torch.nan if name == part else tensor for name, tensor in past.layers[layer].items()}
    spoilt = replace(past, layers=(*past.layers[:layer], held_parts, *past.layers[layer + 1 :]))
    assert not zero(spoilt, "b", part=part).layers[layer][part][:, :, 4:7].any()
    size = past.layers[layer][part].shape
    direction = torch.arange(1.0, size[3] + 1).expand(1, 1, -1)
    moved = steer(past, direction, "b", layers=[layer], part=part, scale=0.5)
    gap = moved.layers[layer][part] - past.layers[layer][part]
    assert torch.allclose(gap[:, :, 4:7], 0.5 * direction.expand(size[1], 3, -1), atol=1e-5)
    assert not gap[:, :, :4].any()
    assert not gap[:, :, 7:].any()
    assert close(steer(moved, direction, "b", layers=[layer], part=part, scale=-0.5), past, model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_erratum_is_the_users_next_turn_and_is_taken_back_by_rewinding(kind: str):
    model = load(tiny(kind), tokenizer=tiny_tokenizer())
    told = [{"role": "user", "content": "on Monday"}, {"role": "assistant", "content": "Noted."}]
    chat = kv.Transcript.from_messages(told, names=["said", "reply"])
    past = model.prefill(chat)
    corrected = erratum(model, past, "on Friday")
    turn = kv.Transcript.from_messages([*told, {"role": "user", "content": "on Friday"}])
    assert corrected.ledger.tokens[0].tolist() == [*turn.tokens(model.tokenizer).ids]
    assert corrected.ledger.in_segments("erratum")[0].tolist() == [
        slot >= past.slots for slot in range(corrected.slots)
    ]
    assert close(corrected, model.prefill(turn), model)
    back = corrected.rewind("erratum")
    assert all(torch.equal(one, other) for one, other in zip(back.tensors, past.tensors, strict=True))
    assert torch.equal(back.ledger.following, past.ledger.following)
    refused(lambda: erratum(held("llama")[0], held("llama")[1], "on Friday"), "tokenizer")


def test_a_summary_is_what_the_model_answers_and_the_next_turn_follows_it_as_in_one_conversation():
    model = llama(tokenizer=tiny_tokenizer())
    said = [{"role": "user", "content": "the mill has 4"}, {"role": "assistant", "content": "so it is"}]
    past = model.prefill(kv.Transcript.from_messages(said))
    text = model.generate(past, "and the inn", max_new_tokens=5).text
    summed = summarise(model, past, request="and the inn", max_new_tokens=5)
    exchange = [{"role": "user", "content": "and the inn"}, {"role": "assistant", "content": text}]
    whole = kv.Transcript.from_messages([*said, *exchange], ["m0", "m1", "summary", "summary"])
    assert summed.ledger.in_segments("summary")[0].tolist() == [slot >= past.slots for slot in range(summed.slots)]
    assert close(summed, model.prefill(whole), model)
    assert model.prompts(summed, "so")[0].ids == model.prompts(model.prefill(whole), "so")[0].ids
    assert close(summed.rewind("summary"), past, model)
    again = summarise(model, summed, segment="more", max_new_tokens=2)
    assert again.ledger.names[-2:] == ("summary", "more")
    refused(lambda: summarise(model, summed), "another name")
    for gone in (summed.rewind("summary"), summed.evict("summary")):
        assert summarise(model, gone, max_new_tokens=2).ledger.names[-1] == "summary", "no slot of the first is left"
    refused(lambda: summarise(model, past.fork(2)), "2 rows")


@pytest.mark.parametrize("name", ["generated", "generation"])
def test_no_edit_writes_what_a_later_question_takes_for_an_answer_without_an_end(name: str):
    model = any_model()
    said = [{"role": "user", "content": "the mill has 4"}, {"role": "assistant", "content": "so it is"}]
    past = model.prefill(kv.Transcript.from_messages(said))
    refused(lambda: summarise(model, past, segment=name), f"called {name!r}")
    refused(lambda: concatenate({"first": past, name: past}), f"called {name!r}")
    refused(lambda: kv.Transcript.from_messages(said, names=["said", name]), f"called {name!r}")


def test_what_cannot_be_edited_is_refused_in_a_sentence():
    model, past = held("qwen3_next")
    other = replace(past.select("b"), made_by=held("lfm2")[1].made_by)
    refused(lambda: splice(past.evict("b"), other, at=4), "another model")
    refused(lambda: splice(past.evict("b"), past.select(slots=[4]), at=4), "decays over the gap")
    refused(lambda: recompute(model, past.evict("b"), slots=[3]), "decays where slots were evicted")
    refused(lambda: recompute(model, past.fork(2), "b"), "2 rows")
    refused(lambda: splice(past.evict("a", "b", "c"), past.select("b")), "holds no slots")
    refused(lambda: concatenate([]), "no caches")
    refused(lambda: zero(held("deepseek_v3")[1], "b"), "V")
    refused(lambda: zero(past, "b", layers=[0]), "V is stored by layers [3]")
    refused(lambda: steer(past, torch.ones(1, 1, 3), "b", layers=[0], part="value"), "numbers")
    refused(lambda: steer(past, torch.full((1, 1, 3), torch.nan), "b", layers=[0], part="value"), "NaN")


DISJOINT = {
    "mask": lambda past: past.mask("c"),
    "mask in a layer": lambda past: past.mask("c", layers=[3]),
    "reindex": lambda past: past.reindex(),
    "evict": lambda past: past.evict("a"),
    "evict the last": lambda past: past.evict(slots=[past.slots - 1]),
    "mask, close": lambda past: past.mask("a").reindex(),
    "rewind": lambda past: past.rewind(slots=-1),
}
"""Edits that change no number of other slots."""


@pytest.mark.parametrize("edit", DISJOINT)
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next", "granitemoehybrid"])
def test_an_edit_undone_after_another_one_leaves_what_the_other_gives_alone_or_is_refused(kind: str, edit: str):
    model = held(kind)[0]
    whole = model.prefill(A + B + C + Tokens.of([44, 2], "d", 10))
    part = {"llama": "V", "deepseek_v3": "latent"}.get(kind, "value")
    piece, change = model.prefill(Tokens.of([50, 51], "p")), DISJOINT[edit]
    closes = edit in ("mask, close", "reindex") or "evict" in edit
    for base in (whole, whole.evict("c")) if closes else (whole,):
        for name, (edited, undo) in edits_of(base, part, piece, change(base)).items():
            if name == "splice" and edit in ("evict the last", "rewind"):
                continue
            alone = change(base)
            result = edited_or_refusal(lambda edited=edited, undo=undo: undo(change(edited)))
            if isinstance(result, str):
                assert result.startswith(("The donor has", "States decay", "A recurrent layer decays")), name
                continue
            # Hidden slots whose gap was closed take no place, and may come before a piece or after it.
            visible = [one.evict(slots=~one.ledger.live_somewhere) for one in (result, alone)]
            assert close(visible[0], visible[1], model), name


def edited_or_refusal(edit: Callable[[], KVCache]) -> KVCache | str:
    try:
        return edit()
    except kv.UserError as error:
        return str(error)


def edits_of(
    base: KVCache, part: Any, piece: KVCache, alone: KVCache
) -> dict[str, tuple[KVCache, Callable[[KVCache], KVCache]]]:
    """Edits of segment b, and the inverse of each, after another edit that by itself gives `alone`."""
    sizes = [layer[part].shape[3] for layer in base.layers if part in layer]
    direction = torch.arange(1.0, sizes[0] + 1).expand(len(sizes), 1, -1)
    place = int(alone.ledger.positions[0, alone.ledger.in_segments("b")[0]].min())
    return {
        "zero": (zero(base, "b", part=part), lambda past: past.patch(base, "b")),
        "zero, the part": (zero(base, "b", part=part), lambda past: past.patch(base, "b", part=part)),
        "steer": (
            steer(base, direction, "b", part=part),
            lambda past: steer(past, direction, "b", part=part, scale=-1.0),
        ),
        "evict": (base.evict("b"), lambda past: splice(past, base.select("b"), at=place)),
        "splice": (splice(base, piece), lambda past: past.rewind("p")),
    }
