"""Where two caches differ by more than numerics.

What a slot holds in one cache is at a relative distance from what it holds in the other. Benign differences (another
order of sums, another precision) are everywhere, much the same in all slots of a layer and head, and grow with depth;
once a slot differs, it differs in all deeper layers, which are computed from it. A fault breaks one of these. So the
noise of a pair is measured in the pair itself, layer by layer, and capped by what such pairs were measured to have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.differences import vectors_apart
from kvprobe.cache.entries import entries
from kvprobe.cache.floors import RATE, NoiseFloor
from kvprobe.cache.layer import shape_of
from kvprobe.cache.parts import described
from kvprobe.errors import UserError

SLOT_LIMIT, BLOCK_LIMIT = 30.0, 5.0
"""How many times the noise of its layer and head a slot may be off, and the median of the slots of a block, at least:
where more was measured of such pairs, that."""
SLOT_LOST, BLOCK_LOST, UNRELATED = 0.6, 0.3, 1.3
"""How far off, relative to what it holds, a slot and the median of a block are no numerics, whatever the noise: more,
where more was measured of such pairs, but not beyond where vectors have nothing to do with each other, unless in caches
of this very model."""
STATES = 3.0
"""By how much a slot's limits are raised where layers keep states by the delta rule, which hands a slot on that was
rounded badly: of 26 benign pairs of models with random weights two were called different without it."""
RISE = 4.0
"""How many times the noise of the layers around it that of a layer may be."""
_AROUND = 2
_RATE = RATE / 2
"""Of sound caches that exceed the limit of a slot, and so many that of a block: either is an alarm."""
_HEALED = 2
"""So many deeper layers must be equal, bit for bit, for a difference not to come from the layers before it. It may then
come from this layer's own products, which another shape of a batch rounds otherwise."""


@dataclass(frozen=True, eq=False)
class Distances:
    """How far what each slot holds is off, by layer and part.

    Attributes:
        parts: see `vectors_apart`.
        compared: the slots of a layer that were compared in some head; of others nobody knows whether they differ.
    """

    parts: tuple[Mapping[str, Float[Tensor, "rows _ slots"]], ...]
    compared: tuple[Bool[Tensor, "rows slots"], ...]


@dataclass(frozen=True, eq=False)
class DamagedPlaces:
    """The places that differ by more than numerics, by layer and part.

    Attributes:
        places: which they are.
        excess: distances as multiples of what is allowed.
        noise: the pair's own, relative, by head.
    """

    places: tuple[Mapping[str, Bool[Tensor, "rows _ slots"]], ...]
    excess: tuple[Mapping[str, Float[Tensor, "rows _ slots"]], ...]
    noise: tuple[Mapping[str, Float[Tensor, "_"]], ...]

    @property
    def layers(self) -> list[int]:
        """Layers in which some place differs."""
        return [number for number, parts in enumerate(self.places) if any(bool(one.any()) for one in parts.values())]


def distances_between(
    layers: Sequence[Mapping[str, Tensor]],
    references: Sequence[Mapping[str, Tensor]],
    compared: Callable[[int], Bool[Tensor, "rows _ slots"]],
) -> Distances:
    """The relative distances of all parts of all layers, of which one of each is in memory at a time.

    Args:
        compared: the slots of a layer that are compared, from the first one on; the head axis is 1 where all agree.

    Raises:
        UserError: a layer of the one holds other parts than that of the other, or of another size.
    """

    def of_layer(number: int) -> tuple[Mapping[str, Tensor], Tensor]:
        chosen, held, reference = compared(number), layers[number], references[number]
        if (shape := shape_of(held)) != (expected := shape_of(reference)):
            holds, expects = (described((one,)) or "nothing" for one in (shape, expected))
            raise UserError(
                f"Layer {number} of the first cache holds {holds}, that of the second {expects}; compare caches of one "
                "model."
            )
        rows, count = range(chosen.shape[0]), chosen.shape[2]
        found = {
            part: torch.stack(
                [vectors_apart(held[part][row, :, :count], right[row, :, :count], chosen[row]) for row in rows]
            )
            for part, right in reference.items()
        }
        return found, chosen.any(1).cpu()

    return Distances(*zip(*map(of_layer, range(len(layers))), strict=True))


def damage_of(distances: Distances, floor: NoiseFloor, block: int) -> DamagedPlaces:
    """The places at which two caches differ by more than numerics.

    Args:
        floor: what pairs like this one were measured to have.
        block: slots in a block.
    """
    present = [number for number, parts in enumerate(distances.parts) if parts]
    differing = {number: _any(distances.parts[number]) for number in present}
    healed = _healed(present, differing, distances.compared)
    newborn = _newborn(present, differing, distances.compared)
    # What was measured is not carried on to longer caches: limits that grow with their length would hide lost blocks.
    slots = min(max(1, *(len(where[0]) for where in distances.compared)), floor.longest)
    slot_limit = max(SLOT_LIMIT, floor.times(slots, place="outlier", rate=_RATE))
    block_limit = max(BLOCK_LIMIT, floor.times(slots, place="block", rate=_RATE))
    most = torch.inf if floor.own else UNRELATED
    own = {
        number: {part: _noise(off, ~healed[number]) for part, off in distances.parts[number].items()}
        for number in present
    }
    first_state = next(
        (number for number, parts in enumerate(distances.parts) if "step" in parts), len(distances.parts)
    )
    places: list[Mapping[str, Tensor]] = []
    excesses: list[Mapping[str, Tensor]] = []
    noises: list[Mapping[str, Tensor]] = []
    for number, parts in enumerate(distances.parts):
        if not parts:
            places.append({})
            excesses.append({})
            noises.append({})
            continue
        raised = STATES if number >= first_state else 1.0
        newborn_limit = raised * floor.newborn
        depth = present.index(number) / max(1, len(present) - 1)
        noise = {part: _capped(own, present, number, part, floor) for part in parts}
        excess: dict[str, Tensor] = {}
        for part, off in parts.items():
            limit = raised * slot_limit * noise[part][None, :, None].expand_as(off)
            young = newborn[number][:, None].expand_as(off) & (not floor.of_one_engine)
            limit = torch.where(young, torch.full_like(limit, newborn_limit), limit)
            if raised > 1:
                limit = limit.clamp(min=newborn_limit)
            slot_lost = min(max(SLOT_LOST, floor.allowed(part, depth, slots)), most)
            block_lost = min(max(BLOCK_LOST, floor.allowed(part, depth, slots, place="block")), most)
            over = off / limit.clamp(1e-12, slot_lost)
            over = torch.where(healed[number][:, None], torch.maximum(over, off / floor.single), over)
            of_block = (block_limit * noise[part][None, :, None]).clamp(1e-12, block_lost)
            by_block = torch.where(young | (off <= of_block), 0.0, _block_medians(off, block) / of_block)
            excess[part] = torch.maximum(over, by_block).nan_to_num(torch.inf, torch.inf)
        places.append({part: over > 1 for part, over in excess.items()})
        excesses.append(excess)
        noises.append(noise)
    return DamagedPlaces(tuple(places), tuple(excesses), tuple(noises))


def runs(struck: Bool[Tensor, "slots"], joined: int = 1) -> Iterator[range]:
    """The runs of struck slots; those less than `joined` apart are one."""
    start = last = None
    for slot in entries(struck.nonzero()[:, 0], int):
        if start is None or last is None:
            start = slot
        elif slot - last > joined:
            yield range(start, last + 1)
            start = slot
        last = slot
    if start is not None and last is not None:
        yield range(start, last + 1)


def _any(parts: Mapping[str, Tensor]) -> Bool[Tensor, "rows slots"]:
    return torch.stack([(off > 0).any(1) for off in parts.values()]).any(0)


def _healed(
    present: Sequence[int], differing: Mapping[int, Tensor], compared: Sequence[Tensor]
) -> dict[int, Bool[Tensor, "rows slots"]]:
    """Slots that differ in a layer and are equal in all of the next ones."""
    healed: dict[int, Tensor] = {}
    for place, number in enumerate(present):
        after = present[place + 1 : place + 1 + _HEALED]
        equal = [compared[other] & ~differing[other] for other in after]
        healed[number] = differing[number] & (torch.stack(equal).all(0) if after else torch.tensor(False))
    return healed


def _newborn(
    present: Sequence[int], differing: Mapping[int, Tensor], compared: Sequence[Tensor]
) -> dict[int, Bool[Tensor, "rows slots"]]:
    """Slots that differ in a layer and in none before it; in the first layer none counts, nor where half of them begin
    to differ in the same layer, as two kernels do."""
    before = torch.ones_like(differing[present[0]])
    born: dict[int, Tensor] = {}
    for place, number in enumerate(present):
        young = differing[number] & ~before
        most = 2 * young.sum(1, keepdim=True) > compared[number].sum(1, keepdim=True)
        born[number] = young & ~most
        before = (before & (place > 0)) | differing[number] | ~compared[number]
    return born


def _noise(off: Float[Tensor, "rows heads slots"], counts: Bool[Tensor, "rows slots"]) -> Float[Tensor, "heads"]:
    """The median of the distances of each head that are not zero; 0 where all are."""
    by_head = off.transpose(0, 1).flatten(1)
    chosen = (by_head > 0) & by_head.isfinite() & counts.flatten()
    medians = [
        head[some].median() if bool(some.any()) else torch.zeros(()) for head, some in zip(by_head, chosen, strict=True)
    ]
    return torch.stack(medians)


def _capped(
    own: Mapping[int, Mapping[str, Tensor]], present: Sequence[int], number: int, part: str, floor: NoiseFloor
) -> Float[Tensor, "heads"]:
    """The noise of a layer's part, at most that of the layers around it times `RISE`, and that of such pairs. Where one
    of them is of an engine it is what is usual at least: a cache that went on elsewhere has it in some slots alone."""
    noise, place = own[number][part], present.index(number)
    around = [
        other
        for other in present[max(0, place - _AROUND) : place + _AROUND + 1]
        if other != number and part in own[other]
    ]
    most = [max((float(own[other][part].median()) for other in around), default=torch.inf)]
    every = [float(parts[part].median()) for parts in own.values() if part in parts]
    if positive := [one for one in every if one > 0]:
        most.append(2 * float(torch.tensor(positive).median()))
    least = floor.newborn / SLOT_LIMIT
    depth = place / max(1, len(present) - 1)
    capped = noise.clamp(max=min(max(least, RISE * min(most)), floor.most_usual(part, depth)))
    return capped.clamp(min=floor.usual(part, depth)) if floor.of_one_engine else capped


def _block_medians(off: Float[Tensor, "rows heads slots"], block: int) -> Float[Tensor, "rows heads slots"]:
    """The median of each block in place of its slots; 0 in a last one that is not full."""
    whole = off.shape[2] // block * block
    blocks = off[:, :, :whole].reshape(*off.shape[:2], -1, block)
    medians = blocks.median(-1, keepdim=True).values.expand(-1, -1, -1, block)
    return torch.nn.functional.pad(medians.flatten(2), (0, off.shape[2] - whole))
