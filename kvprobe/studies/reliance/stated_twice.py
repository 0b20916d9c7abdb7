"""Conversations whose turns and summary state the same answer, and what they become if the turns state another one."""

from dataclasses import dataclass, replace
from typing import Literal

from kvprobe.tasks.compaction import Compaction, asked, compactions
from kvprobe.tasks.passcode import Context, contexts, conversation
from kvprobe.text.transcript import Transcript

Word = Literal["own", "other"]
"""The answer that the summary states, or a wrong one of the same kind."""
TURNS = ("chat_user", "chat_assistant", "secret_user", "secret_assistant")
"""Of a context, the texts of T1 and T2."""
CODE, LEAD = "48213", "The answer is"


@dataclass(frozen=True)
class StatedTwice:
    """A conversation whose answer is in its turns, from which it can be taken, and in a summary of them."""

    context: Context
    compaction: Compaction

    @property
    def answers(self) -> dict[Word, str]:
        return {"own": self.compaction.summary_answer, "other": self.compaction.summary_other}

    def turns_stating(self, word: Word) -> Context:
        """The context whose turns, but not its summaries, state this answer."""
        if word == "own":
            return self.context
        changed: dict[str, str] = {
            name: getattr(self.context, name).replace(self.answers["own"], self.answers["other"]) for name in TURNS
        }
        return replace(self.context, **changed)

    def talk(self, turns: Word, answer: Word) -> Transcript:
        """The conversation up to the second summary, and then in the segment `ask` the question that the summary
        answers, answered so in the part `answer`."""
        messages = conversation(self.turns_stating(turns), CODE).messages
        before = Transcript(tuple(message for message in messages if message.segment != "T3"))
        return asked(before, self.compaction.summary_question, self.answers[answer], LEAD)


def stated_twice(count: int) -> list[StatedTwice]:
    """Those of the first `count` contexts that are such conversations."""
    talks = (StatedTwice(*pair) for pair in list(zip(contexts(), compactions(), strict=True))[:count])
    return [talk for talk in talks if _is_stated_twice(talk)]


def _is_stated_twice(talk: StatedTwice) -> bool:
    own, other = talk.answers["own"], talk.answers["other"]
    turns = " ".join(getattr(talk.turns_stating("other"), name) for name in TURNS)
    in_turns = other in turns and own.lower() not in turns.lower()
    return in_turns and own in f"{talk.context.summary_1} {talk.context.summary_2}"
