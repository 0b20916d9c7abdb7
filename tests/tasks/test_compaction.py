"""The shipped questions after a compaction, and conversations whose hidden turns say other things."""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from kvprobe.inference.forced import ForcedReply
from kvprobe.inference.model import Model
from kvprobe.tasks.compaction import (
    KINDS,
    asked,
    compacted_conversation,
    compactions,
    going_on,
    places_by_kind,
    unrelated,
)
from kvprobe.tasks.passcode import contexts


def test_the_answers_are_where_the_questions_say_they_are():
    for context, compaction in zip(contexts(), compactions(), strict=True):
        hidden = " ".join([context.chat_user, context.chat_assistant, context.secret_user, context.secret_assistant])
        summaries = f"{context.summary_1} {context.summary_2}".lower()
        spoken = (context.system, context.ask_summary_1, context.ask_summary_2, context.question, context.answer)
        seen = " ".join((summaries, *spoken, compaction.followup_user, compaction.followup_assistant)).lower()
        assert compaction.summary_answer.lower() in summaries, context.id
        assert compaction.hidden_answer.lower() in hidden.lower(), context.id
        assert compaction.hidden_answer.lower() not in seen, context.id
        for kind in KINDS:
            words = compaction.answer(kind)
            assert words is None or words.lower() not in compaction.question(kind).lower(), context.id
    assert len({compaction.id for compaction in compactions()}) == len(contexts())


def test_every_token_after_the_hidden_turn_is_of_one_kind(smol: Model):
    context, compaction = contexts()[0], compactions()[0]
    tokens = compacted_conversation(context, compaction, "48213").without("T2").tokens(smol.tokenizer)
    places = places_by_kind(tokens)
    assert sorted(chain(*places.values())) == list(range(tokens.span("summary2").start, tokens.span("T3").stop))
    said = {kind: smol.tokenizer.decode([tokens.ids[place] for place in chosen]) for kind, chosen in places.items()}
    assert said["summary request"].strip() == context.ask_summary_2
    assert said["summary text"].strip() == context.summary_2
    assert "<|im_end|>" in said["summary delimiters"]
    assert compaction.followup_user in said["later text"]
    assert "<|im_start|>" not in said["later text"]


def test_a_question_stands_in_place_of_the_one_for_the_code_with_its_reply(smol: Model):
    context, compaction = contexts()[0], compactions()[0]
    chat = compacted_conversation(context, compaction, "48213")
    code = chat.tokens(smol.tokenizer)
    assert asked(chat, context.question, "48213", context.answer).tokens(smol.tokenizer).ids == code.ids
    open_ended = asked(chat, compaction.hidden_question)
    assert [message.segment for message in open_ended.messages].count("ask") == 1
    for question, answer, lead in (
        (context.question, "48213", context.answer),
        (compaction.summary_question, compaction.summary_answer, ""),
    ):
        forced = ForcedReply.of(asked(chat, question, answer, lead).tokens(smol.tokenizer), "ask")
        whole = forced.suffix.ids + forced.answer[-1:]
        assert smol.tokenizer.decode(whole[-forced.kept :]).strip() == f"{lead} {answer}".strip()
        assert smol.tokenizer.decode(whole[-len(forced.answer) :]).strip() == answer
        assert question in smol.tokenizer.decode(whole[: -forced.kept])


def test_the_first_exchange_that_goes_on_is_t3_and_none_holds_an_answer():
    for context, compaction in zip(contexts(), compactions(), strict=True):
        chat = compacted_conversation(context, compaction, "48213")
        texts = [message.text for message in chat.messages if message.segment != "ask"]
        assert [message.text for message in going_on(chat, compaction, 1).messages] == texts
        assert [message.text for message in going_on(chat, compaction, 0).messages] == texts[:-2]
        longest = going_on(chat, compaction, 4).messages
        between = [message.text.lower() for message in longest[-8:]]
        assert len(set(between)) == 8
        answers = (compaction.summary_answer, compaction.summary_other, compaction.hidden_answer)
        assert not any(answer.lower() in text for text in between for answer in answers), context.id


def test_unrelated_turns_change_the_text_of_their_segments_and_nothing_else(tokenizer: Any):
    tokens = compacted_conversation(contexts()[0], compactions()[0], "48213").tokens(tokenizer)
    other = unrelated(tokens, ("T1", "T2"), contexts()[1:], tokenizer)
    assert replace(other, ids=tokens.ids) == tokens
    changes = [token != changed for token, changed in zip(tokens.ids, other.ids, strict=True)]
    free = [name in ("T1", "T2") and not chat for name, chat in zip(tokens.segments, tokens.delimiters, strict=True)]
    assert not any(changed for changed, own in zip(changes, free, strict=True) if not own)
    assert np.mean([changed for changed, own in zip(changes, free, strict=True) if own]) > 0.9
