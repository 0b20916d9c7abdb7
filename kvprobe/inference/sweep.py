"""Many faults in one batch: a prompt is read once, and each fault at each rate is a row of one decode batch.

Before each token the faults that are due are written into their rows, and transient ones are undone after it. Rows that
have ended leave the batch. A clean row is part of each pass, so rows are compared within one pass of the same kernels.

The first fault is written before the prompt's last token is read, so that token is the first to see it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvprobe.brief import Brief, Table
from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.checks import require_whole
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext, Queries
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.inference.batch import Batch, fitting_rows
from kvprobe.inference.forward import as_seen, extend, forward_pass, one_row_each, taps
from kvprobe.inference.generate import decode_text, end_tokens
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.under_policy import tokens_at
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import GENERATED, Tokens

ROWS = 64
"""Rows per batch: with more, a CPU hardly takes less time per row."""
QUERIES = 8
"""Number of last tokens of the prompt whose queries measure how far noise moves an attention output."""


@dataclass(frozen=True)
class Trial:
    """One row of a sweep: a fault, and the number of its repetition.

    Trials of one repetition share random draws, whatever the fault; see `kvprobe.faults.draws`.
    """

    fault: Fault
    repeat: int = 0


@dataclass(frozen=True, repr=False)
class Outcome(Brief):
    """What one row said.

    Attributes:
        tokens: its own answer, greedy, a stop token included.
        text: of these, without control tokens; empty without a tokenizer.
        stopped: whether a stop token ended it.
        struck: vectors (slots × heads × layers, K and V together) that were written, over all steps.
        broken: where its cache or its logits stopped being finite, in words; the row ends there. None if they did not.
        kl: KL(clean ‖ row) in nats at each token of the clean answer, which the row reads; fewer if the row broke.
        agreed: whether the row's likeliest token was that of the clean answer, at each of them.
    """

    tokens: tuple[int, ...]
    text: str
    stopped: bool
    struck: int = 0
    broken: str | None = None
    kl: tuple[float, ...] = ()
    agreed: tuple[bool, ...] = ()


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
    for place, (clean_token, other_token) in enumerate(zip(clean, other, strict=False)):
        if clean_token != other_token:
            return place
    return None if len(clean) == len(other) else min(len(clean), len(other))


def sweep(
    lanes: Lanes,
    prompt: Tokens,
    trials: Sequence[Trial],
    *,
    past: KVCache | None = None,
    donors: Mapping[str, KVCache] | None = None,
    seed: int = 0,
    sample: int = 0,
    max_new_tokens: int = 64,
    stop: Sequence[int] | None = None,
    follow: bool = True,
    rows: int = ROWS,
    lane: Lane = "plain",
    done: Callable[[int], object] = lambda count: None,
) -> Sweep:
    """Answer a prompt once for each trial.

    Args:
        past: a cache of one row to read the prompt after.
        donors: caches of one row that faults take slots from, by name.
        sample: number of the prompt, which separates its random draws from those of other prompts.
        stop: ids that end a row; the model's own end tokens by default.
        follow: also have each row read the clean answer, for `Outcome.kl`; otherwise that stays empty.
        rows: per batch, the clean one included; fewer where memory is short.
        done: called after each batch with the number of its trials.

    Raises:
        UserError: there is no prompt, or a fault lacks what it needs (see `Fault.damaged`).
    """
    require_whole("A sweep", "max_new_tokens", max_new_tokens, 1)
    require_whole("A sweep", "rows", rows, 2)
    for trial in trials:
        if trial.fault.at != "every" and trial.fault.at >= max_new_tokens:
            raise UserError(
                f"{trial.fault} strikes before token {trial.fault.at}, but only {max_new_tokens} are read; raise "
                "max_new_tokens."
            )
    if not len(prompt):
        raise UserError("There is nothing to answer: the prompt has no token.")
    past = one_row_each(lanes, past, 1)
    start = past if len(prompt) == 1 else extend(lanes, past, [prompt[:-1]], lane)[0]
    if start is None:
        raise UserError("A prompt of one token leaves no cache to damage; give a longer one, or a `past`.")
    context = prepare(lanes, start, [trial.fault for trial in trials], donors)
    ends = end_tokens(lanes, stop)
    rows = fitting_rows(rows, context.cache, max_new_tokens)
    clean: Outcome | None = None
    outcomes: list[Outcome] = []
    for first in range(0, max(1, len(trials)), rows - 1):
        chunk = trials[first : first + rows - 1]
        draws = [Draws(seed, sample, trial.repeat) for trial in chunk]
        decoding = _Decoding(lanes, context, prompt[-1:], [trial.fault for trial in chunk], draws, lane, max_new_tokens)
        answers = decoding.answer(ends)
        clean = answers[0] if clean is None else clean
        followed = decoding.follow(clean.tokens) if follow else [Outcome((), "", False)] * len(answers)
        complete = [
            replace(
                answer,
                text=decode_text(lanes.tokenizer, answer.tokens, ends),
                kl=comparison.kl,
                agreed=comparison.agreed,
                broken=answer.broken or comparison.broken,
            )
            for answer, comparison in zip(answers, followed, strict=True)
        ]
        clean = complete[0] if not outcomes else clean
        outcomes += complete[1:]
        done(len(chunk))
    assert clean is not None
    return Sweep(clean, tuple(trials), tuple(outcomes))


def prepare(
    lanes: Lanes, cache: KVCache, faults: Sequence[Fault], donors: Mapping[str, KVCache] | None = None
) -> FaultContext:
    """What these faults need to know of a cache of one row: K and V as seen, donors, frequencies, queries."""
    needs = {need for fault in faults for need in fault.needs}
    context = FaultContext(
        as_seen(lanes, cache), {name: as_seen(lanes, donor) for name, donor in (donors or {}).items()}
    )
    if "rotaries" in needs:
        context = replace(context, rotaries=lanes.rotaries)
    if "queries" in needs:
        context = replace(context, queries=last_queries(lanes, cache, QUERIES))
    return context


def last_queries(lanes: Lanes, cache: KVCache, count: int) -> Queries:
    """The queries of a cache's last tokens, which are masked and read again."""
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
    with lanes.observing_attention(observe):
        forward_pass(lanes, before, [tokens_at(ledger, 0, index)], layers, "plain", logits=1)
    return Queries(tuple(rows), tuple(scales), group)


@dataclass
class _Row:
    """What a row has generated so far."""

    tokens: list[int] = field(default_factory=list[int])
    stopped: bool = False
    struck: int = 0
    broken: str | None = None
    kl: list[float] = field(default_factory=list[float])
    agreed: list[bool] = field(default_factory=list[bool])

    def outcome(self) -> Outcome:
        return Outcome(
            tuple(self.tokens), "", self.stopped, self.struck, self.broken, tuple(self.kl), tuple(self.agreed)
        )


@dataclass(frozen=True)
class _Decoding:
    """The clean row and one row for each fault, decoded from the prompt's last token on."""

    lanes: Lanes
    context: FaultContext
    last: Tokens
    faults: Sequence[Fault]
    draws: Sequence[Draws]
    lane: Lane
    max_new_tokens: int

    def answer(self, ends: frozenset[int]) -> list[Outcome]:
        """Each row's own answer, that of the clean row first."""
        return self._decode(None, ends)

    def follow(self, clean: Sequence[int]) -> list[Outcome]:
        """How far each row is from the clean one while all of them read the clean answer."""
        return self._decode(clean, frozenset())

    def _decode(self, fixed_answer: Sequence[int] | None, ends: frozenset[int]) -> list[Outcome]:
        rows = [_Row() for _ in range(len(self.faults) + 1)]
        batch = Batch(self.lanes, self.context.cache, len(rows), self.max_new_tokens)
        numbers = list(range(len(rows)))
        """Which row stands at each place of the batch; the clean one is 0."""
        tokens = [self.last] * len(rows)
        for step in range(self.max_new_tokens if fixed_answer is None else len(fixed_answer)):
            self._strike(batch, rows, numbers, step)
            logits = batch.decode(tokens, self.lane)
            batch.undo()
            finite = entries(logits.amax(-1).isfinite(), bool)
            chosen = entries(logits.argmax(-1), int)
            kl = agreed = None
            if fixed_answer is not None:
                kl, agreed = divergence(logits[:1].expand_as(logits), logits)
            leaving: list[int] = []
            for place, number in enumerate(numbers):
                row = rows[number]
                if not number and not finite[place]:
                    raise UserError(
                        f"The clean run's logits are not finite after {step} tokens; {self.lanes.dtype} may be too "
                        "narrow for this model, load it in another dtype."
                    )
                if row.broken is None and not finite[place]:
                    row.broken = f"the logits after {step} tokens, though K and V are finite"
                if row.broken is not None:
                    leaving.append(place)
                elif kl is not None and agreed is not None:
                    row.kl.append(float(kl[place]))
                    row.agreed.append(bool(agreed[place]))
                else:
                    row.tokens.append(chosen[place])
                    row.stopped = chosen[place] in ends
                    if row.stopped:
                        leaving.append(place)
            following: Sequence[int] = chosen if fixed_answer is None else [fixed_answer[step]] * len(numbers)
            if leaving:
                staying = batch.drop(leaving)
                numbers, following = [numbers[place] for place in staying], [following[place] for place in staying]
            if not numbers:
                break
            tokens = [Tokens.of([token], GENERATED, self.last.following + step) for token in following]
        return [row.outcome() for row in rows]

    def _strike(self, batch: Batch, rows: Sequence[_Row], numbers: Sequence[int], step: int) -> None:
        """Write the faults that are due. A row whose cache is no longer finite is marked, and leaves after the pass."""
        for transient in (False, True):
            due = [
                (place, number)
                for place, number in enumerate(numbers)
                if number and self.faults[number - 1].due(step) and self.faults[number - 1].transient is transient
            ]
            if not due:
                continue
            faults, draws = (
                [self.faults[number - 1] for _, number in due],
                [self.draws[number - 1] for _, number in due],
            )
            damage = batch.strike(faults, draws, [place for place, _ in due], self.context, step, transient)
            for place, number in due:
                rows[number].struck += int(damage.count[place])
                if place in damage.nonfinite:
                    rows[number].broken = str(damage.nonfinite[place])
