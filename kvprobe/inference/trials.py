"""Items of tasks answered under many faults, one row per trial.

A sample is one item of one task: its prompt is read once and answered once for each case; see
`kvprobe.inference.sweep`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from kvprobe.cache.cache import KVCache
from kvprobe.faults import Draws, Fault, FaultContext, scaffold
from kvprobe.inference.generate import stop_tokens
from kvprobe.inference.model import Model
from kvprobe.inference.struck_rows import Outcome
from kvprobe.inference.sweep import Question, Trial, first_divergence, sweep
from kvprobe.inference.under_policy import tokens_at
from kvprobe.tasks.passcode import contexts
from kvprobe.tasks.task import Item, Task
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILLER = " The weather is fine today, and there is nothing else to say about it."
"""What the neutral scaffold says, over and over."""

Labels = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Case:
    """A trial, and what identifies it in the table."""

    labels: Labels
    trial: Trial


@dataclass(frozen=True)
class AskedItem:
    """One item to be answered.

    Attributes:
        number: over all tasks, which keeps its draws apart from those of others.
        tokens: up to where the model goes on.
    """

    task: Task
    item: Item
    number: int
    tokens: Tokens


@runtime_checkable
class Strikable(Protocol):
    """What damaging a cache asks of the model that made it, wherever that runs."""

    @property
    def tokenizer(self) -> Any: ...
    def prefill(self, text: Tokens, /) -> KVCache: ...
    def as_seen(self, cache: KVCache, /) -> KVCache: ...
    def fault_context(self, cache: KVCache, faults: Sequence[Fault], donors: Mapping[str, KVCache], /) -> FaultContext:
        """See `kvprobe.inference.sweep.prepare`."""
        ...


def answer(
    model: Model, asked: Sequence[tuple[AskedItem, Sequence[Case]]], seed: int, *, follow: bool = True
) -> list[dict[str, Any]]:
    """One row per sample and case, the clean answer first (its `case` is -1; its labels are missing).

    Columns: `task`, `sample`, `item`, `slots` (of the prompt), the cases' labels, one column per scorer (`score_…`),
    `right` (the first of them), `same` (the whole answer is the clean one), `diverged` (first token that is not, -1 if
    none), `kl` and `kl_first` (nats, mean over the clean answer's tokens, and its first), `agreed` (share of them that
    the row would have said), `struck`, `broken` (where a number was no longer finite, else empty; its KL is missing)
    and `text`.

    Args:
        asked: samples of one task, with the cases of each; those that fit are answered in one batch.
    """
    task = asked[0][0].task
    questions = [
        Question(
            sample.tokens,
            [case.trial for case in cases],
            donors=donors(model, sample.tokens, sample.number, {case.trial.fault.lender for case in cases}),
            sample=sample.number,
        )
        for sample, cases in asked
    ]
    swept = sweep(
        model.lanes,
        questions,
        seed=seed,
        max_new_tokens=task.max_new_tokens,
        stop=[*stop_tokens(model.lanes), *(newlines(model.tokenizer) if task.one_line else ())],
        follow=follow,
    )
    rows: list[dict[str, Any]] = []
    for (sample, cases), answered in zip(asked, swept, strict=True):
        rows.append(_row(sample, -1, {}, answered.clean, answered.clean))
        for number, (case, outcome) in enumerate(zip(cases, answered.outcomes, strict=True)):
            rows.append(_row(sample, number, case.labels, outcome, answered.clean))
    return rows


def _row(sample: AskedItem, case: int, labels: Labels, outcome: Outcome, clean: Outcome) -> dict[str, Any]:
    task = sample.task
    scores = task.score(outcome.text, sample.item)
    diverged = first_divergence(clean.tokens, outcome.tokens)
    kl = outcome.kl if outcome.broken is None else ()
    return {
        "task": task.name,
        "sample": sample.number,
        "item": sample.item.id,
        "slots": len(sample.tokens),
        "answer": sample.item.answer,
        "case": case,
        **labels,
        **{f"score_{name}": scores[name] for name in task.scorers},
        "right": scores[task.scorers[0]] and outcome.broken is None,
        "same": diverged is None,
        "diverged": -1 if diverged is None else diverged,
        "kl": float(np.mean(kl)) if kl else np.nan,
        "kl_first": kl[0] if kl else np.nan,
        "agreed": float(np.mean(outcome.agreed)) if kl else np.nan,
        "struck": outcome.struck,
        "broken": outcome.broken or "",
        "text": outcome.text,
    }


def donors(model: Strikable, tokens: Tokens, number: int, wanted: Collection[str | None]) -> dict[str, KVCache]:
    """The wanted caches for a prompt: `distractor`, of a conversation about something else, drawn for this number, at
    least as long as the prompt; and `scaffold`, the prompt's own chat template around neutral filler."""
    caches: dict[str, KVCache] = {}
    if "distractor" in wanted:
        caches["distractor"] = model.prefill(unrelated(model.tokenizer, len(tokens), number))
    if "scaffold" in wanted:
        ids = model.tokenizer(FILLER, add_special_tokens=False)["input_ids"]
        caches["scaffold"] = model.prefill(scaffold(tokens, ids))
    return caches


def struck(model: Strikable, cache: KVCache, fault: Fault, *, seed: int = 0, number: int = 0) -> KVCache:
    """A cache of one row under one fault, which strikes once, with all that the fault needs to know.

    Args:
        number: of the sample, which keeps its draws apart from those of others.
    """
    cache = model.as_seen(cache)
    tokens = tokens_at(cache.ledger, 0, (~cache.ledger.padding[0]).nonzero()[:, 0])
    context = model.fault_context(cache, [fault], donors(model, tokens, number, {fault.lender}))
    return cache.corrupt(fault, draws=[Draws(seed=seed, sample=number)], contexts=[context])


def unrelated(tokenizer: Tokenizer, length: int, number: int) -> Tokens:
    """Small talk from hand-written contexts, drawn for the sample of this number, cut to so many tokens."""
    talk = contexts()
    order: list[int] = np.random.default_rng([number, 0x64]).permutation(len(talk)).tolist()
    messages: list[dict[str, str]] = []
    while True:
        for index in order:
            said = talk[index]
            messages += [
                {"role": "user", "content": said.chat_user},
                {"role": "assistant", "content": said.chat_assistant},
            ]
            names = [f"d{place}" for place in range(len(messages))]
            tokens = Transcript.from_messages(messages, names).tokens(tokenizer)
            if len(tokens) >= length:
                return tokens[:length]


@cache
def newlines(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The tokens that hold a line's end, in byte-level and in sentencepiece vocabularies."""
    vocabulary = tokenizer.get_vocab().items()
    return tuple(number for text, number in vocabulary if "Ċ" in text or "\n" in text or text == "<0x0A>")
