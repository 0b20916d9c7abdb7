"""Sessions of eight turns, each of which is summarised at once; the first holds a random code that no summary mentions.

Thirty hand-written sessions differ in topic, people and phrasing. Each becomes a conversation of the segments system,
T1, summary1, T2, summary2 … T8, summary8, Q; `code` is a part of T1, and `answer`, the same code, of Q. All other text
is the same for every code. Turns are short, because a study reads all of them for each code. The protocol is that of
the Goldberg/Papailiopoulos exchange on masking prefixes and of the toy model in arXiv 2604.09852, whose blocks are
masked once they are summarised.
"""

from dataclasses import dataclass
from functools import cache

from kvprobe.errors import UserError
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import filled, talk
from kvprobe.text.transcript import Transcript

TURNS = 8
TURN_NAMES = tuple(f"T{number}" for number in range(1, TURNS + 1))
SUMMARY_NAMES = tuple(f"summary{number}" for number in range(1, TURNS + 1))


@dataclass(frozen=True)
class HopTurn:
    """What the user says, the reply, and the summary of both."""

    user: str
    assistant: str
    summary: str


@dataclass(frozen=True)
class HopSession:
    """One hand-written session; the first turn's `user` holds `{code}` once, and no other text depends on the code.

    Attributes:
        request: how this user asks for each summary.
        question: the last message of the user, which asks for the code.
        answer: the reply to it, up to the code.
    """

    id: str
    system: str
    request: str
    question: str
    answer: str
    turns: tuple[HopTurn, ...]

    def __post_init__(self) -> None:
        if len(self.turns) != TURNS:
            raise UserError(f"Session {self.id!r} has {len(self.turns)} turns; give {TURNS}.")


@cache
def sessions() -> tuple[HopSession, ...]:
    """All sessions that ship with kvprobe."""
    return tuple(
        HopSession(**{**entry, "turns": tuple(HopTurn(**turn) for turn in entry["turns"])})
        for entry in shipped_entries("studies/multihop/hops")
    )


def conversation(session: HopSession, code: str) -> Transcript:
    """The whole session with this code."""
    segments = []
    for turn, name, summary in zip(session.turns, TURN_NAMES, SUMMARY_NAMES, strict=True):
        user = filled(turn.user, "code", code, "code") if "{code}" in turn.user else turn.user
        segments += [(name, user, turn.assistant), (summary, session.request, turn.summary)]
    asked = ("Q", session.question, [session.answer + " ", {"text": code, "name": "answer"}])
    return talk(("system", session.system), *segments, asked)
