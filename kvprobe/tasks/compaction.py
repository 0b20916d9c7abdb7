"""An exchange after a compaction, and questions about what was said before it.

Each passcode context has a follow-up exchange, which uses only what the summaries say, and three questions: one whose
answer is in the summaries, one whose answer is only in the hidden turns, and one without an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Literal

import yaml

from kvprobe.tasks.passcode import Context, Encoder, contexts, conversation
from kvprobe.text.messages import Message
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

Kind = Literal["summary", "hidden", "neither"]
KINDS: tuple[Kind, ...] = ("summary", "hidden", "neither")
"""Where the answer to a question is."""


@dataclass(frozen=True)
class Compaction:
    """The continuation of one context's conversation.

    Attributes:
        summary_other: a wrong answer to the first question, of the same kind and nowhere in the context.
    """

    id: str
    summary_question: str
    summary_answer: str
    summary_other: str
    hidden_question: str
    hidden_answer: str
    neither_question: str
    followup_user: str
    followup_assistant: str

    def question(self, kind: Kind) -> str:
        return getattr(self, f"{kind}_question")

    def answer(self, kind: Kind) -> str | None:
        """The words that a right answer contains; None where there is no answer."""
        return None if kind == "neither" else getattr(self, f"{kind}_answer")


@cache
def compactions() -> tuple[Compaction, ...]:
    """One for each of `kvprobe.tasks.passcode.contexts`, in their order."""
    text = resources.files("kvprobe.tasks").joinpath("compaction.yaml").read_text(encoding="utf-8")
    entries = {entry["id"]: entry for entry in yaml.safe_load(text)}
    names = [field.name for field in fields(Compaction)]
    return tuple(Compaction(**{name: entries[context.id][name] for name in names}) for context in contexts())


def compacted_conversation(context: Context, compaction: Compaction, code: str) -> Transcript:
    """The conversation in segments system, T1, summary1, T2 (holds `code`), summary2, T3 (the follow-up) and `ask`.

    The reply of T3 is the part `reply`; `ask` asks for the code, and its answer is the part `answer`.
    """
    *before, question, answer = conversation(context, code).messages
    followup = [
        {"role": "user", "content": compaction.followup_user},
        {"role": "assistant", "content": [{"text": compaction.followup_assistant, "name": "reply"}]},
    ]
    messages = [
        *map(_mapping, before),
        *followup,
        *map(_mapping, (question, answer)),
    ]
    return Transcript.from_messages(messages, [*(message.segment for message in before), "T3", "T3", "ask", "ask"])


def asked(chat: Transcript, question: str) -> Transcript:
    """The conversation up to T3, and this question in place of the one for the code."""
    before = [message for message in chat.messages if message.segment != "ask"]
    messages = [*map(_mapping, before), {"role": "user", "content": question}]
    return Transcript.from_messages(messages, [*(message.segment for message in before), "ask"])


def unrelated(tokens: Tokens, segments: Sequence[str], others: Sequence[Context], encode: Encoder) -> Tokens:
    """The conversation with the text of these segments replaced by that of other contexts, cut to as many tokens, so
    that every position and delimiter stays."""
    text = " ".join(f"{other.chat_user} {other.chat_assistant}" for other in others)
    supply = iter(encode(text, add_special_tokens=False)["input_ids"])
    replaced = (
        segment in segments and not delimiter
        for segment, delimiter in zip(tokens.segments, tokens.delimiters, strict=True)
    )
    ids = (next(supply) if other else token for token, other in zip(tokens.ids, replaced, strict=True))
    return replace(tokens, ids=tuple(ids))


def _mapping(message: Message) -> dict[str, object]:
    return {"role": message.role, "content": [{"text": part.text, "name": part.name} for part in message.parts]}
