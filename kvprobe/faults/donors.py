"""Slots of another cache in place of a cache's own: of another prompt, another request, an earlier request, or a
scaffold.

A donor's keys are taken as they are stored, so they carry the donor's positions. Slot i takes the donor's slot i,
modulo the donor's length where the donor is shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastZero, checked_arguments
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext, of_layer
from kvprobe.faults.fault import Fault
from kvprobe.faults.paged import Paged
from kvprobe.faults.scope import Part, Scope
from kvprobe.faults.struck import Struck
from kvprobe.text.tokens import Tokens

_OFFSET = 31


def _donated(struck: Struck, name: str, part: Part) -> Float[Tensor, "struck d"]:
    donor = struck.context.donor(name)
    filled = (~donor.ledger.padding[0]).nonzero()[:, 0]
    return of_layer(donor, struck.layer, part)[struck.heads, filled[struck.slots % len(filled)]]


@dataclass(frozen=True)
class Distractor(Fault):
    """Slots of another prompt, unchanged or (`matched`) moved and scaled, channel by channel, to this cache's mean and
    deviation.

    The unrelated prompt of "KV Cache is More Robust Than You Think in Large Language Models" (canarypwn). In engines:
    the content of another input whose lookup key collided (LMCache #3301), or another adapter's prefix (vllm #30931,
    #44701).
    """

    donor: str = "distractor"
    matched: bool = False

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        donated = _donated(struck, self.donor, part)
        if not self.matched:
            return donated
        source = struck.context.donor_moments(self.donor, struck.layer, part)
        target = struck.context.moments(struck.layer, part)
        # A channel that is constant in the donor varies only by rounding, which must not be scaled up.
        varies = source.deviation > 1e-6 + 1e-5 * source.mean.abs()
        scale = torch.where(varies, target.deviation / source.deviation.clamp(min=1e-12), 0.0)
        heads = struck.heads
        return (donated.float() - source.mean[heads]) * scale[heads] + target.mean[heads]


@dataclass(frozen=True)
class ForeignBlock(Paged):
    """Whole blocks of another request's cache, in all layers.

    Sources: vllm #47728, where a block was freed and filled again while a step in flight still read it; vllm PR #45357,
    where the previous request wrote to a block once more; on purpose, the history swap of arXiv 2511.12752.
    """

    donor: str = "distractor"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return _donated(struck, self.donor, part)


@dataclass(frozen=True)
class StaleBlock(Paged):
    """Blocks of which only the beginning was written. From a random offset on they hold the content of an earlier
    request.

    A guess at the mechanism of sglang #22819 (outputs change where a cached prefix ends at a block boundary), which is
    not established. Rows that a crop leaves behind look the same (transformers #47433).
    """

    donor: str = "distractor"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        blocks = -(-struck.slots_in_row // self.block)
        uniform = struck.draws.uniform((blocks,), _OFFSET, struck.step).to(struck.heads.device)
        start = (uniform * self.block).long()[struck.slots // self.block]
        stale = struck.slots % self.block >= start
        return torch.where(stale[:, None], _donated(struck, self.donor, part), struck.of(part))


@dataclass(frozen=True)
class Splice(Fault):
    """From layer `above` on, the slots of a neutral scaffold: the same chat template with filler in place of its texts
    (see `scaffold`).

    Source: arXiv 2605.30574, which finds that accuracy survives this where zeroing the same slots destroys it.
    """

    above: AtLeastZero
    donor: str = "scaffold"
    scope: Scope = field(default=Scope(among="prompt"), kw_only=True)

    def reaches(self, layer: int) -> bool:
        return layer >= self.above

    def refuse_unfit(self, context: FaultContext) -> None:
        if self.above >= context.cache.n_layers:
            raise UserError(
                f"Splice has above={self.above}, but the cache has layers 0 to {context.cache.n_layers - 1}; name one "
                "of those."
            )
        donor = context.donor(self.donor)
        own, other = (cache.ledger.positions[0, ~cache.ledger.padding[0]] for cache in (context.cache, donor))
        if not torch.equal(own, other[: len(own)]):
            raise UserError(
                f"The scaffold has {len(other)} slots and the cache {len(own)}, not each at the same position; make it "
                "of the same prompt, with `scaffold`."
            )

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return _donated(struck, self.donor, part)


@checked_arguments
def scaffold(tokens: Tokens, filler: Sequence[int]) -> Tokens:
    """The same conversation with the tokens of its texts replaced by `filler`, repeated as needed; delimiters stay."""
    if not filler:
        raise UserError("The scaffold has no filler; give at least one token.")
    count = 0
    ids: list[int] = []
    for token, delimiter in zip(tokens.ids, tokens.delimiters, strict=True):
        ids.append(token if delimiter else filler[count % len(filler)])
        count += not delimiter
    return replace(tokens, ids=tuple(ids))
