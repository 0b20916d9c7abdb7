"""An exchange after a compaction, and questions about what was said before it.

Each passcode context has a follow-up exchange, which uses only what the summaries say, and three questions: one whose
answer is in the summaries, one whose answer is only in the hidden turns, and one without an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from typing import Literal

from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.passcode import Context, Encoder, contexts, conversation
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

Kind = Literal["summary", "hidden", "neither"]
KINDS: tuple[Kind, ...] = ("summary", "hidden", "neither")
"""Where the answer to a question is."""

BETWEEN = ("B1", "B2", "B3", "B4")
"""Segments of the exchanges between the second summary and a question."""

PLACE_KINDS = ("summary request", "summary text", "summary delimiters", "later text", "later delimiters")
"""What a token after the hidden turn is."""


@dataclass(frozen=True)
class Compaction:
    """The continuation of one context's conversation.

    Attributes:
        summary_other: a wrong answer to the first question, of the same kind and nowhere in the context.
        reworded_user, reworded_assistant: what the turn says that states the first answer, in other words.
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
    reworded_user: str
    reworded_assistant: str

    def question(self, kind: Kind) -> str:
        return getattr(self, f"{kind}_question")

    def answer(self, kind: Kind) -> str | None:
        """The words that a right answer contains; None where there is no answer."""
        return None if kind == "neither" else getattr(self, f"{kind}_answer")


@cache
def compactions() -> tuple[Compaction, ...]:
    """One for each of `kvprobe.tasks.passcode.contexts`, in their order."""
    entries = {entry["id"]: entry for entry in shipped_entries("tasks/compaction")}
    names = [field.name for field in fields(Compaction)]
    return tuple(Compaction(**{name: entries[context.id][name] for name in names}) for context in contexts())


def compacted_conversation(context: Context, compaction: Compaction, code: str) -> Transcript:
    """The conversation in segments system, T1, summary1, T2 (holds `code`), summary2, T3 (the follow-up) and `ask`.

    The reply of T3 is the part `reply`; `ask` asks for the code, and its answer is the part `answer`.
    """
    *before, question, answer = conversation(context, code).messages
    followup = talk(("T3", compaction.followup_user, [{"text": compaction.followup_assistant, "name": "reply"}]))
    asking = (replace(message, segment="ask") for message in (question, answer))
    return Transcript((*before, *followup.messages, *asking))


def going_on(chat: Transcript, compaction: Compaction, turns: int) -> Transcript:
    """The conversation up to its second summary, and so many exchanges after it, each in a segment of its own.

    They are follow-ups that hold none of the answers, right or wrong: the compaction's own, which is T3, then those of
    others.
    """
    own_first = sorted(compactions(), key=lambda other: other != compaction)
    answers = (compaction.summary_answer, compaction.summary_other, compaction.hidden_answer)
    texts = ((other.followup_user, other.followup_assistant) for other in own_first)
    silent = [pair for pair in texts if not any(answer.lower() in " ".join(pair).lower() for answer in answers)]
    exchanges = (talk((name, *pair)).messages for name, pair in zip(BETWEEN[:turns], silent[:turns], strict=True))
    before = (message for message in chat.messages if message.segment not in ("T3", "ask"))
    return Transcript((*before, *chain(*exchanges)))


def asked(chat: Transcript, question: str, answer: str = "", lead: str = "") -> Transcript:
    """The conversation up to T3, and as `ask` this question in place of the one for the code; with an answer also the
    reply, in which the part `answer` follows the part `lead`, if there is one."""
    before = (message for message in chat.messages if message.segment != "ask")
    parts = [{"text": f"{lead} ", "name": "lead"}] if lead else []
    replies = [[*parts, {"text": answer, "name": "answer"}]] if answer else []
    return Transcript((*before, *talk(("ask", question, *replies)).messages))


def places_by_kind(tokens: Tokens) -> dict[str, tuple[int, ...]]:
    """The places of every token of summary2 and T3, by what it is, in tokens of a conversation without T2.

    The request for the summary is the first run of text in the summary's segment; the summary is the rest of its text.
    """
    request, *rest = tokens.text_runs("summary2")
    text, later = list(chain(*rest)), list(chain(*tokens.text_runs("T3")))
    summary, followed = (range(*tokens.span(name).indices(len(tokens))) for name in ("summary2", "T3"))
    by_kind = (request, text, {*summary} - {*request, *text}, later, {*followed} - {*later})
    return {kind: tuple(sorted(places)) for kind, places in zip(PLACE_KINDS, by_kind, strict=True)}


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
