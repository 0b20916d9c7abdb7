"""The shipped sessions that are compacted after their third turn."""

import dataclasses

from kvprobe.studies.idle_rebuild import AVAILABLE_SESSIONS
from kvprobe.tasks.sessions import SUMMARISED, TURNS, conversation, sessions
from tests.refusals import refused


def test_every_session_is_eight_turns_with_its_summary_after_the_third():
    assert len({session.id for session in sessions()}) == len(sessions()) == AVAILABLE_SESSIONS
    for session in sessions():
        segments = conversation(session).segments
        assert segments == ("system", *SUMMARISED, "summary", *(f"T{turn}" for turn in range(4, TURNS + 1)))
    refused(lambda: dataclasses.replace(sessions()[0], turns=sessions()[0].turns[:7]), "has 7 turns; give 8")
