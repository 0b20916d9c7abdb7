"""Conversations whose turns and summary state the same answer, and what they become if the turns state another one."""

from dataclasses import dataclass, replace
from typing import Literal

from kvprobe.tasks.compaction import Compaction, asked, compactions, going_on
from kvprobe.tasks.passcode import Context, contexts, conversation
from kvprobe.text.transcript import Transcript

Word = Literal["own", "other"]
"""The answer that the summary states, or a wrong one of the same kind."""
Stated = Literal["own", "reworded", "other"]
"""What the turns state: the answer, the same in other words, or a wrong one in its place."""
T1, T2 = ("chat_user", "chat_assistant"), ("secret_user", "secret_assistant")
TURNS = (*T1, *T2)
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

    def turns_stating(self, stated: Stated) -> Context:
        """The context whose turns, but not its summaries, say this."""
        own, other = self.answers["own"], self.answers["other"]
        if stated == "own":
            return self.context
        if stated == "other":
            changed: dict[str, str] = {name: getattr(self.context, name).replace(own, other) for name in TURNS}
            return replace(self.context, **changed)
        says = " ".join(getattr(self.context, name) for name in T1)
        reworded = self.compaction.reworded_user, self.compaction.reworded_assistant
        texts: dict[str, str] = dict(zip(T1 if own.lower() in says.lower() else T2, reworded, strict=True))
        return replace(self.context, **texts)

    def before(self, stated: Stated, turns: int = 0) -> Transcript:
        """The conversation up to the second summary, with turns that state this, and so many exchanges after it."""
        return going_on(conversation(self.turns_stating(stated), CODE), self.compaction, turns)

    def talk(self, stated: Stated, answer: Word | None, turns: int = 0, lead: str = LEAD) -> Transcript:
        """The conversation up to the second summary, so many exchanges that state neither answer in segments of their
        own, and then in the segment `ask` the question that the summary answers, answered so in the part `answer`."""
        words = (self.answers[answer], lead) if answer else ()
        return asked(self.before(stated, turns), self.compaction.summary_question, *words)


def stated_twice(count: int) -> list[StatedTwice]:
    """Those of the first `count` contexts that are such conversations."""
    talks = (StatedTwice(*pair) for pair in list(zip(contexts(), compactions(), strict=True))[:count])
    return [talk for talk in talks if _is_stated_twice(talk)]


def _is_stated_twice(talk: StatedTwice) -> bool:
    own, other = talk.answers["own"], talk.answers["other"]
    turns = " ".join(getattr(talk.turns_stating("other"), name) for name in TURNS)
    in_turns = other in turns and own.lower() not in turns.lower()
    return in_turns and own in f"{talk.context.summary_1} {talk.context.summary_2}"
