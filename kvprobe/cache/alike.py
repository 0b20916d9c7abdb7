"""Whether two caches fit together: of one model, and with keys that were computed at the same positions."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import Shape, described
from kvprobe.cache.visibility import refuse_dropped
from kvprobe.errors import UserError
from kvprobe.fingerprint import Maker, differing


@runtime_checkable
class OfModel(Protocol):
    """A cache, as far as it is compared; see `kvprobe.cache.cache.KVCache`."""

    @property
    def shape(self) -> Shape: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def made_by(self) -> Maker | None: ...


def refuse_other_model(base: OfModel, other: OfModel, what: str = "The donor", *, any_maker: bool = False) -> None:
    """Refuse a cache of another model, dtype or device than the base's; one of unknown origin may be of any model.

    Args:
        what: the other cache, in words.
        any_maker: let it be of another model of the same shape, in the same dtype and place.
    """
    if other.shape != base.shape:
        raise UserError(
            f"{what} has {len(other.shape)} layers of {described(other.shape)}, the base {len(base.shape)} of "
            f"{described(base.shape)}; give caches of the same model."
        )
    held, wanted = ((cache.tensors[0].dtype, cache.tensors[0].device) for cache in (other, base))
    if held != wanted:
        raise UserError(
            f"{what} is {held[0]} on {held[1]}, the base {wanted[0]} on {wanted[1]}; make both with a model in one "
            "dtype and on one device."
        )
    if (
        not any_maker
        and base.made_by is not None
        and other.made_by is not None
        and not other.made_by.same(base.made_by)
    ):
        difference = differing(other.made_by.fingerprint, base.made_by.fingerprint)
        raise UserError(
            f"{what} was made by another model than the base (it differs in {difference}); give caches of one model, "
            "or give up the check with dataclasses.replace(cache, made_by=None)."
        )


def refuse_other_slots(
    base: OfModel,
    donor: OfModel,
    chosen: Bool[Tensor, "batch slots"],
    segments: Sequence[str] = (),
    *,
    keys: bool = True,
) -> None:
    """Refuse a donor of another model, of other slots, or whose chosen slots are empty or of another origin.

    Slots are others where the donor has the chosen segment elsewhere, or where both lack tokens of a segment, but not
    the same ones.

    Args:
        chosen: the slots that are taken from it.
        segments: by whose names they were chosen, if they were.
        keys: whether their keys are taken, which must then be stored as rotated to the same positions.
    """
    refuse_other_model(base, donor)
    own, other = base.ledger, donor.ledger
    if own.tokens.shape != other.tokens.shape:
        raise UserError(
            f"The donor has {other.batch} × {other.slots} slots, the base {own.batch} × {own.slots}; give a donor "
            "with the same slots, and see `patching.aligned`."
        )
    refuse_dropped("A patch", own, chosen)
    refuse_dropped("A patch", other, chosen)
    chosen = chosen & ~own.padding
    empty, moved = chosen & other.padding, chosen & (own.origins != other.origins)
    if bool(empty.any()):
        row, slot = map(int, empty.nonzero()[0])
        raise UserError(f"Slot {slot} of row {row} of the donor holds no token; choose slots that both caches fill.")
    if bool((elsewhere := chosen & _elsewhere(own, other, segments)).any()):
        row, slot = map(int, elsewhere.nonzero()[0])
        raise UserError(
            f"Slot {slot} of row {row} is of segment {own.names[int(own.segments[row, slot])]!r}, which the donor has "
            "in other slots; give a donor with the same slots, and see `patching.aligned`."
        )
    if keys and bool(moved.any()):
        row, slot = map(int, moved.nonzero()[0])
        raise UserError(
            f"The key in slot {slot} of row {row} is stored at position {int(own.origins[row, slot])} in the base and "
            f"at {int(other.origins[row, slot])} in the donor; carry out re-indexing first, with Model.as_seen, give "
            "a donor at the same positions, take values alone, or see `patching.aligned`."
        )
    pairs = torch.stack([chosen.nonzero()[:, 0], own.segments[chosen]], 1)
    for row, number in sorted({(int(row), int(number)) for row, number in pairs.cpu()}):
        slots = ((own.segments[row] == number) & ~other.padding[row]).nonzero()[:, 0]
        if lack_others(own, other, slots, slots, row):
            raise UserError(
                f"Of segment {own.names[number]!r} other tokens are gone in the donor than in the base, so its slots "
                "stand for others; evict the same from both."
            )
    if bool((strange := chosen & ~own.of_like_origin(other)).any()):
        row, slot = map(int, strange.nonzero()[0])
        raise UserError(
            f"Slot {slot} of row {row} was fitted, or computed by another model, in one of the two caches alone, which "
            "the ledger would not show after a patch; choose other slots, or see `kvprobe.editing.splice`."
        )


def refuse_other_time(base: OfModel, donor: OfModel, chosen: Bool[Tensor, "batch slots"]) -> None:
    """Refuse the decays of a donor with the same slots where gaps were closed in one of the two caches alone, so that
    states pass through time in one of them that is gone in the other."""
    own, other = base.ledger, donor.ledger
    moved = ((own.positions != other.positions) & ~own.padding).any(1) | (own.following != other.following)
    chosen = chosen & ~own.padding & moved[:, None]
    for ours, theirs in zip(base.layers, donor.layers, strict=True):
        if "decay" not in ours:
            continue
        passes = [
            torch.stack([part.any(-1).any(1) for part in layer["decay"].chunk(2, -1)]) for layer in (ours, theirs)
        ]
        timeless = (passes[0] != passes[1]).any(0) & chosen
        if bool(timeless.any()):
            row, slot = map(int, timeless.nonzero()[0])
            raise UserError(
                f"States decay at slot {slot} of row {row} in one of the two caches alone, since gaps were closed by "
                "reindex() in the other; do the same in both, or take another part than the decay."
            )


def lack_others(
    own: Ledger, other: Ledger, own_slots: Int[Tensor, "count"], other_slots: Int[Tensor, "count"], row: int = 0
) -> bool:
    """Whether tokens are gone of a segment in both ledgers, but not the same ones, so that its slots, taken in order,
    hold other tokens."""
    ledgers = ((own, own_slots), (other, other_slots))
    # Next to a segment that is gone as a whole, nobody knows of which a token is gone.
    whole = all(bool(ledger.in_segments([name])[row].any()) for ledger, _ in ledgers for name in ledger.names)
    gone, missing = zip(*(_gone(ledger, slots, row, whole) for ledger, slots in ledgers), strict=True)
    return all(missing) and not torch.equal(*gone)


def _gone(ledger: Ledger, slots: Int[Tensor, "count"], row: int, edges: bool) -> tuple[Int[Tensor, "count"], bool]:
    """How many tokens are gone before each slot of a segment, and whether any are, if only after the last."""
    used = (~ledger.padding[row]).nonzero()[:, 0]
    steps = ledger.origins[row, used].diff(prepend=ledger.origins.new_tensor([-1])) - 1
    places = torch.searchsorted(used, slots)
    gaps, after = steps.clamp(min=0)[places], int(places[-1]) + 1
    if not edges:
        gaps[0] = 0
    stop = steps[after] if after < len(used) else ledger.following[row] - ledger.origins[row, used[-1]] - 1
    return gaps.cumsum(0), bool(gaps.any()) or (edges and int(stop) > 0)


def _elsewhere(own: Ledger, other: Ledger, names: Sequence[str]) -> Bool[Tensor, "batch slots"]:
    """The slots of these segments, if another ledger has them in other slots of that row."""
    elsewhere = torch.zeros_like(own.padding)
    for name in {*names}.intersection(other.names):
        ours, theirs = own.in_segments([name]), other.in_segments([name])
        elsewhere |= ours & ~theirs & theirs.any(1, keepdim=True)
    return elsewhere


def refuse_overlap(base: OfModel, other: OfModel) -> None:
    """Refuse a cache whose slots cannot follow the base's, row by row."""
    refuse_other_model(base, other, "The cache to be appended")
    own, new, last = base.ledger, other.ledger, base.ledger.last_position
    if own.batch != new.batch or new.quantisation is not None:
        raise UserError(
            f"A cache of {new.batch} rows{' that is quantised' if new.quantisation else ''} cannot be appended to one "
            f"of {own.batch}; give as many rows, and quantise afterwards."
        )
    if bool((taken := new.live_somewhere & (new.positions <= last[:, None])).any()):
        row, slot = map(int, taken.nonzero()[0])
        raise UserError(
            f"Position {int(new.positions[row, slot])} of row {row} does not come after those of the cache, which end "
            f"at {int(last[row])}; read the other at positions from `ledger.following` on (Tokens.shifted)."
        )
