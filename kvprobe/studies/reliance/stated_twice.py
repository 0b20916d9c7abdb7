"""Conversations whose turns and summary state the same answer, and what they become if the turns state another one."""

from dataclasses import dataclass, replace
from typing import Literal

from kvprobe.tasks.compaction import Compaction, asked, compactions
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.passcode import Context, contexts, conversation
from kvprobe.text.transcript import Transcript

Word = Literal["own", "other"]
"""The answer that the summary states, or a wrong one of the same kind."""
Stated = Literal["own", "reworded", "other"]
"""What the turns state: the answer, the same in other words, or a wrong one in its place."""
T1, T2 = ("chat_user", "chat_assistant"), ("secret_user", "secret_assistant")
TURNS = (*T1, *T2)
"""Of a context, the texts of T1 and T2."""
BETWEEN = ("B1", "B2", "B3", "B4")
"""Segments of the exchanges before the question."""
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

    def before(self, stated: Stated) -> Transcript:
        """The conversation up to the second summary, with turns that state this."""
        messages = conversation(self.turns_stating(stated), CODE).messages
        return Transcript(tuple(message for message in messages if message.segment != "T3"))

    def talk(self, stated: Stated, answer: Word | None, between: int = 0, lead: str = LEAD) -> Transcript:
        """The conversation up to the second summary, so many exchanges that state neither answer in segments of their
        own, and then in the segment `ask` the question that the summary answers, answered so in the part `answer`."""
        own_first = sorted(compactions(), key=lambda compaction: compaction != self.compaction)
        follow = ((each.followup_user, each.followup_assistant) for each in own_first)
        silent = [texts for texts in follow if not self.is_stated(" ".join(texts))][:between]
        exchanges = [talk((name, *texts)) for name, texts in zip(BETWEEN[:between], silent, strict=True)]
        before = (*self.before(stated).messages, *(message for chat in exchanges for message in chat.messages))
        words = (self.answers[answer], lead) if answer else ()
        return asked(Transcript(before), self.compaction.summary_question, *words)

    def is_stated(self, text: str) -> bool:
        """Whether a text holds one of the answers."""
        return any(answer.lower() in text.lower() for answer in self.answers.values())


def stated_twice(count: int) -> list[StatedTwice]:
    """Those of the first `count` contexts that are such conversations."""
    talks = (StatedTwice(*pair) for pair in list(zip(contexts(), compactions(), strict=True))[:count])
    return [talk for talk in talks if _is_stated_twice(talk)]


def _is_stated_twice(talk: StatedTwice) -> bool:
    own, other = talk.answers["own"], talk.answers["other"]
    turns = " ".join(getattr(talk.turns_stating("other"), name) for name in TURNS)
    in_turns = other in turns and own.lower() not in turns.lower()
    return in_turns and own in f"{talk.context.summary_1} {talk.context.summary_2}"
