"""The shipped sessions, whose code stands in one turn and in no summary; and tokens that agree but for the code."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe.probing.variants import Variants
from kvprobe.studies.multihop import AVAILABLE_SESSIONS
from kvprobe.studies.multihop.hops import SUMMARY_NAMES, TURN_NAMES, HopSession, conversation, sessions
from kvprobe.tasks.passcode import draw_codes
from tests.refusals import refused

every_session = pytest.mark.parametrize("session", sessions(), ids=lambda session: session.id)


def texts(session: HopSession) -> list[str]:
    said = [text for turn in session.turns for text in (turn.user, turn.assistant, turn.summary)]
    return [session.system, session.request, session.question, session.answer, *said]


def test_there_are_as_many_sessions_as_settings_allow_and_no_text_stands_twice():
    all_texts = [text for session in sessions() for text in texts(session)]
    assert len(sessions()) == AVAILABLE_SESSIONS
    assert len(set(all_texts)) == len(all_texts)
    assert len({session.id for session in sessions()}) == len(sessions())


@every_session
def test_the_code_stands_in_the_first_turn_and_nothing_else_has_a_digit(session: HopSession):
    assert session.turns[0].user.count("{code}") == 1
    said = " ".join(texts(session))
    assert said.count("{") == 1
    assert not re.search(r"\d", said)
    segments: dict[str, str] = {}
    for message in conversation(session, "48213").messages:
        segments[message.segment] = segments.get(message.segment, "") + message.text
    assert [name for name, text in segments.items() if "48213" in text] == [TURN_NAMES[0], "Q"]


@every_session
def test_turns_are_short_and_each_has_a_summary_right_after_it(session: HopSession):
    for turn in session.turns:
        assert len(turn.user.split()) <= 25
        assert len(turn.assistant.split()) <= 20
        assert len(turn.summary.split()) <= 20
    expected = [name for pair in zip(TURN_NAMES, SUMMARY_NAMES, strict=True) for name in pair]
    assert conversation(session, "48213").segments == ("system", *expected, "Q")


def test_codes_shift_no_token(tokenizer: Any):
    codes = draw_codes(3, np.random.default_rng(0), tokenizer)
    for session in sessions():
        rows = Variants.of((conversation(session, code) for code in codes), tokenizer).rows
        for row, code in zip(rows, codes, strict=True):
            for part in ("code", "answer"):
                place = row.part(part)
                assert tokenizer.decode(row.ids[place]).strip() == code
                assert place == rows[0].part(part)
            assert (
                row.ids[row.part("code").stop : row.part("answer").start]
                == (rows[0].ids[row.part("code").stop : row.part("answer").start])
            )


def test_codes_that_shift_the_tokens_after_them_are_refused(tokenizer: Any):
    chats = [conversation(sessions()[0], code) for code in ("48213", "482135")]
    refused(lambda: Variants.of(chats, tokenizer), "use a model that tokenises them apart")


def test_a_session_of_seven_turns_is_refused():
    session = sessions()[0]
    refused(lambda: replace(session, turns=session.turns[:7]), "has 7 turns; give 8")
