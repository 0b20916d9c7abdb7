"""The damaged slots of one layer beside what they should hold, and how well a hypothesis explains them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.rotary import Rotary

Kind = Literal[
    "numerics",
    "quantisation",
    "stale",
    "foreign prefix",
    "permuted blocks",
    "repeated blocks",
    "position shift",
    "scale error",
    "K and V swapped",
    "K and V interleaved",
    "bit flip",
    "zeroed",
    "not finite",
    "truncated",
    "channel order",
    "another tokenisation",
    "another text",
    "state lost",
    "state doubled",
    "another model",
    "other weights",
    "fitted slots",
    "after other slots",
    "unknown",
]
"""Kinds of differences."""

LookUp = Callable[[str, Float[Tensor, "some numbers"]], tuple[Int[Tensor, "some"], Float[Tensor, "some"]]]
"""The tokens of a model that are nearest to what slots of the first layer hold of a part, over all heads, and how far
off what they have is."""
_MADE = 0.5
"""Share of what is held, about zero or about any mean row, that an explanation may leave."""
FOREIGN = 0.25
"""Score of rows that look like rows of this model and are none of this text; what explains them must leave less."""


@dataclass(frozen=True, eq=False)
class Damaged:
    """One row of a layer, of which some places differ.

    Attributes:
        held: what the layer holds, by part, as it is stored: all of it in fp32 would take twice the memory.
        right: what the reference holds.
        places: the damaged vectors of each part.
        noise: of the pair, relative to a vector's size, by head.
        positions: at which the keys of the slots were computed.
        block: slots in a block.
        rotary: the layer's rotary embedding, where it is known.
    """

    held: Mapping[str, Float[Tensor, "_ slots _"]]
    right: Mapping[str, Float[Tensor, "_ slots _"]]
    places: Mapping[str, Bool[Tensor, "_ slots"]]
    noise: Mapping[str, Float[Tensor, "_"]]
    positions: Int[Tensor, "slots"]
    block: int
    rotary: Rotary | None = None

    @cached_property
    def parts(self) -> list[str]:
        """Those with damaged places."""
        return [part for part, where in self.places.items() if bool(where.any())]

    @cached_property
    def slots(self) -> Int[Tensor, "damaged"]:
        """Slots that are damaged in some part and head."""
        return torch.stack([where.any(0) for where in self.places.values()]).any(0).nonzero()[:, 0]

    @property
    def count(self) -> int:
        """Of all slots."""
        return len(self.positions)

    def vectors(self, part: str) -> tuple[Float[Tensor, "damaged d"], Float[Tensor, "damaged d"]]:
        """The damaged vectors of a part, and what they should be."""
        where = self.places[part]
        return self.held[part][where].float(), self.right[part][where].float()

    def rows(
        self, part: str, slots: Int[Tensor, "chosen"]
    ) -> tuple[Float[Tensor, "heads chosen d"], Float[Tensor, "heads chosen d"]]:
        """What these slots hold of a part, in all heads, and what they should hold."""
        return self.held[part][:, slots].float(), self.right[part][:, slots].float()

    def heads(self, part: str) -> Int[Tensor, "heads"]:
        """Heads that are damaged in a part."""
        return self.places[part].any(1).nonzero()[:, 0]

    def within(self, slots: Iterable[int]) -> "Damaged":
        """The same with only the damage in these slots."""
        inside = torch.zeros(self.count, dtype=torch.bool)
        inside[list(slots)] = True
        places = {part: where & inside for part, where in self.places.items()}
        return Damaged(self.held, self.right, places, self.noise, self.positions, self.block, self.rotary)

    def unexplained(self, predicted: Mapping[str, Float[Tensor, "_ _"]]) -> float:
        """The share of the difference that is left when the damaged vectors are taken to be these; the mean over parts.

        What the pair's own noise leaves is taken off. All is left by what makes no more of the rows than zeros or a
        mean row would: where rows are far smaller than they should be, either explains nearly all of the difference.
        """
        shares: list[float] = []
        for part in self.parts:
            held, right = (one.double() for one in self.vectors(part))  # a flipped bit may make numbers of 1e38
            guess, heads = predicted.get(part, right).double(), self.places[part].nonzero()[:, 0]
            allowed = float(2 * (self.noise[part][heads] * right.norm(dim=-1)).square().sum())
            left = max(0.0, _square(held - guess) - allowed)
            share = left / max(float((held - right).square().sum()), 1e-30)
            shares.append(share if share >= 1 or left <= _MADE * self._by_mean(held, heads) else 1.0)
        return sum(shares) / len(shares)

    def unexplained_blocks(
        self, predicted: Mapping[str, Float[Tensor, "_ chosen _"]], slots: Int[Tensor, "chosen"]
    ) -> float:
        """The same for a prediction of whole slots, sound ones among them; damage elsewhere stays unexplained."""
        shares: list[float] = []
        for part, guess in predicted.items():
            held, right = (one.double() for one in self.rows(part, slots))
            allowed = 2 * (self.noise[part][:, None] * right.norm(dim=-1)).square().sum()
            moved = float((guess - right).square().sum())
            every, inside = [one.double() for one in self.vectors(part)], float((held - right).square().sum())
            elsewhere = max(0.0, float((every[0] - every[1]).square().sum()) - inside)
            if not (moved > 4 * float(allowed) or bool(self.places[part].any())):
                continue
            left = max(0.0, _square(held - guess) - float(allowed))
            heads = torch.arange(len(held)).repeat_interleave(held.shape[1])
            share = (left + elsewhere) / max(inside + elsewhere, moved, 1e-30)
            made = share >= 1 or left <= _MADE * self._by_mean(held.flatten(0, 1), heads)
            shares.append(share if made else 1.0)
        return sum(shares) / len(shares) if shares else 1.0

    def _by_mean(self, held: Float[Tensor, "some d"], heads: Int[Tensor, "some"]) -> float:
        """What is left of these rows by zeros, or by the mean row of a part and head, whichever is nearest to those of
        each head."""
        which = heads.unique(return_inverse=True)[1]
        counts = which.bincount()[:, None]
        centres = torch.zeros(len(counts), held.shape[1], dtype=held.dtype).index_add(0, which, held) / counts
        within = (held - centres[which]).square().sum()
        return float(within + (counts * torch.cdist(centres, self._means[held.shape[1]]).square()).amin(1).sum())

    @cached_property
    def _means(self) -> Mapping[int, Float[Tensor, "means d"]]:
        """Zeros, and the mean row that the reference holds of each part and head, by their size."""
        means: dict[int, list[Tensor]] = {}
        for rows in self.right.values():
            means.setdefault(rows.shape[-1], [torch.zeros(1, rows.shape[-1])]).append(rows.float().mean(1))
        return {size: torch.cat(some).double() for size, some in means.items()}


@dataclass(frozen=True)
class Explanation:
    """A kind of difference, and how much of the difference it leaves unexplained.

    Attributes:
        left: share of the squared difference that is left.
        cost: added to it, for what the kind may choose.
        evidence: in a sentence.
        numbers: what was found: `shift`, `factor`, `bit`, `from`, …
    """

    kind: Kind
    left: float
    evidence: str
    cost: float = 0.0
    numbers: Mapping[str, float | int | str] = field(default_factory=dict[str, float | int | str])

    @property
    def score(self) -> float:
        """The lower, the better."""
        return self.left + self.cost


def _square(left: Tensor) -> float:
    """Of all numbers; infinite where one is not finite, which explains nothing."""
    return float(left.square().sum().nan_to_num(torch.inf, torch.inf))


def slots_in_words(slots: Int[Tensor, "chosen"] | range) -> str:
    """Runs of slots, the first few of them."""
    pieces = list(_runs(list(slots) if isinstance(slots, range) else slots.tolist()))
    words = [str(first) if first == last else f"{first} to {last}" for first, last in pieces]
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more runs" if len(words) > 4 else "")


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    start = previous = None
    for slot in slots:
        if start is None or previous is None:
            start = slot
        elif slot != previous + 1:
            yield start, previous
            start = slot
        previous = slot
    if start is not None and previous is not None:
        yield start, previous
