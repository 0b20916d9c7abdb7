"""What leaves a session's view, and when: the turns that a summary replaces, a tool's result, or the oldest turns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvprobe.policies.mask_spans import Delimiters
from kvprobe.studies.idle_rebuild import FIRST, Removed
from kvprobe.tasks.sessions import SUMMARISED, TURNS, Session, conversation, sessions
from kvprobe.text.transcript import Transcript

AFTER = tuple(range(FIRST, TURNS + 1))
"""The turns that are read once something has left."""
LATER = tuple(f"T{turn}" for turn in AFTER)
CALL = '{"name": "read_chat", "arguments": {"turns": "1-3"}}'


@dataclass(frozen=True)
class Removal:
    """What is hidden of a session.

    Attributes:
        conversation: the session as it is read.
        leaves: the segments that leave before a turn is read.
        saw: segments, in view to the end, that saw what is hidden then.
        later: those that did not, and stand behind them.
        delimiters: of the hidden segments; kept, only their text is hidden.
    """

    conversation: Callable[[Session], Transcript]
    leaves: Mapping[int, tuple[str, ...]]
    saw: tuple[str, ...]
    later: tuple[str, ...]
    delimiters: Delimiters = "dropped"

    @property
    def shared(self) -> tuple[str, ...]:
        """Segments that a running and a rebuilt cache both hold at the end."""
        return ("system", *self.saw, *self.later)

    @property
    def once(self) -> bool:
        """Whether everything leaves at once, so that it does not matter when a run is rebuilt afterwards."""
        return len(self.leaves) == 1

    def hidden(self, turn: int) -> tuple[str, ...]:
        """All that has left before this turn is read."""
        return tuple(name for when, names in self.leaves.items() if when <= turn for name in names)


def in_a_result(session: Session) -> Transcript:
    """The session for an agent that did not hear its first three turns: asked to sum them up, it calls a tool, and the
    result is what was said. The first three turns of another session stand before that."""
    others = sessions()
    another = others[[other.id for other in others].index(session.id) - 1]
    heard = len(SUMMARISED)
    chat = conversation(replace(session, turns=another.turns[:heard] + session.turns[heard:]))
    said = "\n".join(f"user: {turn.user}\nassistant: {turn.assistant}" for turn in session.turns[:heard])
    call = [("user", session.summary_request), ("assistant", CALL), ("tool", said)]
    called = Transcript.from_messages(
        [{"role": role, "content": text} for role, text in call], ["call", "call", "result"]
    )
    request = [message.segment for message in chat.messages].index("summary")
    before, after = chat.messages[:request], chat.messages[request + 1 :]
    return replace(chat, messages=before + called.messages + after)


def without_summary(session: Session) -> Transcript:
    """The session, turn after turn."""
    chat = conversation(session)
    return replace(chat, messages=tuple(message for message in chat.messages if message.segment != "summary"))


REMOVALS: Mapping[Removed, Removal] = {
    "compaction": Removal(conversation, {FIRST: SUMMARISED}, ("summary",), LATER),
    "tool_result": Removal(in_a_result, {FIRST: ("result",)}, ("summary",), LATER, "kept"),
    "window": Removal(without_summary, {turn: (f"T{turn - 3}",) for turn in AFTER}, ("T6", "T7"), ("T8",)),
}
