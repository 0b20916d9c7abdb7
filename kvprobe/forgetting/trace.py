"""What differs between the caches that stay of one conversation with different secrets.

Everything else is the same in them, the text that stays included. So a number that differs was decided by the secret;
and where no number differs, no reader of any kind can tell one secret from another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.brief import Brief, Table
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import WRITES, recurrent
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.states import inputs_of, state_of
from kvprobe.names import number_ranges

STATE, INPUTS = "state", "conv"
"""Of recurrent layers: what they fold, and the inputs that their convolution keeps. Each counts as one slot."""
REPEATED = 4
"""How often the first of the caches is computed, so that one sees by how much the same cache differs from itself."""
MARGIN = 2.0
"""How many times as far as these differ numbers of two secrets must, since there are more secrets than repeats."""

Seen = Mapping[str, Float[Tensor, "heads slots numbers"]]
"""What later tokens see of a layer, by part."""


@dataclass(frozen=True)
class Slots:
    """The slots of several caches at the same positions, live in all of them.

    Attributes:
        positions: of the slots.
        index: of these slots in each cache.
        live: whether each is live in a layer and head, in all caches.
        differ: whether the caches hold, or show, different slots, or go on at different positions.
    """

    positions: tuple[int, ...]
    index: tuple[tuple[int, ...], ...]
    live: Bool[Tensor, "layers heads slots"]
    differ: bool

    @classmethod
    def of(cls, caches: Sequence[KVCache]) -> "Slots":
        """Those that caches of one row have in common."""
        held = [_by_position(cache) for cache in caches]
        common = sorted(set.intersection(*map(set, held)))
        index = [tuple(slots[place] for place in common) for slots in held]
        lives = [cache.ledger.live[:, 0, :, list(places)] for cache, places in zip(caches, index, strict=True)]
        shapes = torch.broadcast_shapes(*(live.shape for live in lives))
        lives = [live.expand(shapes) for live in lives]
        live = reduce(torch.logical_and, lives)
        differ = (
            any(set(slots) != set(common) for slots in held)
            or any(not torch.equal(one, lives[0]) for one in lives[1:])
            or len({int(cache.ledger.following[0]) for cache in caches}) > 1
        )
        return cls(tuple(position for position, _ in common), tuple(index), live, differ)


def _by_position(cache: KVCache) -> dict[tuple[int, int], int]:
    """The live slots by position, and by how many before them have the same one."""
    live = cache.ledger.live_somewhere[0] & ~cache.ledger.padding[0]
    found: dict[tuple[int, int], int] = {}
    for slot in live.nonzero()[:, 0].tolist():
        position = int(cache.ledger.positions[0, slot])
        found[position, sum(at == position for at, _ in found)] = slot
    return found


def seen(model: Model, cache: KVCache, slots: Slots, number: int, layer: int) -> Seen:
    """What later tokens see of one layer of a cache; hidden slots are zero.

    Args:
        number: of the cache among those of `slots`.
    """
    parts = cache.layers[layer]
    live = slots.live[layer if len(slots.live) > 1 else 0][..., None].cpu()
    chosen = list(slots.index[number])
    kept = {name: _whole(one[0][:, chosen]).cpu() * live for name, one in parts.items() if name not in WRITES}
    if recurrent(parts):
        kept[STATE] = state_of(model, cache, layer)[0].flatten(1)[:, None]
        kept[INPUTS] = inputs_of(model, cache, layer)[0].flatten(1)[:, None]
        if not bool(kept[STATE].isfinite().all()):
            raise UserError(f"The state of layer {layer} holds NaN or infinity, of which nothing could be compared.")
    return kept


def _whole(numbers: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In fp32, or in fp64 where that would round."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


@dataclass(frozen=True, repr=False)
class SecretTrace(Brief):
    """Where caches of one conversation with different secrets differ, and by how much.

    Attributes:
        layers: of each layer, by part: the standard deviation over secrets relative to the size of what is stored, by
            head and slot.
        differs: likewise, whether any number of any secret differs by more than rounding.
        rounding: of each layer, by part: how far numbers must differ, because the same cache computed again does.
        positions: of the slots.
        exact: whether the same cache computed again is the same to the bit, so that any difference counts.
        slots_differ: whether the secret decides which slots stay.
        nearest: the least distance between two of the caches, relative to their size.
    """

    layers: tuple[Mapping[str, Float[Tensor, "heads slots"]], ...]
    differs: tuple[Mapping[str, Bool[Tensor, "heads slots"]], ...]
    rounding: tuple[Mapping[str, float], ...]
    positions: tuple[int, ...]
    exact: bool
    slots_differ: bool
    nearest: float

    def _facts(self) -> Iterable[str]:
        yield f"{len(self.layers)} layers, {len(self.positions)} slots"
        yield f"{len(self.places)} places differ, by up to {self.most:.1e}"

    def _table(self) -> Table:
        return ("layer", "part", "most"), [
            (layer, name, float(spread.max()))
            for layer, parts in enumerate(self.layers)
            for name, spread in parts.items()
            if spread.numel()
        ]

    @property
    def most(self) -> float:
        """The largest difference of any place that depends on the secret."""
        found = zip(self.layers, self.differs, strict=True)
        held = [parts[name][where] for parts, differs in found for name, where in differs.items()]
        return float(torch.cat(held).max()) if any(one.numel() for one in held) else 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing depends on the secret."""
        return not self.slots_differ and not self.touched

    @property
    def touched(self) -> tuple[int, ...]:
        """Layers in which something depends on the secret."""
        return tuple(
            layer for layer, parts in enumerate(self.differs) if any(bool(one.any()) for one in parts.values())
        )

    @property
    def places(self) -> list[tuple[int, str, int, int]]:
        """Layer, part, head and position of every place that depends on the secret, the largest difference first; a
        state's position is -1."""
        found: list[tuple[float, tuple[int, str, int, int]]] = []
        for layer, parts in enumerate(self.layers):
            for name, spread in parts.items():
                for head, slot in self.differs[layer][name].nonzero().tolist():
                    at = -1 if name in (STATE, INPUTS) else self.positions[slot]
                    found.append((float(spread[head, slot]), (layer, name, head, at)))
        return [place for _, place in sorted(found, key=lambda one: -one[0])]

    def by_head(self) -> Float[Tensor, "layers heads"]:
        """The largest difference of each layer in each head, over parts and slots; NaN where a layer has fewer heads. A
        latent has one for all heads."""
        rows = [[one.amax(1) for one in parts.values() if one.numel()] for parts in self.layers]
        heads = max((len(one) for row in rows for one in row), default=0)
        found = torch.full((len(rows), heads), torch.nan)
        for layer, row in enumerate(rows):
            for one in row:
                found[layer, : len(one)] = found[layer, : len(one)].fmax(one)
        return found

    def by_slot(self) -> Float[Tensor, "layers slots"]:
        """The largest difference of each layer at each position, over parts and heads; a state's is everywhere."""
        rows = [
            torch.stack([one.amax(0).expand(len(self.positions)) for one in parts.values()]).amax(0)
            for parts in self.layers
        ]
        return torch.stack(rows) if self.positions else torch.zeros(len(self.layers), 0)


def trace_of(model: Model, caches: Sequence[KVCache], again: Sequence[KVCache], slots: Slots) -> SecretTrace:
    """What differs between caches.

    Args:
        again: the first of them, computed again.
        slots: that they have in common.
    """
    repeated = Slots.of([caches[0], *again])
    roundings: list[dict[str, float]] = []
    layers: list[dict[str, Tensor]] = []
    differs: list[dict[str, Tensor]] = []
    exact, count = not repeated.differ, len(caches)
    apart, size = torch.zeros(count, count, dtype=torch.double), 0.0
    for layer in range(caches[0].n_layers):
        held = [seen(model, cache, slots, number, layer) for number, cache in enumerate(caches)]
        first, *others = (seen(model, one, repeated, row, layer) for row, one in enumerate([caches[0], *again]))
        rounding = {
            name: MARGIN * max((float((other[name] - one).abs().max()) for other in others if one.numel()), default=0.0)
            for name, one in first.items()
        }
        roundings.append(rounding)
        exact = exact and not any(rounding.values())
        spreads: dict[str, Tensor] = {}
        differing: dict[str, Tensor] = {}
        for name, first in held[0].items():
            # Relative to the first, so that equal caches differ by exactly nothing.
            off = torch.stack([one[name] - first for one in held]).double()
            scale = torch.stack([one[name] for one in held]).double().square().mean((0, 3))
            spread = (off - off.mean(0)).square().mean((0, 3)).sqrt()
            spreads[name] = (spread / scale.sqrt().clamp(min=1e-30)).float()
            differing[name] = off.abs().amax((0, 3)) > rounding[name]
            flat = off.flatten(1)
            products = flat @ flat.T
            apart += (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp(min=0)
            size += float(scale.sum() * first.shape[2])
        layers.append(spreads)
        differs.append(differing)
    apart.fill_diagonal_(torch.inf)
    nearest = float((apart.min() / max(size, 1e-30)).sqrt())
    return SecretTrace(tuple(layers), tuple(differs), tuple(roundings), slots.positions, exact, slots.differ, nearest)


def in_layers(layers: Sequence[int]) -> str:
    """These layers in words."""
    return f"layer{'s' * (len(layers) != 1)} {number_ranges(layers)}"


def stored(caches: Sequence[KVCache]) -> int:
    """How many slots hold something that depends on the secret where later tokens do not see it: in some layers or
    heads, or as the token that the ledger names."""
    lives = [cache.ledger.live[:, 0].cpu() for cache in caches]
    if len({cache.slots for cache in caches}) > 1:
        padding = (cache.ledger.padding[0].cpu() for cache in caches)
        return max(int((~live.all(1).all(0) & ~empty).sum()) for live, empty in zip(lives, padding, strict=True))
    first, held = caches[0], torch.zeros(caches[0].slots, dtype=torch.bool)
    for live, other in zip(lives, caches, strict=True):
        both, shown = live & lives[0], torch.zeros_like(held)
        for layer, parts in enumerate(first.layers):
            visible = both[layer if len(both) > 1 else 0]
            for name, mine in parts.items():
                differs = (mine[0] != other.layers[layer][name][0]).any(-1).cpu()
                # Writes to a state have heads of their own, and are hidden in all of them.
                heads = visible if len(visible) == len(differs) else visible[:1]
                held |= (differs & ~heads).any(0)
                shown |= (differs & heads).any(0)
        held |= (other.ledger.tokens != first.ledger.tokens)[0].cpu() & ~shown
    return int(held.sum())
