"""Where a fault strikes: which layers, heads and slots, K or V or another part, and how many of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, Share, check_fields, checked_arguments
from kvprobe.cache.ledger import Ledger
from kvprobe.checks import is_text
from kvprobe.errors import UserError
from kvprobe.faults.draws import Draws
from kvprobe.names import short_repr
from kvprobe.text.tokens import GENERATED

Unit = Literal["slot", "layer", "head", "number"]
"""What is drawn at once: a slot in all layers and heads, a slot of one layer, a slot of one layer and head, or a single
number of a part."""
UNIT_LABELS: dict[Unit, str] = {
    "slot": "slots are drawn once and struck in all layers and heads of the scope",
    "layer": "each layer draws slots of its own",
    "head": "each KV head of each layer draws slots of its own",
    "number": "single numbers are drawn, for K and for V apart",
}
Parts = Literal["kv", "k", "v"]
Part = Literal["k", "v", "latent", "rope", "index", "key", "value", "decay", "step", "gain", "conv"]
Among = Literal["all", "prompt", "generated"]

_SLOTS, _NUMBERS, _ROUNDING = 1, 2, 3
"""Purposes of random draws; see `Draws.uniform`."""

EVERY_LAYER = "all"
"""The name of all layers together, beside those of bands."""


@dataclass(frozen=True)
class Scope:
    """Where a fault strikes.

    Slots are drawn from all that hold a token, live or masked: memory does not know which slots may be attended to. The
    number of struck slots is the rate times the number in scope, rounded up or down at random, so that the rate is met
    on average. With `unit="number"` each number is drawn on its own.

    Attributes:
        rate: share of the units in scope that is struck.
        count: or, number of struck units (all, if there are fewer): in all; or of each layer or head that draws its
            own; or, with `unit="number"`, of each layer's K and of its V.
        layers: a band, or single layers; all by default.
        heads: KV heads, or those of the part; all by default.
        parts: keys and values, one of them, or another part of what the layers store that have it: `latent`, `rope` or
            `index`; or of what tokens wrote to a state, see `kvprobe.cache.parts.WRITES`.
        segments: names of segments; all by default.
        slots: indices; all by default.
        among: only slots of the prompt, or only those that the model wrote.
        unit: what is drawn at once.
        block: number of consecutive slots that are drawn together, as in a paged cache.
    """

    rate: Share = 1.0
    count: AtLeastZero | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    parts: Parts | Part = "kv"
    segments: str | Sequence[str] | None = None
    slots: Sequence[int] | None = None
    among: Among = "all"
    unit: Unit = "slot"
    block: AtLeastOne = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("layers", "heads", "segments", "slots"):
            if (chosen := getattr(self, name)) is not None:
                object.__setattr__(self, name, (chosen,) if is_text(chosen) else tuple(chosen))
                if not len(chosen):
                    raise UserError(f"Scope has no {name}; give at least one in a list, or None for all.")
        if self.count is not None and self.rate != 1.0:
            raise UserError(f"Scope has count={self.count} and rate={self.rate}; give one of the two.")
        if self.block > 1 and self.unit == "number":
            raise UserError(f"Scope has block={self.block} and unit={self.unit!r}; a block is of whole slots.")

    def __str__(self) -> str:
        return short_repr(self)

    def eligible(self, ledger: Ledger, row: int = 0) -> Bool[Tensor, "slots"]:
        """The slots of a row that may be drawn.

        Raises:
            UserError: an unknown segment, or a slot beyond the cache.
        """
        eligible = ~ledger.padding[row]
        if self.segments is not None:
            eligible = eligible & ledger.in_segments(self.segments)[row]
        if self.among != "all":
            known = GENERATED in ledger.names
            generated = ledger.in_segments([GENERATED])[row] if known else torch.zeros_like(eligible)
            eligible = eligible & (generated if self.among == "generated" else ~generated)
        if self.slots is not None:
            _refuse_beyond("slot", self.slots, ledger.slots)
            named = torch.zeros_like(eligible)
            named[list(self.slots)] = True
            eligible = eligible & named
        return eligible

    @property
    def each(self) -> tuple[Part, ...]:
        """The parts that it names, one by one."""
        return ("k", "v") if self.parts == "kv" else (self.parts,)

    @property
    def pool(self) -> "Scope":
        """The scope with only the settings that decide the order of the draw; scopes of one pool share that order."""
        return replace(self, rate=1.0, count=None, layers=None, heads=None, parts="kv")

    def order(self, ledger: Ledger, shape: tuple[int, int], draws: Draws, step: int, row: int = 0) -> "Order":
        """The order in which slots are drawn.

        Args:
            shape: layers of the cache, and heads.
            step: tokens read since the prompt; each step has draws of its own.
        """
        layers, heads = shape
        eligible = self.eligible(ledger, row)
        if self.unit == "number":
            anywhere = eligible.expand(layers, 1, -1)
            return Order(
                anywhere, torch.zeros_like(anywhere, dtype=torch.long), torch.ones(1, 1, 1).to(anywhere.device), 1
            )
        across = {"slot": (1, 1), "layer": (layers, 1), "head": (layers, heads)}[self.unit]
        blocks = -(-ledger.slots // self.block)
        uniform = draws.uniform((*across, blocks), _SLOTS, step).to(eligible.device)
        whole = torch.nn.functional.pad(eligible, (0, blocks * self.block - ledger.slots))
        drawable = whole.view(blocks, self.block).any(1)
        rank = uniform.masked_fill(~drawable, 2.0).argsort(-1).argsort(-1)
        spread = rank.repeat_interleave(self.block, -1)[..., : ledger.slots].expand(layers, -1, -1)
        rounding = draws.uniform((*across, 1), _ROUNDING, step).to(eligible.device)
        return Order(eligible.expand_as(spread), spread, rounding, int(drawable.sum()))

    def struck(self, order: "Order", shape: tuple[int, int]) -> Bool[Tensor, "layers heads slots"]:
        """The struck slots, drawn in the order of this scope's pool. The head axis is 1 where all heads agree. With
        `unit="number"`, the slots of which some number may be struck.

        Raises:
            UserError: a layer or head beyond the cache.
        """
        struck = order.eligible
        if self.unit != "number":
            struck = struck & (order.rank < self.quota(order.available, order.rounding))
        for name, chosen, axis in (("layer", self.layers, 0), ("KV head", self.heads, 1)):
            if chosen is not None:
                _refuse_beyond(name, chosen, shape[axis])
                inside = torch.zeros(shape[axis], dtype=torch.bool, device=struck.device)
                inside[list(chosen)] = True
                struck = struck & (inside[:, None, None] if axis == 0 else inside[None, :, None])
        return struck

    def quota(self, available: int, rounding: Float[Tensor, "*units"]) -> Float[Tensor, "*units"]:
        """How many of the available units are struck; `rounding`, from 0 to 1, decides between up and down."""
        if self.count is not None:
            return torch.full_like(rounding, min(self.count, available))
        return (self.rate * available + rounding).floor()

    def numbers(
        self, eligible: Bool[Tensor, "slots"], size: tuple[int, int], draws: Draws, step: int, layer: int, part: Part
    ) -> Bool[Tensor, "heads slots d"]:
        """The struck numbers of a part of a layer, with `unit="number"`.

        Args:
            size: heads, and numbers in a vector.
        """
        heads, width = size
        inside = torch.zeros(heads, dtype=torch.bool, device=eligible.device)
        inside[list(range(heads) if self.heads is None else self.heads)] = True
        drawable = (inside[:, None] & eligible)[..., None].expand(-1, -1, width)
        purpose = (_NUMBERS, step, layer, purpose_of(part))
        uniform = draws.uniform((heads, len(eligible), width), *purpose).to(eligible.device)
        if self.count is None:
            # Each number is drawn on its own, as errors of memory are: there are enough of them for the rate to be met.
            return drawable & (uniform < self.rate)
        quota = min(self.count, int(drawable.sum()))
        if quota == 0:
            return torch.zeros_like(drawable)
        uniform = uniform.masked_fill(~drawable, 2.0)
        return uniform <= uniform.flatten().kthvalue(quota).values


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which slots are drawn.

    Attributes:
        eligible: slots that may be drawn.
        rank: place of each slot's unit in that order.
        rounding: uniform draws that round the number of struck units of each layer and head up or down.
        available: number of units to draw from.
    """

    eligible: Bool[Tensor, "layers heads slots"]
    rank: Int[Tensor, "layers heads slots"]
    rounding: Float[Tensor, "layers_drawn heads_drawn 1"]
    available: int


@checked_arguments
def bands(layers: int, count: int) -> list[range]:
    """The model's layers in `count` bands of consecutive layers, of sizes as equal as possible."""
    if not 1 <= count <= layers:
        raise UserError(f"{layers} layers cannot be cut into {count} bands; ask for 1 to {layers}.")
    edges = [round(index * layers / count) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def named_bands(layers: int, count: int) -> dict[str, tuple[int, ...]]:
    """All layers in bands of nearly equal size (as many as layers at most), and all of them together."""
    pieces = [tuple(band) for band in bands(layers, min(count, layers))]
    named = {str(piece[0]) if len(piece) == 1 else f"{piece[0]}–{piece[-1]}": piece for piece in pieces}
    return named | {EVERY_LAYER: tuple(range(layers))}


def stored_name(part: Part) -> str:
    """What a cache calls this part."""
    return part.upper() if part in ("k", "v") else part


def purpose_of(part: Part) -> int:
    """The purpose of random draws that are this part's own; see `Draws.uniform`."""
    return get_args(Part).index(part)


def _refuse_beyond(kind: str, chosen: Sequence[int], count: int) -> None:
    for index in chosen:
        if not 0 <= index < count:
            raise UserError(f"There is no {kind} {index}; the cache has {kind}s 0 to {count - 1}.")
