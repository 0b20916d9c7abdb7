"""Sessions of eight turns, each of which is summarised at once; the first holds a random code that no summary mentions.

Thirty hand-written sessions differ in topic, people and phrasing. Each becomes a conversation of the segments system,
T1, summary1, T2, summary2 … T8, summary8, Q; `code` is a part of T1, and `answer`, the same code, of Q. All other text
is the same for every code. Turns are short, because a study reads all of them for each code. The protocol is that of
the Goldberg/Papailiopoulos exchange on masking prefixes and of the toy model in arXiv 2604.09852, whose blocks are
masked once they are summarised.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from kvprobe.errors import UserError
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
    text = resources.files("kvprobe.studies.multihop").joinpath("hops.yaml").read_text(encoding="utf-8")
    return tuple(
        HopSession(**{**entry, "turns": tuple(HopTurn(**turn) for turn in entry["turns"])})
        for entry in yaml.safe_load(text)
    )


def conversation(session: HopSession, code: str) -> Transcript:
    """The whole session with this code."""
    messages: list[dict[str, object]] = [{"role": "system", "content": session.system}]
    names = ["system"]
    for turn, name, summary in zip(session.turns, TURN_NAMES, SUMMARY_NAMES, strict=True):
        before, hole, after = turn.user.partition("{code}")
        user = [before, {"text": code, "name": "code"}, after] if hole else turn.user
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": turn.assistant},
            {"role": "user", "content": session.request},
            {"role": "assistant", "content": turn.summary},
        ]
        names += [name, name, summary, summary]
    messages += [
        {"role": "user", "content": session.question},
        {"role": "assistant", "content": [session.answer + " ", {"text": code, "name": "answer"}]},
    ]
    return Transcript.from_messages(messages, [*names, "Q", "Q"])
