"""The caches that the gate reads after: of a few tokens as the model read them, and of many slots of random content.

What a model begins to do only at some length (a window, a scale that grows, a mask that is dropped) shows in the long
cache at the price of a few tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvprobe.cache.layer import Layer, slots_and_writes
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import INDEX
from kvprobe.cache.recurrence import time_moved
from kvprobe.models.hf_cache import CacheLayer, empty_layers, held_by, layers_of, past_key_values
from kvprobe.models.recurrent import StateLayer
from kvprobe.models.rounding import difference, few_tokens
from kvprobe.models.unproved import Lane, UnprovedLanes

_LOUD = 100.0
"""How much larger what hidden slots say is than what others do."""
_CONTENT = ("V", "latent", "value", "conv", INDEX)
"""The parts of hidden slots that are loud: what they hold, not what they are found by. But a loud index key would take
a place among those that are attended to."""
_APART = 0.3
"""How far keys of the long cache lie apart, as a share of how far real ones do: each slot has some attention."""

Reading = Float[Tensor, "rows kept vocab"]


@dataclass(frozen=True)
class Held:
    """A cache: its ledger, and the parts of each layer."""

    ledger: Ledger
    layers: tuple[Layer, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.values()]

    def first(self, slots: int) -> "Held":
        """The first slots (or all but the last, where negative), as if no more had been read."""
        layers = tuple({name: tensor[:, :, :slots] for name, tensor in layer.items()} for layer in self.layers)
        chosen = torch.arange(self.ledger.slots, device=self.ledger.tokens.device)[:slots]
        chosen = chosen.expand(self.ledger.tokens.shape[0], -1)
        ledger = self.ledger.take(chosen, torch.zeros_like(chosen, dtype=torch.bool))
        return Held(replace(ledger, following=ledger.positions[:, -1] + 1), layers)

    def hidden(self) -> "Held":
        """The same slots, hidden and with loud content, as if nothing had been read."""
        ledger = replace(
            self.ledger,
            live=torch.zeros_like(self.ledger.live),
            following=torch.zeros_like(self.ledger.following),
        )
        return Held(ledger, tuple(map(_loud, self.layers)))


def _loud(layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _LOUD * tensor if name in _CONTENT else tensor for name, tensor in layer.items()}


def read(
    lanes: UnprovedLanes,
    held: Held | None,
    ids: Int[Tensor, "batch queries"],
    ledger: Ledger,
    lane: Lane = "plain",
    kept: int | Int[Tensor, "kept"] = 0,
) -> tuple[Reading, Held]:
    """The logits of tokens (those `kept`) read after a cache (or after nothing), and the longer cache."""
    layers = empty_layers(lanes.geometry.parts)
    if held is not None:
        lives, padding = held.ledger.live[:, :, 0], held.ledger.padding
        parts = [*map(slots_and_writes, held.layers)]
        layers = layers_of(
            lanes.geometry.parts,
            lambda number: CacheLayer([*parts[number][0].values()]),
            lambda number: StateLayer(parts[number][1], lives[number if len(lives) > 1 else 0], padding),
        )
    logits = lanes.unproved(ids, ledger, past_key_values(layers), lane, kept)
    named = (
        {part.name: tensor for part, tensor in zip(parts, held_by(layer), strict=True)}
        for parts, layer in zip(lanes.geometry.layers, layers, strict=True)
    )
    return logits, Held(ledger, tuple(named))


def read_few(lanes: UnprovedLanes, lane: Lane = "plain") -> tuple[Reading, Held]:
    """A few tokens read after nothing."""
    ids = few_tokens(lanes.plain)
    return read(lanes, None, ids, Ledger.of(ids), lane)


def states_apart(lanes: UnprovedLanes) -> float:
    """How far the states after a few tokens lie from the folds of what these wrote."""
    folding = [number for number in lanes.geometry.recurrent if "decay" in lanes.geometry.parts[number]]
    if not folding:
        return 0.0
    ids, layers = few_tokens(lanes.plain), empty_layers(lanes.geometry.parts)
    lanes.unproved(ids, Ledger.of(ids), past_key_values(layers))
    return max(difference(layers[number].folded, layers[number].state) for number in folding)


def read_after(
    lanes: UnprovedLanes,
    held: Held,
    ids: Int[Tensor, "batch queries"],
    gap: int = 0,
    kept: int | Int[Tensor, "kept"] = 0,
) -> Reading:
    """The logits of tokens read after a cache, `gap` positions after its end."""
    places = held.ledger.following[:, None] + gap + torch.arange(ids.shape[1], device=ids.device)
    return read(lanes, held, ids, held.ledger.append(Ledger.of(ids, places)), kept=kept)[0]


def empty_cache(lanes: UnprovedLanes) -> DynamicCache:
    return past_key_values(empty_layers(lanes.geometry.parts))


class LongCache:
    """Random keys and values of many slots, on the scale of those of a few real ones, and writes of those.

    Attributes:
        slots: how many.
        ids: the tokens to be read after them.
    """

    def __init__(self, lanes: UnprovedLanes, held: Held, slots: int, ids: Int[Tensor, "1 queries"]) -> None:
        self.lanes, self.slots, self.ids = lanes, slots, ids
        # The first token of a text is unlike the others in many models.
        self._few = [{name: tensor[0, :, 1:].float() for name, tensor in layer.items()} for layer in held.layers]
        self._draws: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def read(
        self,
        queries: int | None = None,
        live: Bool[Tensor, "layers rows kv_heads slots"] | None = None,
        draws: Sequence[int] = (1,),
        at: Int[Tensor, "rows chosen"] | None = None,
        masked: bool = True,
        lane: Lane = "plain",
    ) -> Reading:
        """The logits of the first `queries` tokens (all by default) after the cache.

        Args:
            live: slots that are not masked; one layer, row or KV head where all agree.
            draws: for each row, the seed of what its masked slots hold.
            at: the slots that are not evicted, by row.
            masked: whether kvprobe's masks are given even if nothing is masked.
        """
        ids = self.ids[:, :queries].expand(len(draws), -1)
        places = torch.arange(self.slots, device=ids.device).expand(len(draws), -1) if at is None else at
        after = (self.slots + torch.arange(ids.shape[1], device=ids.device)).expand_as(ids)
        ledger = Ledger.of(torch.cat([torch.zeros_like(places), ids], 1), torch.cat([places, after], 1))
        if live is not None:
            seen = torch.ones_like(live[..., :1]).expand(*live.shape[:3], ids.shape[1])
            ledger = replace(ledger, live=torch.cat([live, seen], 3))
        layers = layers_of(
            self.lanes.geometry.parts,
            lambda layer: _Drawn(self, layer, places, live, draws),
            lambda layer: self._state(layer, at, live, draws),
        )
        return self.lanes.unproved(ids, ledger, past_key_values(layers), lane, masked=masked)

    def _state(
        self,
        layer: int,
        at: Int[Tensor, "rows chosen"] | None,
        live: Bool[Tensor, "layers rows kv_heads slots"] | None,
        draws: Sequence[int],
    ) -> StateLayer:
        """A recurrent layer after writes of the few real tokens, drawn at random."""
        _, few = slots_and_writes(self._few[layer])

        def drawn(draw: int) -> dict[str, Tensor]:
            count, generator = next(iter(few.values())).shape[1], torch.Generator().manual_seed(draw)
            chosen = torch.randint(count, (self.slots,), generator=generator)
            return {name: tensor[:, chosen.to(tensor.device)] for name, tensor in few.items()}

        writes = {name: tensor.expand(len(draws), *tensor.shape) for name, tensor in drawn(0).items()}
        hidden = None if live is None else ~live[layer if len(live) > 1 else 0, :, 0]
        if hidden is not None:
            others = [_loud(drawn(draw)) for draw in draws]
            writes = {
                # Hidden writes leave their decay behind, so that it stays the same.
                name: tensor if name == "decay" else
                torch.where(hidden[:, None, :, None], torch.stack([other[name] for other in others]), tensor)
                for name, tensor in writes.items()
            }  # fmt: skip
        if at is not None:
            held = torch.ones(len(draws), self.slots, dtype=torch.bool, device=at.device)
            writes = time_moved(writes, at, torch.zeros_like(at, dtype=torch.bool), held)
            writes = {
                name: tensor.gather(2, at[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))
                for name, tensor in writes.items()
            }
        dtypes = dict.fromkeys(writes, self.lanes.dtype) | {"decay": torch.float32}
        writes = {name: tensor.to(dtypes[name]) for name, tensor in writes.items()}
        return StateLayer(writes, None if hidden is None else ~hidden)

    def content(
        self, layer: int, number: int, places: Int[Tensor, "rows chosen"], hidden: Tensor | None, draws: Sequence[int]
    ) -> Float[Tensor, "rows heads chosen d"]:
        """The part of this number of these slots, the same in all rows but for hidden ones."""
        name, few = [*self._few[layer].items()][number]
        # Keys lie close together, so that each slot has its share of the attention; those of an index do not, so that
        # it has something to choose.
        spread = few.std().expand(1, 1, 1) if name == "V" else few.std(1, keepdim=True)
        spread = spread if name in ("V", INDEX) else _APART * spread
        drawn = torch.stack([spread * self._noise(0, few)[:, row] for row in places])
        if hidden is not None:
            loud = _LOUD if name in _CONTENT else 1
            drawn = torch.where(hidden, torch.stack([loud * spread * self._noise(draw, few) for draw in draws]), drawn)
        return few.mean(1, keepdim=True) + drawn

    def _noise(self, draw: int, like: Float[Tensor, "kv_heads few d"]) -> Float[Tensor, "kv_heads slots d"]:
        shape = (like.shape[0], self.slots, like.shape[2])
        if (draw, shape) not in self._draws:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(draw))
            self._draws[draw, shape] = noise.to(like.device)
        return self._draws[draw, shape]


class _Drawn(CacheLayer):
    """One layer of a long cache, whose content is made when it is needed and not kept."""

    def __init__(
        self,
        cache: LongCache,
        layer: int,
        places: Int[Tensor, "rows chosen"],
        live: Bool[Tensor, "layers rows kv_heads slots"] | None,
        draws: Sequence[int],
    ) -> None:
        super().__init__()
        hidden = None if live is None else ~live[layer if len(live) > 1 else 0, ..., None]
        self._slots = places.shape[1]
        self._content = partial(cache.content, layer, places=places, hidden=hidden, draws=draws)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._after(0, key_states), self._after(1, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self._after(2, indexer_key_states[:, None])[:, 0]

    def _after(self, number: int, new: Tensor) -> Tensor:
        return torch.cat([self._content(number).to(new), new], 2)


def long_cache(lanes: UnprovedLanes, slots: int, held: Held | None = None) -> LongCache:
    """A cache of so many slots, or of as many as the model has positions for."""
    ids = few_tokens(lanes.plain)[:, -3:]
    limit = (lanes.geometry.max_position or torch.inf) - ids.shape[1]
    return LongCache(lanes, held or read_few(lanes)[1], int(min(slots, limit)), ids)
