"""Scripted sessions that are summarised after their third turn and go on for five more.

Sixteen hand-written sessions of eight turns differ in topic, people and phrasing. Turn 4 opens a new topic; turns 5 to
8 ask for what was said in turns 1 to 3, some of which is in the summary and some of which is not. Each becomes a
conversation of the segments system, T1, T2, T3, summary, T4 … T8. The protocol is that of setups A and B in the
Goldberg/Papailiopoulos exchange on masking prefixes.
"""

from dataclasses import dataclass
from functools import cache

from kvprobe.errors import UserError
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import talk
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

TURNS = 8
SUMMARISED = ("T1", "T2", "T3")
"""The turns that the summary replaces; it follows directly after the last of them."""


@dataclass(frozen=True)
class Turn:
    """What the user says, and the scripted reply."""

    user: str
    assistant: str


@dataclass(frozen=True)
class Session:
    """One hand-written session."""

    id: str
    system: str
    turns: tuple[Turn, ...]
    summary_request: str
    summary: str

    def __post_init__(self) -> None:
        if len(self.turns) != TURNS:
            raise UserError(f"Session {self.id!r} has {len(self.turns)} turns; give {TURNS}.")


@cache
def sessions() -> tuple[Session, ...]:
    """All sessions that ship with kvprobe."""
    return tuple(
        Session(**{**entry, "turns": tuple(Turn(**turn) for turn in entry["turns"])})
        for entry in shipped_entries("tasks/sessions")
    )


def conversation(session: Session) -> Transcript:
    """The whole session; the reply of turn 5, for example, is the part `reply5`."""
    turns = [
        (f"T{number}", turn.user, [{"text": turn.assistant, "name": f"reply{number}"}])
        for number, turn in enumerate(session.turns, start=1)
    ]
    summary = ("summary", session.summary_request, session.summary)
    before, after = turns[: len(SUMMARISED)], turns[len(SUMMARISED) :]
    return talk(("system", session.system), *before, summary, *after)


def question(tokens: Tokens, turn: int) -> Tokens:
    """Of a session's tokens, the user's message of a turn and the header of the answer, but for the header's last
    token: that one is read with the answer, whose first token is predicted from it."""
    return tokens[tokens.span(f"T{turn}").start : tokens.part(f"reply{turn}").start - 1]


def last_of_header(tokens: Tokens, turn: int) -> Tokens:
    """The token that follows `question`."""
    reply = tokens.part(f"reply{turn}")
    return tokens[reply.start - 1 : reply.start]
