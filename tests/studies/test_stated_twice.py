"""Conversations whose turns and summary state the same answer."""

from dataclasses import astuple
from typing import Any, get_args

import pytest

from kvprobe.studies.reliance.stated_twice import T1, T2, TURNS, StatedTwice, Word, stated_twice

ALL = stated_twice(48)


def test_nearly_all_conversations_state_the_answer_in_turns_and_summary():
    assert len(ALL) == 44


@pytest.mark.parametrize("talk", ALL, ids=lambda talk: talk.context.id)
def test_turns_state_the_other_answer_and_summaries_keep_their_own(talk: StatedTwice):
    own, other = talk.answers["own"], talk.answers["other"]
    changed = talk.turns_stating("other")
    turns = " ".join(getattr(changed, name) for name in TURNS)
    assert own.lower() not in turns.lower()
    assert other in turns
    assert (changed.summary_1, changed.summary_2) == (talk.context.summary_1, talk.context.summary_2)
    assert other.lower() not in " ".join(astuple(talk.context)).lower()
    assert talk.turns_stating("own") is talk.context


@pytest.mark.parametrize("talk", ALL, ids=lambda talk: talk.context.id)
def test_reworded_turns_state_the_answer_in_other_words(talk: StatedTwice):
    own, other = talk.answers["own"], talk.answers["other"]
    changed = talk.turns_stating("reworded")
    differing = [name for name in TURNS if getattr(changed, name) != getattr(talk.context, name)]
    assert differing in (list(T1), list(T2))
    said, before = (" ".join(getattr(each, name) for name in differing) for each in (changed, talk.context))
    assert own.lower() in said.lower()
    assert other.lower() not in said.lower()
    assert ("{code}" in said) == ("{code}" in before)
    shared = set(said.lower().split()) & set(before.lower().split())
    assert len(shared) < 0.62 * len(set(said.lower().split())), shared


def test_what_is_asked_ends_with_the_answer(tokenizer: Any):
    talk = ALL[0]
    tokens = {word: talk.talk("own", word).tokens(tokenizer) for word in get_args(Word)}
    ask = tokens["own"].span("ask").start
    assert tokens["other"].span("ask").start == ask
    for word, said in talk.answers.items():
        part = tokens[word].part("answer")
        assert tokenizer.decode(list(tokens[word].ids[part])).strip() == said
        text = tokenizer.decode(list(tokens[word].ids[ask : part.start]))
        assert talk.compaction.summary_question in text
        assert text.rstrip().endswith("The answer is")
        assert tokens[word].ids[: part.start] == tokens["own"].ids[: part.start]


@pytest.mark.parametrize("between", [1, 4])
def test_exchanges_between_state_no_answer_and_come_before_the_question(between: int, tokenizer: Any):
    for talk in ALL:
        chat = talk.talk("own", "own", between, "You said")
        segments = list(dict.fromkeys(message.segment for message in chat.messages))
        assert segments[-between - 1 :] == [*(f"B{number}" for number in range(1, between + 1)), "ask"]
        texts = [message.text for message in chat.messages if str(message.segment).startswith("B")]
        assert len(set(texts)) == 2 * between
        assert not any(answer.lower() in text.lower() for text in texts for answer in talk.answers.values())
    assert ALL[0].talk("own", "own", 1).tokens(tokenizer).ids != ALL[0].talk("own", "own").tokens(tokenizer).ids
