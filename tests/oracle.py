"""The oracle: all that a model reads in a history of edits, computed again in one pass without a cache.

A `Row` keeps by hand what each edit does to each token. `whole_pass` then runs the model once over all tokens ever
read, with attention written out here: the queries of each reading see the keys as they were seen at that moment, turned
by the model's own rotary module from where they were read to where they stood.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kvprobe.inference.model import Model

_NAME = "kvprobe_oracle"


@dataclass(frozen=True)
class Reading:
    """How one run of tokens saw all those before it, and itself.

    Attributes:
        positions: of every token so far.
        turns: from where each token's key was made to where it stands.
        alive: `[layers, kv_heads, tokens]`, of every token so far.
    """

    positions: tuple[int, ...]
    turns: tuple[int, ...]
    alive: Tensor


@dataclass
class Row:
    """One row's history.

    Attributes:
        ids: of all tokens ever read.
        starts: the first token of each reading.
        origins: the position for which each token's key is made.
        read_at: the position at which each token was read.
        positions: where each token stands now.
        alive: `[layers, kv_heads, tokens]`: who may still be seen.
        held: the token in each slot of the cache; None for padding.
        following: where the next token stands.
        readings: one for each start.
    """

    layers: int
    kv_heads: int
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    read_at: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    held: list[int | None] = field(default_factory=list)
    following: int = 0
    readings: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alive = torch.ones(self.layers, self.kv_heads, 0, dtype=torch.bool)

    def read(self, ids: Sequence[int], gap: int, width: int) -> None:
        """Tokens are read `gap` positions after the last; the cache grows by `width` slots."""
        first = len(self.ids)
        places = [self.following + gap + index for index in range(len(ids))]
        self.starts.append(first)
        self.ids += ids
        for column in (self.origins, self.read_at, self.positions):
            column += places
        self.held += [*range(first, first + len(ids)), *[None] * (width - len(ids))]
        self.alive = torch.cat([self.alive, torch.ones(self.layers, self.kv_heads, len(ids), dtype=torch.bool)], 2)
        self.following = places[-1] + 1
        turns = tuple(now - then for now, then in zip(self.positions, self.origins, strict=True))
        self.readings.append(Reading(tuple(self.positions), turns, self.alive.clone()))

    def evict(self, tokens: Sequence[int]) -> None:
        """The tokens and all padding leave the cache."""
        self.alive[:, :, list(tokens)] = False
        self.held = [token for token in self.held if token is not None and token not in tokens]

    def renumber(self, naively: bool) -> None:
        """Tokens that some layer and head may see are counted from 0; their keys are turned, unless `naively`."""
        place = 0
        for token in range(len(self.ids)):
            if bool(self.alive[:, :, token].any()):
                if naively:
                    self.origins[token] += place - self.positions[token]
                self.positions[token] = place
                place += 1
        self.following = place


@dataclass(frozen=True)
class Pass:
    """What the one pass computes, for all tokens: logits, the residual stream after each layer but the last, and K (as
    first stored) and V of each layer."""

    logits: Tensor
    resid_post: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


def whole_pass(model: Model, row: Row) -> Pass:
    """All tokens of a row's history, read at once."""
    plain = model.lanes.plain
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **settings: Any
    ) -> tuple[Tensor, None]:
        keys.append(key[0])
        values.append(value[0])
        attended = []
        for start, end, reading in zip(row.starts, [*row.starts[1:], len(row.ids)], row.readings, strict=True):
            seen = _seen(reading, start, end, module.layer_idx, settings.get("sliding_window"))
            turned = _turned(plain, module, key[:, :, :end], reading.turns)
            groups = query.shape[1] // key.shape[1]
            scores = query[:, :, start:end] @ turned.repeat_interleave(groups, 1).transpose(2, 3) * scaling
            weights = scores.masked_fill(~seen.repeat_interleave(groups, 0), -torch.inf).softmax(-1)
            attended.append(weights @ value[:, :, :end].repeat_interleave(groups, 1))
        return torch.cat(attended, 2).transpose(1, 2), None

    count = len(row.ids)
    with _attention(plain, attend), torch.no_grad():
        output = plain(
            input_ids=torch.tensor([row.ids]),
            position_ids=torch.tensor([row.read_at]),
            attention_mask=torch.zeros(1, 1, count, count),  # kept by the oracle itself
            use_cache=False,
            output_hidden_states=True,
        )
    return Pass(output.logits[0], [hidden[0] for hidden in output.hidden_states[1:-1]], keys, values)


def _seen(reading: Reading, start: int, end: int, layer: int, window: int | None) -> Tensor:
    """`[kv_heads, queries, tokens]`: who is seen by the tokens of a reading."""
    seen = torch.zeros(reading.alive.shape[1], end - start, end, dtype=torch.bool)
    for query in range(start, end):
        for token in range(query + 1):
            near = window is None or reading.positions[query] - reading.positions[token] < window
            seen[:, query - start, token] = reading.alive[layer, :, token] & near
    return seen


def _turned(plain: nn.Module, attention: nn.Module, keys: Tensor, turns: Sequence[int]) -> Tensor:
    """Keys turned by so many positions each, in the model's own way."""
    if not any(turns):
        return keys
    [rotary] = [module for module in plain.modules() if hasattr(module, "rope_type")]
    kind = plain.config.layer_types[attention.layer_idx] if isinstance(rotary.rope_type, dict) else None
    by = (torch.tensor([turns]),) if kind is None else (torch.tensor([turns]), kind)
    cos, sin = (part[:, None] for part in rotary(keys, *by))
    # Scaling (YaRN) is in the keys already.
    scaling = getattr(rotary, "attention_scaling" if kind is None else f"{kind}_attention_scaling")
    rotate_half = sys.modules[type(attention).__module__].rotate_half
    turning, still = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
    return torch.cat([(turning * cos + rotate_half(turning) * sin) / scaling, still], -1)


@contextmanager
def _attention(plain: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, the model attends in this way."""
    before = plain.config._attn_implementation
    transformers.AttentionInterface.register(_NAME, attend)
    plain.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        plain.set_attn_implementation(before)
