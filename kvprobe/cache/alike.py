"""Whether two caches fit together: of one model, and with keys that were computed at the same positions."""

from typing import Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import Shape, described
from kvprobe.errors import UserError
from kvprobe.fingerprint import Maker, differing


@runtime_checkable
class OfModel(Protocol):
    """A cache, as far as it is compared; see `kvprobe.cache.cache.KVCache`."""

    @property
    def shape(self) -> Shape: ...
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
    base: OfModel, donor: OfModel, chosen: Bool[Tensor, "batch slots"], *, keys: bool = True
) -> None:
    """Refuse a donor of another model, of other slots, or whose chosen slots are empty or of another origin.

    Args:
        chosen: the slots that are taken from it.
        keys: whether their keys are taken, which must then be stored as rotated to the same positions.
    """
    refuse_other_model(base, donor)
    own, other = base.ledger, donor.ledger
    if own.tokens.shape != other.tokens.shape:
        raise UserError(
            f"The donor has {other.batch} × {other.slots} slots, the base {own.batch} × {own.slots}; give a donor "
            "with the same slots, and see `patching.aligned`."
        )
    chosen = chosen & ~own.padding
    empty, moved = chosen & other.padding, chosen & (own.origins != other.origins)
    if bool(empty.any()):
        row, slot = map(int, empty.nonzero()[0])
        raise UserError(f"Slot {slot} of row {row} of the donor holds no token; choose slots that both caches fill.")
    if keys and bool(moved.any()):
        row, slot = map(int, moved.nonzero()[0])
        raise UserError(
            f"The key in slot {slot} of row {row} is stored at position {int(own.origins[row, slot])} in the base and "
            f"at {int(other.origins[row, slot])} in the donor; carry out re-indexing first, with Model.as_seen, give "
            "a donor at the same positions, take values alone, or see `patching.aligned`."
        )
    if bool((strange := chosen & ~own.of_like_origin(other)).any()):
        row, slot = map(int, strange.nonzero()[0])
        raise UserError(
            f"Slot {slot} of row {row} was fitted, or computed by another model, in one of the two caches alone, which "
            "the ledger would not show after a patch; choose other slots, or see `kvprobe.editing.splice`."
        )


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
