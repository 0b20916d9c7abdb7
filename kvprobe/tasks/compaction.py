"""What was said after a compaction, and questions on what was said before it.

To each passcode context belong a follow-up exchange, which knows nothing that the summaries do not, and three questions:
one whose answer the summaries hold, one whose answer only the hidden turns hold, and one that nothing answers.
"""

from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Literal

import yaml

from kvprobe.tasks.passcode import Context, contexts, conversation
from kvprobe.text.transcript import Transcript

Kind = Literal["summary", "hidden", "neither"]
KINDS: tuple[Kind, ...] = ("summary", "hidden", "neither")
"""Where the answer to a question is to be found."""


@dataclass(frozen=True)
class Compaction:
    """What one context's conversation goes on with."""

    id: str
    summary_question: str
    summary_answer: str
    hidden_question: str
    hidden_answer: str
    neither_question: str
    followup_user: str
    followup_assistant: str

    def question(self, kind: Kind) -> str:
        return getattr(self, f"{kind}_question")

    def answer(self, kind: Kind) -> str | None:
        """The words that a right answer holds; None where nothing answers the question."""
        return None if kind == "neither" else getattr(self, f"{kind}_answer")


@cache
def compactions() -> tuple[Compaction, ...]:
    """One for each of `kvprobe.tasks.passcode.contexts`, in their order."""
    text = resources.files("kvprobe.tasks").joinpath("compaction.yaml").read_text(encoding="utf-8")
    entries = {entry["id"]: entry for entry in yaml.safe_load(text)}
    names = [field.name for field in fields(Compaction)]
    return tuple(Compaction(**{name: entries[context.id][name] for name in names}) for context in contexts())


def compacted_conversation(context: Context, compaction: Compaction, code: str) -> Transcript:
    """system, T1, summary1, T2 (holds `code`), summary2, T3 (the follow-up; its reply is the part `reply`) and `ask`,
    where the code is asked for (its answer is the part `answer`)."""
    *before, question, answer = conversation(context, code).messages
    followup = [
        {"role": "user", "content": compaction.followup_user},
        {"role": "assistant", "content": [{"text": compaction.followup_assistant, "name": "reply"}]},
    ]
    messages = [
        *({"role": m.role, "content": [{"text": p.text, "name": p.name} for p in m.parts]} for m in before),
        *followup,
        *({"role": m.role, "content": [{"text": p.text, "name": p.name} for p in m.parts]} for m in (question, answer)),
    ]
    return Transcript.from_messages(messages, [*(message.segment for message in before), "T3", "T3", "ask", "ask"])


def asked(chat: Transcript, question: str) -> Transcript:
    """The conversation up to and with T3, and this question in place of the one for the code."""
    kept = [message for message in chat.messages if message.segment != "ask"]
    messages = [{"role": m.role, "content": [{"text": p.text, "name": p.name} for p in m.parts]} for m in kept] + [
        {"role": "user", "content": question}
    ]
    return Transcript.from_messages(messages, [*(message.segment for message in kept), "ask"])
