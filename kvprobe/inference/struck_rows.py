"""Rows of a decode batch under faults: for each prompt a clean row, and one for each of its faults.

Before each token the faults that are due are written into their rows, and transient ones are undone after it. Rows that
have ended leave the batch. The first fault is written before the prompt's last token is read, so that token is the
first to see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from kvprobe.brief import Brief
from kvprobe.cache.entries import entries
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Scope
from kvprobe.inference.batch import Batch
from kvprobe.inference.forward import forward_pass, taps
from kvprobe.inference.outcomes import divergence
from kvprobe.models.lanes import Lanes
from kvprobe.models.rounding import difference
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import GENERATED, Tokens


@dataclass(frozen=True, repr=False)
class Outcome(Brief):
    """What one row said.

    Attributes:
        tokens: its own answer, greedy, a stop token included.
        text: of these, without control tokens; empty without a tokenizer.
        stopped: whether a stop token ended it.
        struck: vectors (slots × heads × layers, K and V together) written or hidden, over all steps.
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


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt, each of whose faults is a row of the batch.

    Attributes:
        context: its cache but for the last token, and what the faults need to know of it.
        last: its last token.
        draws: one for each fault.
        hidden: what each of these rows may not read.
    """

    context: FaultContext
    last: Tokens
    faults: Sequence[Fault]
    draws: Sequence[Draws]
    hidden: Sequence[Scope | None]


@dataclass
class _Row:
    """A row of the batch, and what it has generated so far.

    Attributes:
        question: its place among the questions of the batch.
        fault: None in the clean row.
    """

    question: int
    fault: Fault | None
    draws: Draws
    hidden: Scope | None = None
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
class StruckRows:
    """Of each question the clean row and one row for each fault, decoded from the prompt's last token on."""

    lanes: Lanes
    asked: Sequence[Asked]
    lane: Lane
    max_new_tokens: int

    def answer(self, ends: frozenset[int]) -> list[list[Outcome]]:
        """What each row says, question by question, the clean row first."""
        return self._decode(None, ends)

    def follow(self, clean: Sequence[Sequence[int]]) -> list[list[Outcome]]:
        """How far each row is from the clean one while all rows of a question read its clean answer."""
        return self._decode(clean, frozenset())

    def _decode(self, given: Sequence[Sequence[int]] | None, ends: frozenset[int]) -> list[list[Outcome]]:
        rows = [
            [_Row(place, None, Draws())]
            + [_Row(place, *row) for row in zip(asked.faults, asked.draws, asked.hidden, strict=True)]
            for place, asked in enumerate(self.asked)
        ]
        caches = [asked.context.cache for asked in self.asked]
        batch = Batch(self.lanes, caches, [len(group) for group in rows], self.max_new_tokens)
        standing = [row for group in rows for row in group]
        for place, row in enumerate(standing):
            if row.hidden is not None:
                row.struck += batch.hide(place, row.question, row.hidden, row.draws)
        tokens = [self.asked[row.question].last for row in standing]
        for step in range(self.max_new_tokens):
            self._strike(batch, standing, step)
            logits = batch.decode(tokens, self.lane)
            batch.undo()
            if step == 0 and given is None:
                self._hold_clean(standing, logits)
            finite = entries(logits.amax(-1).isfinite(), bool)
            chosen = entries(logits.argmax(-1), int)
            kl = agreed = None
            if given is not None:
                clean = {row.question: place for place, row in enumerate(standing) if row.fault is None}
                kl, agreed = divergence(logits[[clean[row.question] for row in standing]], logits)
                chosen = [given[row.question][step] for row in standing]
            leaving: list[int] = []
            for place, row in enumerate(standing):
                if row.fault is None and not finite[place]:
                    raise UserError(
                        f"The clean run's logits are not finite after {step} tokens; {self.lanes.dtype} may be too "
                        "narrow for this model, load it in another dtype."
                    )
                if row.broken is None and not finite[place]:
                    row.broken = f"the logits after {step} tokens, though K and V are finite"
                if row.broken is None and kl is not None and agreed is not None:
                    row.kl.append(float(kl[place]))
                    row.agreed.append(bool(agreed[place]))
                elif row.broken is None:
                    row.tokens.append(chosen[place])
                    row.stopped = chosen[place] in ends
                if row.stopped or row.broken is not None or (given and step + 1 == len(given[row.question])):
                    leaving.append(place)
            if len(leaving) == len(standing):
                break
            if leaving:
                staying = batch.drop(leaving)
                standing, chosen = [standing[place] for place in staying], [chosen[place] for place in staying]
            tokens = [
                Tokens.of([token], GENERATED, self.asked[row.question].last.following + step)
                for token, row in zip(chosen, standing, strict=True)
            ]
        return [[row.outcome() for row in group] for group in rows]

    def _hold_clean(self, standing: Sequence[_Row], logits: Float[Tensor, "rows vocab"]) -> None:
        """Refuse clean rows that compute something else in the batch than alone."""
        for row, beside in zip(standing, logits, strict=True):
            if row.fault is None:
                asked = self.asked[row.question]
                past = asked.context.cache
                layers = taps(self.lanes, past, store=False)
                alone = forward_pass(self.lanes, past, [asked.last], layers, self.lane, 1)[1][0, 0]
                off = difference(beside, alone)
                if bool(beside.isfinite().all()) and not off <= max(1e-3, self.lanes.tolerance()):
                    raise UserError(
                        f"{type(self.lanes.plain).__name__} computes other logits for a row of a batch than for the "
                        f"row alone (off by {off:.1e}), so no effect of a fault is known; use another model."
                    )

    def _strike(self, batch: Batch, standing: Sequence[_Row], step: int) -> None:
        """Write the faults that are due. A row whose cache is no longer finite is marked, and leaves after the pass."""
        for transient in (False, True):
            due: dict[int, list[tuple[int, _Row, Fault]]] = {}
            for place, row in enumerate(standing):
                if row.fault is not None and row.fault.due(step) and row.fault.transient is transient:
                    due.setdefault(row.question, []).append((place, row, row.fault))
            for question, struck in due.items():
                faults, draws = [fault for *_, fault in struck], [row.draws for _, row, _ in struck]
                places, context = [place for place, *_ in struck], self.asked[question].context
                damage = batch.strike(question, faults, draws, places, context, step, transient)
                for place, row, _ in struck:
                    row.struck += int(damage.count[place])
                    if place in damage.nonfinite:
                        row.broken = str(damage.nonfinite[place])
