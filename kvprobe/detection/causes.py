"""What happened where two caches differ, layer by layer: what ledgers know, or the hypothesis that explains most."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvprobe.cache.layer import Layer
from kvprobe.cache.places import DamagedPlaces, runs
from kvprobe.cache.rotary import Rotary
from kvprobe.cache.stored import AnyCache
from kvprobe.detection.damaged import FOREIGN, Damaged, Explanation, LookUp, slots_in_words
from kvprobe.detection.hypotheses import GUESSED, NOTHING, explanations
from kvprobe.detection.origins import AFTER_OTHERS, KNOWN, after_another_text, known_origins, one_for_each_token
from kvprobe.names import number_ranges

MOST_EXPLAINED = 8
"""Layers that are explained: the first, the worst, and others evenly between."""
_WELL = 0.15
"""Share of a difference that may be left by what explains all of a layer."""


@dataclass(frozen=True)
class Cause:
    """What happened in some layers.

    Attributes:
        kind: see `kvprobe.detection.damaged.Kind`.
        layers: in which it was found, of those that were explained.
        slots: a run of slots, in words.
        left: share of the difference that this explanation leaves.
        control: the second best explanation of another kind, and what that leaves.
        confidence: from 0 to 1; how much more the second best leaves.
    """

    kind: str
    layers: tuple[int, ...]
    slots: str
    evidence: str
    left: float
    control: str
    confidence: float
    numbers: Mapping[str, float | int | str] = field(default_factory=dict[str, float | int | str])

    @property
    def where(self) -> str:
        return f"layer{'s' * (len(self.layers) > 1)} {number_ranges(self.layers)}, slots {self.slots}"

    def __str__(self) -> str:
        return f"{self.kind}, {self.where}: {self.evidence} {self.control} Confidence {self.confidence:.2f}."


def _cut(layer: Layer, count: int) -> dict[str, Tensor]:
    return {part: tensor[:, :, :count] for part, tensor in layer.items()}


def causes_of(
    cache: AnyCache,
    reference: AnyCache,
    damage: DamagedPlaces,
    count: int,
    block: int,
    rotaries: Sequence[Rotary | None] | None,
    look_up: LookUp | None = None,
) -> Iterator[Cause]:
    """What happened, layer by layer; the same cause of several layers is one.

    Args:
        look_up: finds tokens of the model by what they have in the first layer; see `one_for_each_token`.
    """
    found: dict[str, list[tuple[int, str, Explanation, Explanation]]] = defaultdict(list)
    known = [list(known_origins(cache, reference, row, count)) for row in range(cache.ledger.batch)]
    by_token: dict[int, tuple[Tensor, Explanation]] = {}

    first = next((number for number, parts in enumerate(damage.places) if parts), 0)

    def explain(layer: int) -> None:  # a function, so that no layer outlives it
        held, right = (_cut(one.layers[layer], count) for one in (cache, reference))
        for row in range(cache.ledger.batch):
            places = {part: where[row] for part, where in damage.places[layer].items()}
            if not any(bool(where.any()) for where in places.values()):
                continue
            damaged = Damaged(
                {part: tensor[row] for part, tensor in held.items()},
                {part: tensor[row] for part, tensor in right.items()},
                places,
                damage.noise[layer],
                reference.ledger.origins[row, :count],
                block,
                rotaries[layer] if rotaries is not None else None,
            )
            own = torch.ones(count, dtype=torch.bool)
            for where, explanation in known[row]:
                own &= ~where
                if len(struck := damaged.slots[where[damaged.slots]]):
                    found[explanation.kind].append((layer, slots_in_words(struck), explanation, NOTHING))
            for some, ranked in _explained(damaged.within(own.nonzero()[:, 0].tolist())):
                best = ranked[0]
                if best.kind in GUESSED or best.score > FOREIGN:
                    tokens = reference.ledger.tokens[row, :count].cpu()
                    if layer == first and (other := one_for_each_token(some, tokens, look_up)):
                        by_token[row] = some.slots, other
                    best = seen(row, some.slots, own, best)
                others = (one for one in ranked if one.kind != ranked[0].kind and one.kind not in GUESSED)
                found[best.kind].append((layer, slots_in_words(some.slots), best, next(others, NOTHING)))

    def seen(row: int, slots: Tensor, own: Tensor, guess: Explanation) -> Explanation:
        """What ledgers and other layers say of rows that are not made from the reference's."""
        if guess.kind in GUESSED and not bool(own[: int(slots[0])].all()):
            return AFTER_OTHERS
        if row in by_token and bool(torch.isin(slots, by_token[row][0]).all()):
            return by_token[row][1]
        if guess.kind == "foreign prefix" and after_another_text(damage.places, row, slots):
            return replace(
                guess,
                evidence=f"Slots {slots_in_words(slots)} hold their own tokens, as the first layer shows, but read "
                "after another text than the reference's: slots were evicted, or come from another conversation.",
            )
        return guess

    for layer in _chosen(damage):
        explain(layer)
    for kind, entries in sorted(found.items(), key=lambda item: min(entry[0] for entry in item[1])):
        layer, slots, best, second = min(entries, key=lambda entry: (entry[0], entry[2].score))
        yield Cause(
            kind,
            tuple(sorted({entry[0] for entry in entries})),
            slots,
            best.evidence,
            best.left,
            _control(best, second),
            _confidence(best, second),
            best.numbers,
        )


def _explained(damaged: Damaged) -> Iterator[tuple[Damaged, list[Explanation]]]:
    """All damage of a layer by one explanation; or, where none explains it, run of slots by run of slots."""
    if not len(damaged.slots):
        return
    ranked = explanations(damaged)
    if ranked[0].score <= _WELL:
        yield damaged, ranked
        return
    where = torch.zeros(damaged.count, dtype=torch.bool)
    where[damaged.slots] = True
    pieces = list(runs(where, damaged.block))
    if len(pieces) < 2:
        yield damaged, ranked
        return
    for piece in pieces[:MOST_EXPLAINED]:
        some = damaged.within(piece)
        yield some, explanations(some)


def _control(best: Explanation, second: Explanation) -> str:
    if best.kind in KNOWN:
        return "The ledgers say so; it is not inferred from the numbers."
    nearest = f"The nearest hypothesis, {second.kind}, leaves {second.left:.0%} of the difference."
    if second.kind == "unknown":
        return "No other hypothesis explains half of the difference."
    if best.kind in GUESSED:
        return nearest
    return f"It leaves {best.left:.1%} of the difference unexplained, and the next, {second.kind}, {second.left:.0%}."


def _confidence(best: Explanation, second: Explanation) -> float:
    """How much more the second best leaves: 1 where it leaves half or more, and the best nothing."""
    if best.kind in (*GUESSED, AFTER_OTHERS.kind):
        return 0.0 if best.kind == "unknown" else round(min(0.9, max(0.3, second.left)), 3)
    return round(max(0.0, 1 - best.score / max(min(second.score, NOTHING.score), 1e-9)), 3)


def _chosen(damage: DamagedPlaces) -> list[int]:
    """The layers that are explained."""
    layers = damage.layers
    if len(layers) <= MOST_EXPLAINED:
        return layers
    places = torch.linspace(0, len(layers) - 1, MOST_EXPLAINED).round().long().tolist()
    return [layers[place] for place in dict.fromkeys(places)]
