"""Two caches side by side: whether they differ by more than numerics, where first, where most, and what happened.

Both may lie in files; one layer of each is in memory at a time, and without a model nothing here needs transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.brief import Brief, Table
from kvprobe.cache.cache import KVCache
from kvprobe.cache.floors import NoiseFloor, config_of, floor_of
from kvprobe.cache.layer import shape_of
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import described
from kvprobe.cache.places import DamagedPlaces, Distances, damage_of, distances_between
from kvprobe.cache.stored import AnyCache, StoredCache
from kvprobe.detection.causes import Cause, causes_of
from kvprobe.detection.texts import TextDifference, compared, compared_slots, other_views
from kvprobe.errors import UserError
from kvprobe.names import number_ranges

if TYPE_CHECKING:
    from kvprobe.detection.effects import OutputEffect
    from kvprobe.inference.model import Model

FloorFrom = Literal["own", "common", "supplied"]
BLOCK = 16
"""Slots in a block, where neither cache says."""


@dataclass(frozen=True)
class DifferentPlace:
    """One vector that differs.

    Attributes:
        distance: ‖difference‖ / ‖reference‖.
        excess: as a multiple of what is allowed there.
    """

    row: int
    layer: int
    part: str
    head: int
    slot: int
    block: int
    distance: float
    excess: float

    def __str__(self) -> str:
        row = f", row {self.row}" if self.row else ""
        return f"{self.part} of layer {self.layer}, head {self.head}, slot {self.slot} (block {self.block}){row}"


@dataclass(frozen=True, repr=False)
class CacheDifference(Brief):
    """How two caches differ.

    Attributes:
        kind: of the first difference; `numerics` where there is none beyond that.
        first: the first place, in the order of layers and then slots; None where none differs.
        worst: the place whose distance is the largest.
        causes: what happened, the first in that order first.
        texts: where tokens differ.
        layers: in which some place differs.
        hidden: slots that one of the caches hides in some layer and head, where they were not compared.
        floor: what was taken for numerics.
        floor_from: where it comes from: it was measured in this model, or in others, or it was given.
        effect: on the model's output after the row of the worst place, where one was given.
        distances: the largest relative distance of each layer in each block.
        excess: the same as a multiple of what is allowed.
    """

    kind: str
    first: DifferentPlace | None
    worst: DifferentPlace | None
    causes: tuple[Cause, ...]
    texts: tuple[TextDifference, ...]
    layers: tuple[int, ...]
    names: tuple[str, str]
    slots: int
    hidden: int
    block: int
    floor: NoiseFloor
    floor_from: FloorFrom
    effect: "OutputEffect | None"
    distances: Float[Tensor, "layers blocks"] = field(repr=False)
    excess: Float[Tensor, "layers blocks"] = field(repr=False)

    @property
    def differs(self) -> bool:
        """Whether the caches differ by more than numerics."""
        return self.first is not None or bool(self.texts)

    @property
    def confidence(self) -> float:
        """In the kind."""
        return self.causes[0].confidence if self.causes else 1.0

    @property
    def verdict(self) -> str:
        """In a sentence."""
        if not self.differs:
            most = float(self.distances.max()) if self.distances.numel() else 0.0
            return f"Alike: nothing differs by more than numerics (relative distance {most:.2g}), {self.by}."
        if self.first is None:
            return f"They differ: {self.kind}. {self.texts[0].sentence}"
        return f"They differ: {self.kind}, first in {self.first}, {self.by}."

    @property
    def by(self) -> str:
        """By which noise floor, in a phrase."""
        whose = {"own": "this model's own", "common": "the common", "supplied": "the supplied"}[self.floor_from]
        return f"by {whose} noise floor of {self.floor.name}"

    @property
    def unmeasured(self) -> str:
        """What the common floor means, in a sentence; empty for another one."""
        if self.floor_from != "common":
            return ""
        return (
            f"The common floor was measured in {' and '.join(self.floor.models)}, and not in this model: if it rounds "
            "worse, a sound cache can be called different, and if it rounds better, a small fault can be missed."
        )

    @property
    def unseen(self) -> str:
        """What was not compared, in a sentence."""
        return f"{self.hidden} slots are hidden in some layer and head, and were not compared there."

    def as_mapping(self) -> dict[str, object]:
        """For JSON."""
        return {
            "verdict": "differ" if self.differs else "alike",
            "kind": self.kind,
            "confidence": self.confidence,
            "caches": list(self.names),
            "slots": self.slots,
            "hidden": self.hidden,
            "block": self.block,
            "layers": list(self.layers),
            "first": None if self.first is None else _finite(vars(self.first)),
            "worst": None if self.worst is None else _finite(vars(self.worst)),
            "causes": [{**vars(cause), "layers": list(cause.layers)} for cause in self.causes],
            "texts": [vars(text) for text in self.texts],
            "floor": self.floor.name,
            "floor_from": self.floor_from,
            "effect": None if self.effect is None else vars(self.effect),
        }

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"  {text.sentence}" for text in self.texts if self.first is not None]
        if self.first is not None and self.worst is not None:
            lines.append(f"  worst: {self.worst}, off by {self.worst.distance:.3g} of its size")
        lines += [f"  {cause}" for cause in self.causes]
        if self.hidden:
            lines.append(f"  {self.unseen}")
        if self.unmeasured:
            lines.append(f"  {self.unmeasured}")
        if self.effect is not None:
            lines.append(f"  {self.effect}")
        return "\n".join(lines)

    def _facts(self) -> Iterable[str]:
        yield self.kind if self.differs else "alike"
        yield f"{self.slots} slots"
        if self.first is not None:
            yield f"first in {self.first}"

    def _table(self) -> Table:
        rows = [(cause.kind, number_ranges(cause.layers), cause.slots, cause.confidence) for cause in self.causes]
        return ("kind", "layers", "slots", "confidence"), rows


@checked_arguments
def diff(
    cache: AnyCache,
    reference: "AnyCache | Model",
    *,
    model: "Model | None" = None,
    block: AtLeastOne | None = None,
    floor: NoiseFloor | None = None,
) -> CacheDifference:
    """How a cache differs from another one of the same model, which is taken to be right.

    Args:
        reference: the right cache; or the model, which then reads the cache's tokens at their positions again.
        model: names the rotation of keys, and says what the difference does to its output.
        block: slots in a block; what a file says, or 16, by default.
        floor: how far sound caches like these lie apart; what `kvprobe.cache.floors` knows of them by default.

    Raises:
        UserError: the caches are of other shapes, have different numbers of rows, or no live slot; a model cannot read
            the tokens; or the floor is of another model.
    """
    read_again = not isinstance(reference, KVCache | StoredCache)
    if not isinstance(reference, KVCache | StoredCache):
        from kvprobe.detection.effects import reference_of

        model, reference = reference, reference_of(reference, cache)
    _refuse_other_shape(cache, reference)
    block = min(block or _block_of(cache) or _block_of(reference) or BLOCK, 2**53)  # of a tensor's shape
    inside, texts = compared_slots(cache.ledger, reference.ledger)
    count = inside.shape[1]
    if not read_again:  # the model sees every slot
        texts += other_views(cache.ledger, reference.ledger, inside, {text.row for text in texts})
    if floor is not None:
        _refuse_other_floor(floor, cache, reference)
    known = floor or floor_of(cache, reference)
    distances = distances_between(
        cache.layers, reference.layers, lambda layer: compared(cache.ledger, reference.ledger, layer, inside)
    )
    if not texts and not any(bool(where.any()) for where in distances.compared):
        raise UserError(
            "No slot is live in both caches, so nothing can be compared; compare them before slots are hidden."
        )
    damage = damage_of(distances, known, block)
    rotaries = model.lanes.rotaries if model is not None else None
    tokens = None
    if model is not None:
        from kvprobe.detection.vocabulary import look_up

        tokens = look_up(model)
    causes = list(causes_of(cache, reference, damage, count, block, rotaries, tokens))
    first, worst = _first(distances, damage, block), _worst(distances, damage, block)
    kind = causes[0].kind if causes else texts[0].kind if texts else "numerics"
    effect = None
    if model is not None and not texts:
        from kvprobe.detection.effects import effect_of

        effect = effect_of(model, cache, reference, 0 if worst is None else worst.row)
    return CacheDifference(
        kind,
        first,
        worst,
        tuple(causes),
        tuple(texts),
        tuple(damage.layers),
        (_name(cache), _name(reference)),
        count,
        _hidden(cache.ledger, reference.ledger, inside),
        block,
        known,
        "supplied" if floor is not None else "own" if known.own else "common",
        effect,
        _by_block(distances.parts, count, block),
        _by_block(damage.excess, count, block),
    )


def _hidden(one: Ledger, other: Ledger, inside: Bool[Tensor, "rows slots"]) -> int:
    """How many of the slots that are compared hold a token and are hidden in some layer and head."""
    count = inside.shape[1]
    shown = [ledger.live.all(2).all(0)[:, :count] for ledger in (one, other)]
    held = ~one.padding[:, :count] & ~other.padding[:, :count]
    return int((held & inside & ~(shown[0] & shown[1])).sum())


def _first(distances: Distances, damage: DamagedPlaces, block: int) -> DifferentPlace | None:
    for layer in damage.layers:
        places = damage.places[layer]
        row, slot, part, head = min(
            (row, slot, part, head) for part, where in places.items() for row, head, slot in where.nonzero().tolist()
        )
        return _place(distances, damage, block, row, layer, part, head, slot)
    return None


def _worst(distances: Distances, damage: DamagedPlaces, block: int) -> DifferentPlace | None:
    worst: tuple[float, int, int, str, int, int] | None = None
    for layer in damage.layers:
        for part, where in damage.places[layer].items():
            off = distances.parts[layer][part].masked_fill(~where, -1.0)
            row, head, slot = (int(axis) for axis in torch.unravel_index(off.argmax(), off.shape))
            if worst is None or float(off[row, head, slot]) > worst[0]:
                worst = float(off[row, head, slot]), row, layer, part, head, slot
    return None if worst is None else _place(distances, damage, block, worst[1], *worst[2:])


def _place(
    distances: Distances, damage: DamagedPlaces, block: int, row: int, layer: int, part: str, head: int, slot: int
) -> DifferentPlace:
    off, excess = (some[layer][part][row, head, slot] for some in (distances.parts, damage.excess))
    return DifferentPlace(row, layer, part, head, slot, slot // block, float(off), float(excess))


def _by_block(parts: Sequence[Mapping[str, Tensor]], count: int, block: int) -> Float[Tensor, "layers blocks"]:
    """The largest number of each layer in each block."""
    table = torch.zeros(len(parts), max(1, -(-count // block)))
    blocks = torch.arange(count) // block
    for number, layer in enumerate(parts):
        for off in layer.values():
            table[number].scatter_reduce_(0, blocks, off.flatten(0, 1).amax(0), "amax")
    return table


def _refuse_other_shape(cache: AnyCache, reference: AnyCache) -> None:
    shapes = [tuple(map(shape_of, (one.layers[0], one.layers[len(one.layers) - 1]))) for one in (cache, reference)]
    counts = [len(one.layers) for one in (cache, reference)]
    if counts[0] != counts[1] or shapes[0] != shapes[1]:
        raise UserError(
            f"The first cache has {counts[0]} layers of {described(shapes[0])}, the second {counts[1]} of "
            f"{described(shapes[1])}; compare caches of one model."
        )


def _refuse_other_floor(floor: NoiseFloor, cache: AnyCache, reference: AnyCache) -> None:
    config = config_of(cache, reference)
    if floor.model is not None and config is not None and floor.model != config:
        raise UserError(
            f"The floor was measured in {' and '.join(floor.models)}, whose config ({floor.model}) is not that of the "
            f"model that made these caches ({config}); leave `floor` out, or measure one in this model."
        )


def _block_of(cache: AnyCache) -> int | None:
    return cache.block if isinstance(cache, StoredCache) else None


def _name(cache: AnyCache) -> str:
    return cache.origin if isinstance(cache, StoredCache) else "a cache in memory"


def _finite(fields: Mapping[str, object]) -> dict[str, object]:
    """For JSON, which knows no infinity."""
    return {name: min(value, 1e9) if isinstance(value, float) else value for name, value in fields.items()}
