"""One batch, many conditions: a prompt is read once, and every fault at every rate is a row of one decode batch.

Before each token the faults that are due are written into their rows, and what was transient is put back after it; rows that
have ended leave the batch. The clean row rides along in each pass, so what a row is held against was computed beside it, by
the same kernels.

A fault is felt from the prompt's last token on: that token is read after the cut, with the first damage done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.faults.host import Host, Queries
from kvprobe.faults.scope import GENERATED
from kvprobe.inference.batch import Batch, fitting_rows
from kvprobe.inference.forward import as_seen, extend, one_row_each, read, taps
from kvprobe.inference.generate import decode_text, stop_tokens
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.under_policy import tokens_at
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.text.transcript import Tokens

ROWS = 64
"""Rows to a batch: beyond it, a CPU's time for each row hardly falls."""
QUERIES = 8
"""The prompt's last tokens, whose queries say how far noise moves an attention output."""


@dataclass(frozen=True)
class Trial:
    """One row of a sweep: a fault, and which repetition of its lots. Trials of one repeat share their lots, whatever the
    fault; see `kvprobe.faults.draws`."""

    fault: Fault
    repeat: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one row said.

    Attributes:
        tokens: its own answer, greedy, a stop token included.
        text: of these, without control tokens; empty without a tokenizer.
        stopped: whether a stop token ended it.
        struck: vectors (slots × heads × layers, K and V together) that were written, over all steps.
        broken: where a number of its cache, or its logits, were no longer finite; the row ends there.
        kl: in nats, of each token of the clean answer, clean ‖ row, had the row read that answer; fewer where it broke.
        agreed: whether the row would have said each of these tokens.
    """

    tokens: tuple[int, ...]
    text: str
    stopped: bool
    struck: int = 0
    broken: str | None = None
    kl: tuple[float, ...] = ()
    agreed: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """The clean row, and one outcome for each trial."""

    clean: Outcome
    trials: tuple[Trial, ...]
    outcomes: tuple[Outcome, ...]

    def first_divergence(self, trial: int) -> int | None:
        """The first token of its own answer at which a trial left the clean one; None if it never did."""
        return first_divergence(self.clean.tokens, self.outcomes[trial].tokens)


def first_divergence(clean: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ; None where they are the same."""
    for place, (mine, theirs) in enumerate(zip(clean, other, strict=False)):
        if mine != theirs:
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
    done: Callable[[int], Any] = lambda count: None,
) -> Sweep:
    """Answer a prompt once for each trial.

    Args:
        past: a cache of one row to read the prompt after.
        donors: caches of one row that faults take slots from, by name.
        sample: number of the prompt, which keeps its lots apart from those of others.
        stop: ids that end a row; the model's own end tokens by default.
        follow: also have each row read the clean answer, for `Outcome.kl`; otherwise that stays empty.
        rows: to a batch, the clean one included; fewer where memory is short.
        done: called with the number of trials that were finished.

    Raises:
        UserError: there is no prompt, or a fault lacks what it needs (see `Fault.damaged`).
    """
    if max_new_tokens < 1 or rows < 2:
        raise UserError(f"A sweep has max_new_tokens={max_new_tokens} and rows={rows}; it needs at least 1 and 2.")
    for trial in trials:
        if trial.fault.at != "every" and trial.fault.at >= max_new_tokens:
            raise UserError(
                f"{trial.fault} strikes before token {trial.fault.at}, and only {max_new_tokens} are read; it never "
                "would."
            )
    if not len(prompt):
        raise UserError("There is nothing to answer: the prompt has no token.")
    past = one_row_each(lanes, past, 1)
    start = past if len(prompt) == 1 else extend(lanes, past, [prompt[:-1]], lane)[0]
    if start is None:
        raise UserError("A prompt of one token leaves no cache to damage; give a longer one, or a `past`.")
    host = prepare(lanes, start, [trial.fault for trial in trials], donors)
    ends = frozenset(stop_tokens(lanes) if stop is None else stop)
    rows = fitting_rows(rows, host.cache, max_new_tokens)
    clean: Outcome | None = None
    outcomes: list[Outcome] = []
    for first in range(0, max(1, len(trials)), rows - 1):
        chunk = trials[first : first + rows - 1]
        draws = [Draws(seed, sample, trial.repeat) for trial in chunk]
        passing = _Pass(lanes, host, prompt[-1:], [trial.fault for trial in chunk], draws, lane, max_new_tokens)
        own = passing.answer(ends)
        clean = own[0] if clean is None else clean
        followed = passing.follow(clean.tokens) if follow else [Outcome((), "", False)] * len(own)
        texted = [replace(each, text=decode_text(lanes.tokenizer, each.tokens, ends)) for each in own]
        both = [
            replace(mine, kl=read.kl, agreed=read.agreed, broken=mine.broken or read.broken)
            for mine, read in zip(texted, followed, strict=True)
        ]
        clean = both[0] if not outcomes else clean
        outcomes += both[1:]
        done(len(chunk))
    assert clean is not None
    return Sweep(clean, tuple(trials), tuple(outcomes))


def prepare(lanes: Lanes, cache: KVCache, faults: Sequence[Fault], donors: Mapping[str, KVCache] | None = None) -> Host:
    """What these faults need to know of a cache of one row: its numbers as they are seen, donors, frequencies, queries."""
    needs = {need for fault in faults for need in fault.needs}
    host = Host(as_seen(lanes, cache), {name: as_seen(lanes, donor) for name, donor in (donors or {}).items()})
    if "rotaries" in needs:
        host = replace(host, rotaries=lanes.rotaries)
    if "queries" in needs:
        host = replace(host, queries=last_queries(lanes, cache, QUERIES))
    return host


def last_queries(lanes: Lanes, cache: KVCache, count: int) -> Queries:
    """The queries of a cache's last tokens, which are read again for them."""
    ledger = cache.ledger
    held = (~ledger.padding[0]).nonzero()[:, 0]
    index = held[-min(count, len(held) - 1) :]
    again = torch.zeros_like(ledger.padding)
    again[0, index] = True
    kv_heads, group = lanes.geometry.n_kv_heads, lanes.geometry.n_heads // lanes.geometry.n_kv_heads
    rows: list[Tensor] = []
    scales: list[float] = []

    def observe(given: Attending) -> None:
        rows.append(given.query[0].unflatten(0, (kv_heads, group)).transpose(1, 2).flatten(1, 2))
        scales.append(given.scale)

    before = cache.mask(slots=again)
    layers = taps(lanes, before)
    with lanes.observing_attention(observe):
        read(lanes, before, [tokens_at(ledger, 0, index)], layers, "plain", logits=1)
    return Queries(tuple(rows), tuple(scales), group)


@dataclass
class _Row:
    """What a row has said so far."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    struck: int = 0
    broken: str | None = None
    kl: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)

    def outcome(self) -> Outcome:
        return Outcome(
            tuple(self.tokens), "", self.stopped, self.struck, self.broken, tuple(self.kl), tuple(self.agreed)
        )


@dataclass(frozen=True)
class _Pass:
    """The clean row and one row for each fault, to be read from the prompt's last token on."""

    lanes: Lanes
    host: Host
    last: Tokens
    faults: Sequence[Fault]
    draws: Sequence[Draws]
    lane: Lane
    max_new_tokens: int

    def answer(self, ends: frozenset[int]) -> list[Outcome]:
        """Each row's own answer, the clean one's first."""
        return self._read(None, ends)

    def follow(self, clean: Sequence[int]) -> list[Outcome]:
        """How far each row is from the clean one while all of them read the clean answer."""
        return self._read(clean, frozenset())

    def _read(self, given: Sequence[int] | None, ends: frozenset[int]) -> list[Outcome]:
        said = [_Row() for _ in range(len(self.faults) + 1)]
        batch = Batch(self.lanes, self.host.cache, len(said), self.max_new_tokens)
        here = list(range(len(said)))
        """The number of each of the batch's rows among all; the clean one is 0."""
        tokens = [self.last] * len(said)
        for step in range(self.max_new_tokens if given is None else len(given)):
            self._strike(batch, said, here, step)
            logits = batch.read(tokens, self.lane)
            batch.undo()
            finite = logits.amax(-1).isfinite().tolist()
            chosen = logits.argmax(-1).tolist()
            kl, agreed = divergence(logits[:1].expand_as(logits), logits) if given is not None else (None, None)
            leaving = []
            for place, number in enumerate(here):
                row = said[number]
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
            following = chosen if given is None else [given[step]] * len(here)
            if leaving:
                stay = batch.drop(leaving)
                here, following = [here[place] for place in stay], [following[place] for place in stay]
            if not here:
                break
            tokens = [Tokens.of([token], GENERATED, self.last.following + step) for token in following]
        return [row.outcome() for row in said]

    def _strike(self, batch: Batch, said: Sequence[_Row], here: Sequence[int], step: int) -> None:
        """Let the faults that are due strike. A row that is no longer finite is marked; it leaves after the pass."""
        for transient in (False, True):
            due = [
                (place, number)
                for place, number in enumerate(here)
                if number and self.faults[number - 1].due(step) and self.faults[number - 1].transient is transient
            ]
            if not due:
                continue
            faults, draws = (
                [self.faults[number - 1] for _, number in due],
                [self.draws[number - 1] for _, number in due],
            )
            damage = batch.strike(faults, draws, [place for place, _ in due], self.host, step, transient)
            for place, number in due:
                said[number].struck += int(damage.count[place])
                if place in damage.broken:
                    said[number].broken = str(damage.broken[place])
