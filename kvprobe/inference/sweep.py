"""Many faults in one batch: a prompt is read once, and each fault at each rate is a row of one decode batch.

Several prompts may share a batch: a step reads all weights once, however many rows there are. A clean row of each
prompt is part of each pass, so rows are compared within one pass of the same kernels.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvprobe.arguments import AtLeastZero, check_fields
from kvprobe.brief import Brief, Table
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext, Queries
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Scope
from kvprobe.faults.strike import without_padding
from kvprobe.inference.batch import fitting_rows
from kvprobe.inference.forward import as_seen, extend, forward_pass, one_row_each, prove_reading, taps
from kvprobe.inference.generate import decode_text, end_tokens
from kvprobe.inference.struck_rows import Asked, Outcome, StruckRows
from kvprobe.inference.under_policy import tokens_at
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.packed import packed_if_faster
from kvprobe.models.unproved import Lane
from kvprobe.names import unknown
from kvprobe.text.tokens import GENERATED, Tokens, common_length

ROWS = 64
"""Rows per batch: with more, a CPU hardly takes less time per row."""
QUERIES = 8
"""Number of last tokens of the prompt whose queries measure how far noise moves an attention output."""


@dataclass(frozen=True)
class Trial:
    """One row of a sweep: a fault, the number of its repetition, and what is hidden from it.

    Trials of one repetition share random draws, whatever the fault; see `kvprobe.faults.draws`.

    Attributes:
        hidden: slots that the row may not read in the scope's layers and heads, as if they were evicted there before
            the prompt's last token is read. Indices of slots do not count padding.
    """

    fault: Fault
    repeat: AtLeastZero = 0
    hidden: Scope | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden is not None and (self.hidden.unit == "number" or self.hidden.parts != "kv"):
            raise UserError(
                f"Trial has hidden={self.hidden}; whole slots are hidden, so give no part and another unit."
            )


@dataclass(frozen=True, repr=False)
class Sweep(Brief):
    """The clean row, and one outcome for each trial."""

    clean: Outcome
    trials: tuple[Trial, ...]
    outcomes: tuple[Outcome, ...]

    def _facts(self) -> Iterable[str]:
        yield f"{len(self.trials)} trials, clean={self.clean.text!r}"
        yield f"{sum(outcome.tokens != self.clean.tokens for outcome in self.outcomes)} with another answer"

    def _table(self) -> Table:
        columns = ("fault", "repeat", "answer", "struck", "broken", "KL in all")
        rows = (
            (trial.fault, trial.repeat, outcome.text, outcome.struck, outcome.broken or "", float(sum(outcome.kl)))
            for trial, outcome in zip(self.trials, self.outcomes, strict=True)
        )
        return columns, rows

    def first_divergence(self, trial: int) -> int | None:
        """Index of the first token in which a trial's own answer differs from the clean one; None if it never does."""
        return first_divergence(self.clean.tokens, self.outcomes[trial].tokens)


def first_divergence(clean: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ; None if they are the same."""
    place = common_length(clean, other)
    return None if place == len(clean) == len(other) else place


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt and the trials under which it is answered.

    Attributes:
        past: a cache of one row to read the prompt after.
        donors: caches of one row that faults take slots from, by name.
        sample: number of the prompt, which separates its random draws from those of other prompts.
    """

    prompt: Tokens
    trials: Sequence[Trial]
    past: KVCache | None = None
    donors: Mapping[str, KVCache] = field(default_factory=dict[str, KVCache])
    sample: int = 0


def sweep(
    lanes: Lanes,
    questions: Sequence[Question],
    *,
    seed: int = 0,
    max_new_tokens: int = 64,
    stop: Collection[int] | None = None,
    follow: bool = True,
    rows: int = ROWS,
    lane: Lane = "plain",
    done: Callable[[int], object] = lambda count: None,
) -> list[Sweep]:
    """Answer each question once for each of its trials; questions share batches as far as their rows fit.

    What a row says does not depend on the rows beside it, but for rounding.

    Args:
        stop: ids that end a row; the model's own end tokens by default.
        follow: also have each row read the clean answer, for `Outcome.kl`; otherwise that stays empty.
        rows: per batch, the clean ones included; fewer where memory is short.
        done: called after each batch with the number of its trials.

    Raises:
        UserError: there is no prompt, or a fault lacks what it needs (see `Fault.damaged`).
    """
    if not questions:
        return []
    with lanes.looked_at():
        prepared = [_prepared(lanes, question, max_new_tokens, lane) for question in questions]
    ends = end_tokens(lanes, stop)
    rows = min(fitting_rows(rows, context.cache, max_new_tokens) for context in prepared)
    clean: dict[int, Outcome] = {}
    outcomes: list[list[Outcome]] = [[] for _ in questions]
    largest = min(rows, sum(1 + len(question.trials) for question in questions))
    with packed_if_faster(lanes, lane, largest, max_new_tokens):
        for pieces in _batches([len(question.trials) for question in questions], rows):
            asked = [_asked(prepared[number], questions[number], span, seed) for number, span in pieces]
            batch = StruckRows(lanes, asked, lane, max_new_tokens)
            answers = batch.answer(ends)
            compared = [[Outcome((), "", False)] * len(group) for group in answers]
            if follow:
                along = [clean.get(number, group[0]) for (number, _), group in zip(pieces, answers, strict=True)]
                compared = batch.follow([outcome.tokens for outcome in along])
            for (number, _), said, followed in zip(pieces, answers, compared, strict=True):
                complete = [
                    replace(
                        answer,
                        text=decode_text(lanes.tokenizer, answer.tokens, ends),
                        kl=comparison.kl,
                        agreed=comparison.agreed,
                        broken=answer.broken or comparison.broken,
                    )
                    for answer, comparison in zip(said, followed, strict=True)
                ]
                clean.setdefault(number, complete[0])
                outcomes[number] += complete[1:]
            done(sum(len(each.faults) for each in asked))
    return [
        Sweep(clean[number], tuple(question.trials), tuple(outcomes[number]))
        for number, question in enumerate(questions)
    ]


def _batches(trials: Sequence[int], rows: int) -> Iterable[list[tuple[int, slice]]]:
    """Which trials of which questions are answered together: each piece takes a row for each trial and a clean one."""
    batch: list[tuple[int, slice]] = []
    taken = 0
    for number, count in enumerate(trials):
        for first in range(0, max(1, count), rows - 1):
            size = 1 + min(rows - 1, count - first)
            if taken + size > rows:
                yield batch
                batch, taken = [], 0
            batch.append((number, slice(first, first + rows - 1)))
            taken += size
    yield batch


def _asked(context: FaultContext, question: Question, span: slice, seed: int) -> Asked:
    """Some trials of a question, as rows of a batch."""
    trials = question.trials[span]
    draws = [Draws(seed, question.sample, trial.repeat) for trial in trials]
    faults, hidden = [trial.fault for trial in trials], [trial.hidden for trial in trials]
    return Asked(context, question.prompt[-1:], faults, draws, hidden)


def _prepared(lanes: Lanes, question: Question, max_new_tokens: int, lane: Lane) -> FaultContext:
    """The cache of a prompt but for its last token, and what the faults need to know of it."""
    prompt = question.prompt
    for trial in question.trials:
        if trial.fault.at != "every" and trial.fault.at >= max_new_tokens:
            raise UserError(
                f"{trial.fault} strikes before token {trial.fault.at}, but only {max_new_tokens} are read; raise "
                "max_new_tokens."
            )
    if not len(prompt):
        raise UserError("There is nothing to answer: the prompt has no token.")
    past = one_row_each(lanes, question.past, 1)
    start = past if len(prompt) == 1 else extend(lanes, past, [prompt[:-1]], lane)[0]
    if start is None:
        raise UserError("A prompt of one token leaves no cache to damage; give a longer one, or a `past`.")
    # In a batch, segments of other prompts are known too.
    known = (*start.ledger.names, *prompt.names, GENERATED)
    for name in {name for trial in question.trials for name in trial.fault.scope.segments or ()}.difference(known):
        raise UserError(unknown("segment", name, start.ledger.names))
    return prepare(lanes, start, [trial.fault for trial in question.trials], question.donors)


def prepare(
    lanes: Lanes, cache: KVCache, faults: Sequence[Fault], donors: Mapping[str, KVCache] | None = None
) -> FaultContext:
    """What these faults need to know of a cache of one row: K and V as seen, donors, frequencies, queries."""
    needs = {need for fault in faults for need in fault.needs}
    cache = without_padding(cache, faults)
    context = FaultContext(
        as_seen(lanes, cache), {name: as_seen(lanes, donor) for name, donor in (donors or {}).items()}
    )
    if "rotaries" in needs:
        context = replace(context, rotaries=lanes.rotaries)
    if "queries" in needs:
        context = replace(context, queries=last_queries(lanes, cache, QUERIES))
    return context


def last_queries(lanes: Lanes, cache: KVCache, count: int) -> Queries:
    """The queries of a cache's last tokens, which are masked and read again.

    Raises:
        UserError: some layers do not attend with K and V that they store.
    """
    if not lanes.geometry.own_keys or lanes.geometry.recurrent:
        raise UserError(
            f"Noise is matched by its effect on attention to K and V, and not all layers of "
            f"{type(lanes.plain).__name__} store some; match it to the layer's numbers."
        )
    ledger = cache.ledger
    filled_slots = (~ledger.padding[0]).nonzero()[:, 0]
    index = filled_slots[-min(count, len(filled_slots) - 1) :]
    again = torch.zeros_like(ledger.padding)
    again[0, index] = True
    kv_heads, group = lanes.geometry.n_kv_heads, lanes.geometry.n_heads // lanes.geometry.n_kv_heads
    rows: list[Tensor] = []
    scales: list[float] = []

    def observe(inputs: Attending) -> None:
        rows.append(torch.unflatten(inputs.query[0], 0, (kv_heads, group)).transpose(1, 2).flatten(1, 2))
        scales.append(inputs.scale)

    before = cache.mask(slots=again)
    layers = taps(lanes, before)
    again_tokens = [tokens_at(ledger, 0, index)]
    prove_reading(lanes, before, again_tokens)
    with lanes.observing_attention(observe):
        forward_pass(lanes, before, again_tokens, layers, "plain", logits=1)
    return Queries(tuple(rows), tuple(scales), group)
