"""Slots of other caches in place of one's own: another prompt's, another request's block, a block's last tenant, a scaffold.

A donor's keys are taken as they are stored, so they carry the donor's positions: slot i takes the donor's slot i, counted
round where the donor is shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.fault import Fault
from kvprobe.faults.paged import Paged
from kvprobe.faults.scope import Part, Scope
from kvprobe.faults.struck import Struck
from kvprobe.text.transcript import Tokens

_OFFSET = 31


def _donated(struck: Struck, name: str, part: Part) -> Float[Tensor, "struck d"]:
    donor = struck.context.donor(name)
    held = (~donor.ledger.padding[0]).nonzero()[:, 0]
    vectors = (donor.keys if part == "k" else donor.values)[struck.layer][0]
    return vectors[struck.heads, held[struck.slots % len(held)]]


@dataclass(frozen=True)
class Distractor(Fault):
    """Slots of another prompt, as they are or (`matched`) moved and scaled, channel by channel, to this cache's mean and
    deviation.

    The "unrelated prompt" of seed 001; in engines, content of another input that was taken for one's own because their keys
    collided (LMCache #3301; vllm #30931 and #44701 have the same with another adapter's prefix).
    """

    donor: str = "distractor"
    matched: bool = False

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        found = _donated(struck, self.donor, part)
        if not self.matched:
            return found
        theirs = struck.context.donor_moments(self.donor, struck.layer, part)
        own = struck.context.moments(struck.layer, part)
        # A channel that never varies in the donor says nothing that could be scaled but the rounding of its mean.
        varies = theirs.deviation > 1e-6 + 1e-5 * theirs.mean.abs()
        scale = torch.where(varies, own.deviation / theirs.deviation.clamp(min=1e-12), 0.0)
        at = struck.heads
        return (found.float() - theirs.mean[at]) * scale[at] + own.mean[at]


@dataclass(frozen=True)
class ForeignBlock(Paged):
    """Whole blocks of another request's cache, in all layers: a block that was freed and filled anew while a step in flight
    still read it (vllm #47728), or that its last owner wrote to once more (vllm PR #45357)."""

    donor: str = "distractor"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return _donated(struck, self.donor, part)


@dataclass(frozen=True)
class StaleBlock(Paged):
    """Blocks of which only the beginning was written: from an offset on, drawn for each, they hold what their last tenant left
    there. A guess at sglang #22819 (outputs that change where a cached prefix ends on a block's boundary), whose mechanism
    nobody has shown; rows that a rollback leaves behind (transformers #47433) look the same."""

    donor: str = "distractor"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        blocks = -(-struck.slots_in_row // self.block)
        lots = struck.draws.uniform((blocks,), _OFFSET, struck.step).to(struck.keys.device)
        start = (lots * self.block).long()[struck.slots // self.block]
        stale = struck.slots % self.block >= start
        return torch.where(stale[:, None], _donated(struck, self.donor, part), struck.of(part))


@dataclass(frozen=True)
class Splice(Fault):
    """From layer `above` on, the slots of a neutral scaffold: the same chat template with filler in place of what was said
    (see `scaffold`).

    arXiv 2605.30574 finds that this keeps accuracy where zeroing the same slots destroys it.
    """

    above: int
    donor: str = "scaffold"
    scope: Scope = field(default=Scope(among="prompt"), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.above < 0:
            raise UserError(f"Splice has above={self.above}; it must be a layer, 0 or more.")

    def reaches(self, layer: int) -> bool:
        return layer >= self.above

    def refuse_unfit(self, context: FaultContext) -> None:
        if self.above >= context.cache.n_layers:
            raise UserError(
                f"There is no layer {self.above} to splice above; the cache has layers 0 to {context.cache.n_layers - 1}."
            )
        donor = context.donor(self.donor)
        if donor.slots < context.cache.slots:
            raise UserError(
                f"The scaffold has {donor.slots} slots and the cache {context.cache.slots}; make it of the same prompt, with "
                f"`scaffold`."
            )

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return _donated(struck, self.donor, part)


def scaffold(tokens: Tokens, filler: Sequence[int]) -> Tokens:
    """The same conversation with the tokens of its texts replaced by `filler`, over and over; delimiters stay."""
    if not filler:
        raise UserError("There is no filler; give at least one token.")
    count = 0
    ids = []
    for token, delimiter in zip(tokens.ids, tokens.delimiters, strict=True):
        ids.append(token if delimiter else filler[count % len(filler)])
        count += not delimiter
    return replace(tokens, ids=tuple(ids))
