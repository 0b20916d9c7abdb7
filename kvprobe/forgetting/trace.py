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
from kvprobe.cache.parts import recurrent
from kvprobe.inference.model import Model
from kvprobe.inference.states import state_of

STATE = "state"

Seen = Mapping[str, Float[Tensor, "heads slots numbers"]]
"""What later tokens see of a layer, by part; a state counts as one slot."""


@dataclass(frozen=True)
class Slots:
    """The slots of several caches at the same positions, live in all of them.

    Attributes:
        positions: of the slots.
        index: of these slots in each cache.
        live: whether each is live in a layer and head, in all caches.
        differ: whether the caches hold, or show, different slots.
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
        index = [tuple(slots[position] for position in common) for slots in held]
        lives = [cache.ledger.live[:, 0, :, list(places)] for cache, places in zip(caches, index, strict=True)]
        shapes = torch.broadcast_shapes(*(live.shape for live in lives))
        lives = [live.expand(shapes) for live in lives]
        live = reduce(torch.logical_and, lives)
        differ = any(set(slots) != set(common) for slots in held) or any(
            not torch.equal(one, lives[0]) for one in lives[1:]
        )
        return cls(tuple(common), tuple(index), live, differ)

    def after(self, position: int) -> "Slots":
        """Those at later positions."""
        chosen = [place for place, at in enumerate(self.positions) if at > position]
        return Slots(
            tuple(self.positions[place] for place in chosen),
            tuple(tuple(index[place] for place in chosen) for index in self.index),
            self.live[..., chosen],
            self.differ,
        )


def _by_position(cache: KVCache) -> dict[int, int]:
    live = cache.ledger.live_somewhere[0] & ~cache.ledger.padding[0]
    return {int(cache.ledger.positions[0, slot]): slot for slot in live.nonzero()[:, 0].tolist()}


def seen(model: Model, cache: KVCache, slots: Slots, number: int, layer: int) -> Seen:
    """What later tokens see of one layer of a cache; hidden slots are zero.

    Args:
        number: of the cache among those of `slots`.
    """
    parts = cache.layers[layer]
    if recurrent(parts):
        return {STATE: state_of(model, cache, layer)[0].flatten(1)[:, None]}
    live = slots.live[layer if len(slots.live) > 1 else 0][..., None]
    chosen = list(slots.index[number])
    return {name: tensor[0][:, chosen].float().cpu() * live.cpu() for name, tensor in parts.items()}


@dataclass(frozen=True, repr=False)
class SecretTrace(Brief):
    """Where caches of one conversation with different secrets differ, and by how much.

    Attributes:
        layers: of each layer, by part: the standard deviation over secrets relative to the size of what is stored, by
            head and slot.
        positions: of the slots.
        rounding: a step of the dtype, or how far the same cache computed twice differs, if that is more.
        slots_differ: whether the secret decides which slots stay.
        nearest: the least distance between two of the caches, relative to their size.
    """

    layers: tuple[Mapping[str, Float[Tensor, "heads slots"]], ...]
    positions: tuple[int, ...]
    rounding: float
    slots_differ: bool
    nearest: float

    def _facts(self) -> Iterable[str]:
        yield f"{len(self.layers)} layers, {len(self.positions)} slots"
        yield f"differences up to {self.most:.1e} (rounding {self.rounding:.0e})"

    def _table(self) -> Table:
        return ("layer", "part", "most"), [
            (layer, name, float(spread.max()))
            for layer, parts in enumerate(self.layers)
            for name, spread in parts.items()
            if spread.numel()
        ]

    @property
    def most(self) -> float:
        """The largest difference of any place."""
        return max((float(one.max()) for parts in self.layers for one in parts.values() if one.numel()), default=0.0)

    @property
    def empty(self) -> bool:
        """Whether nothing depends on the secret, beyond rounding."""
        return not self.slots_differ and self.most <= self.rounding

    @property
    def touched(self) -> tuple[int, ...]:
        """Layers in which something depends on the secret."""
        return tuple(
            layer
            for layer, parts in enumerate(self.layers)
            if any(one.numel() and float(one.max()) > self.rounding for one in parts.values())
        )

    @property
    def places(self) -> list[tuple[int, str, int, int]]:
        """Layer, part, head and position of every place that depends on the secret, the largest difference first; a
        state's position is -1."""
        found: list[tuple[float, tuple[int, str, int, int]]] = []
        for layer, parts in enumerate(self.layers):
            for name, spread in parts.items():
                for head, slot in (spread > self.rounding).nonzero().tolist():
                    at = -1 if name == STATE else self.positions[slot]
                    found.append((float(spread[head, slot]), (layer, name, head, at)))
        return [place for _, place in sorted(found, key=lambda one: -one[0])]

    def by_slot(self) -> Float[Tensor, "layers slots"]:
        """The largest difference of each layer at each position, over parts and heads; a state's is everywhere."""
        rows = [
            torch.stack([one.amax(0).expand(len(self.positions)) for one in parts.values()]).amax(0)
            for parts in self.layers
        ]
        return torch.stack(rows) if self.positions else torch.zeros(len(self.layers), 0)


def trace_of(model: Model, caches: Sequence[KVCache], again: KVCache, slots: Slots) -> SecretTrace:
    """What differs between caches.

    Args:
        again: the first of them, computed once more.
        slots: that they have in common.
    """
    repeated = Slots.of([caches[0], again])
    layers: list[dict[str, Tensor]] = []
    rounding, count = torch.finfo(model.lanes.dtype).eps, len(caches)
    apart, size = torch.zeros(count, count, dtype=torch.double), 0.0
    for layer in range(caches[0].n_layers):
        held = [seen(model, cache, slots, number, layer) for number, cache in enumerate(caches)]
        spreads: dict[str, Tensor] = {}
        for name, first in held[0].items():
            # Relative to the first, so that equal caches differ by exactly nothing.
            off = torch.stack([one[name] - first for one in held]).double()
            scale = torch.stack([one[name] for one in held]).double().square().mean((0, 3))
            spread = (off - off.mean(0)).square().mean((0, 3)).sqrt()
            spreads[name] = (spread / scale.sqrt().clamp(min=1e-30)).float()
            flat = off.flatten(1)
            products = flat @ flat.T
            apart += (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp(min=0)
            size += float(scale.sum() * first.shape[2])
        layers.append(spreads)
        one, two = (seen(model, cache, repeated, number, layer) for number, cache in enumerate((caches[0], again)))
        for name, tensor in one.items():
            largest = float(tensor.abs().max()) if tensor.numel() else 0.0
            rounding = max(rounding, float((tensor - two[name]).abs().max()) / largest if largest else 0.0)
    apart.fill_diagonal_(torch.inf)
    nearest = float((apart.min() / max(size, 1e-30)).sqrt())
    return SecretTrace(tuple(layers), slots.positions, rounding, slots.differ, nearest)
