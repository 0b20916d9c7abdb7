"""The oracle of patching: a prompt and what is read after it, in one pass without a cache, one row of the batch for
each cell.

A `Run` reads and edits a prompt with kvprobe and records by hand what that does to each token (`tests.oracle.Row`).
`patched_pass` then reads all of a base run's tokens at once, with attention written out here, and puts the donor's K
and V where a `Swap` says: visible to the suffix alone, or to every query. `hooked_pass` says the same of the
prompt's queries by the hooks of TransformerBridge, and of the residual stream and what is added to it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import extend
from kvprobe.inference.model import Model
from kvprobe.models.lens import HOOKS
from kvprobe.patching import PatchMap
from kvprobe.text.tokens import Tokens
from tests.models import VOCABULARY
from tests.oracle import Row, _attention, _seen, _turned, whole_pass

Op = tuple[str, int]
EDITS = ("mask", "mask ragged", "evict", "reindex", "reindex naively")


@dataclass
class Run:
    """A prompt as it is read and edited.

    Attributes:
        seed: of its tokens; what else happens to them depends on the seeds of the operations alone.
        row: its history, kept by hand.
        segments: of each token.
        cache: what kvprobe makes of it.
    """

    model: Model
    seed: int
    row: Row = field(init=False)
    segments: list[str] = field(default_factory=list)
    _cache: KVCache | None = None

    def __post_init__(self) -> None:
        self.row = Row(self.model.geometry.n_layers, self.model.geometry.n_kv_heads)

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    def do(self, kind: str, seed: int) -> "Run":
        rng = random.Random(seed)
        if kind.startswith("read"):
            self.read(
                {f"S{len(self.row.starts)}{letter}": rng.randint(1, 5) for letter in "ab"[: rng.randint(1, 2)]},
                gap=rng.choice([0, 0, 1, 3]),
                padding=rng.randint(1, 4) if kind == "read padded" else 0,
            )
        elif kind == "mask ragged":
            for layer in range(self.row.layers):
                for head in range(self.row.kv_heads):
                    self.mask(self.draw_held(rng), [layer], [head])
        elif kind == "mask":
            self.mask(self.draw_held(rng))
        elif kind == "evict":
            self.evict(self.draw_held(rng))
        elif self.rotates:
            self.reindex(naively=kind == "reindex naively")
        return self

    def read(self, spans: Mapping[str, int], gap: int = 0, padding: int = 0) -> "Run":
        """Segments of so many tokens, in a batch whose other row is longer by `padding`."""
        rng = random.Random(f"{self.seed} {len(self.row.starts)}")
        tokens = Tokens.of([])
        for name, count in spans.items():
            ids = [rng.randrange(VOCABULARY) for _ in range(count)]
            tokens += Tokens.of(ids, name, self.row.following + gap + len(tokens))
        beside = [Tokens.of([0] * (len(tokens) + padding), "beside", tokens.positions[0])] if padding else []
        self._cache = extend(self.model.lanes, self._cache, [tokens, *beside])[0].rows([0])
        self.row.read(tokens.ids, gap, len(tokens) + padding)
        self.segments += tokens.segments
        return self

    def mask(
        self, tokens: Sequence[int], layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> "Run":
        self._cache = self.cache.mask(slots=self.chosen(tokens), layers=layers, heads=heads)
        for layer in range(self.row.layers) if layers is None else layers:
            for head in range(self.row.kv_heads) if heads is None else heads:
                self.row.alive[layer, head, list(tokens)] = False
        return self

    def evict(self, tokens: Sequence[int]) -> "Run":
        self._cache = self.cache.evict(slots=self.chosen(tokens))
        self.row.evict(tokens)
        return self

    def reindex(self, naively: bool = False) -> "Run":
        self._cache = self.cache.reindex("naive" if naively else "contiguous")
        self.row.renumber(naively)
        return self

    @property
    def rotates(self) -> bool:
        """Whether the model's keys can be given other positions."""
        return self.model.geometry.max_position is None

    @property
    def held(self) -> list[int]:
        """The tokens that the cache still holds, in order."""
        return [token for token in self.row.held if token is not None]

    def draw_held(self, rng: random.Random) -> list[int]:
        """Some of the tokens that are held, but never all of them."""
        first, *others = rng.sample(self.held, len(self.held))
        return sorted(token for token in others if token != first and rng.random() < 0.3)

    def chosen(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([[token in tokens for token in self.row.held]])

    def tokens_at(self, slots: Sequence[int]) -> list[int]:
        """The tokens in these slots, none of which is padding."""
        tokens = [self.row.held[slot] for slot in slots]
        assert None not in tokens
        return [token for token in tokens if token is not None]

    def slots_of(self, segment: str) -> list[int]:
        """Where the tokens of a segment are held."""
        return [
            slot for slot, token in enumerate(self.row.held) if token is not None and self.segments[token] == segment
        ]

    def suffix(self, seed: int, count: int, gap: int = 0) -> Tokens:
        rng = random.Random(f"suffix {seed}")
        ids = [rng.randrange(VOCABULARY) for _ in range(count)]
        return Tokens.of(ids, "suffix", self.row.following + gap)


@dataclass(frozen=True)
class Swap:
    """A cell: where the donor's vectors stand instead of the base's, by the tokens of the base; and which query heads
    and tokens of the suffix see them there (None for all)."""

    layers: Sequence[int]
    tokens: Sequence[int]
    heads: Sequence[int]
    part: str
    query_heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None


def swaps_of(patched: PatchMap, base: Run) -> list[Swap]:
    """The cells of a map, by token."""
    all_heads = range(base.row.kv_heads)
    return [
        Swap(
            cell.layers,
            base.tokens_at(cell.slots),
            all_heads if cell.kv_heads is None else cell.kv_heads,
            cell.part,
            cell.query_heads,
            cell.queries,
        )
        for cell in patched.cells
    ]


def twins(base: Run, donor: Run, from_end: bool = False) -> dict[int, int]:
    """The donor's token for each of the base's: held as the same one of its segment, counted from start or end."""
    pairs = {}
    for segment in dict.fromkeys(base.segments):
        ours, theirs = (
            [token for token in run.held if run.segments[token] == segment][:: -1 if from_end else 1]
            for run in (base, donor)
        )
        pairs |= dict(zip(ours, theirs, strict=False))
    return pairs


def patched_pass(
    model: Model,
    base: Run,
    donor: Run,
    suffix: Tokens,
    swaps: Sequence[Swap],
    pairs: Mapping[int, int] | None = None,
    reads: Literal["reader", "total"] = "reader",
) -> Tensor:
    """`[swaps, suffix tokens, vocabulary]`: the logits of the suffix after each swap.

    Args:
        pairs: the donor's token for each of the base's; see `twins`.
        reads: who sees what was swapped: the suffix alone, or every query.
    """
    pairs = twins(base, donor) if pairs is None else pairs
    made = whole_pass(model, donor.row)
    row = deepcopy(base.row)
    row.read(suffix.ids, suffix.positions[0] - row.following, len(suffix))
    # Each key of the donor is turned once, from where it was made to where the base's key stands.
    ours, theirs = list(pairs), list(pairs.values())
    turns = [row.positions[token] - donor.row.origins[twin] for token, twin in pairs.items()]
    plain, last = model.lanes.plain, len(row.starts) - 1

    def swapped(tensor: Tensor, donors: Tensor, layer: int, part: str) -> Tensor:
        tensor = tensor.clone()
        for cell, swap in enumerate(swaps):
            if layer in swap.layers and part in swap.part:
                tokens = [token for token in swap.tokens if token < tensor.shape[2]]
                heads = torch.tensor(swap.heads)[:, None]
                tensor[cell, heads, tokens] = donors[heads, [ours.index(token) for token in tokens]]
        return tensor

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **settings: Any
    ) -> tuple[Tensor, None]:
        layer, outputs = module.layer_idx, []
        groups = query.shape[1] // key.shape[1]
        donor_keys = _turned(plain, module, made.keys[layer][None, :, theirs], turns)[0]
        for number, (start, end) in enumerate(zip(row.starts, [*row.starts[1:], len(row.ids)], strict=True)):
            reading = row.readings[number]
            seen = _seen(reading, start, end, layer, settings.get("sliding_window")).repeat_interleave(groups, 0)
            keys, values = _turned(plain, module, key[:, :, :end], reading.turns), value[:, :, :end]
            output = _attended(query[:, :, start:end], keys, values, seen, scaling)
            if reads == "total" or number == last:
                keys = swapped(keys, donor_keys, layer, "K")
                values = swapped(values, made.values[layer][:, theirs], layer, "V")
                swapped_output = _attended(query[:, :, start:end], keys, values, seen, scaling)
                output = torch.where(_readers(swaps, output.shape), swapped_output, output)
            outputs.append(output)
        return torch.cat(outputs, 2).transpose(1, 2), None

    count = len(row.ids)
    with _attention(plain, attend), torch.no_grad():
        logits = plain(
            input_ids=torch.tensor([row.ids]).expand(len(swaps), -1),
            position_ids=torch.tensor([row.read_at]),
            attention_mask=torch.zeros(1, 1, count, count),  # kept by the oracle itself
            use_cache=False,
        ).logits
    return logits[:, -len(suffix) :]


def _attended(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """`[cells, heads, queries, d_head]`: what each query reads of those it sees."""
    groups = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights @ values.repeat_interleave(groups, 1)


def _readers(swaps: Sequence[Swap], shape: torch.Size) -> Tensor:
    """`[cells, heads, queries, 1]`: who sees what was swapped."""
    readers = torch.ones(*shape[:3], 1, dtype=torch.bool)
    for cell, swap in enumerate(swaps):
        if swap.query_heads is not None:
            readers[cell, [head for head in range(shape[1]) if head not in swap.query_heads]] = False
        if swap.queries is not None:
            readers[cell, :, [query for query in range(shape[2]) if query not in swap.queries]] = False
    return readers


def hooked_pass(
    model: Model, base: Run, donor: Run, suffix: Tokens, swaps: Sequence[Swap], pairs: Mapping[int, int] | None = None
) -> Tensor:
    """`[swaps, suffix tokens, vocabulary]` by `TransformerBridge.run_with_hooks` over prompt and suffix, no cache in
    sight.

    The prompts were read at one go and never edited, and the donor's keys stand at the base's positions. A swap's part
    is K, V, both, or a name of `kvprobe.models.lens.HOOKS`.
    """
    pairs = twins(base, donor) if pairs is None else pairs
    bridge = model.lanes.hooked.bridge
    tensors: dict[str, Tensor] = {}
    names = {name for swap in swaps for name in _hooks(swap)}

    def keep(name: str) -> Callable[..., None]:
        return lambda tensor, hook: tensors.__setitem__(name, tensor.clone())

    def write(name: str) -> Callable[..., Tensor]:
        def written(tensor: Tensor, hook: Any) -> Tensor:
            tensor = tensor.clone()
            for cell, swap in enumerate(swaps):
                if name in _hooks(swap):
                    for token in swap.tokens:
                        if tensor.dim() == 4:
                            heads = list(swap.heads)
                            tensor[cell, token, heads] = tensors[name][0, pairs[token], heads]
                        else:
                            tensor[cell, token] = tensors[name][0, pairs[token]]
            return tensor

        return written

    with torch.no_grad():
        bridge.run_with_hooks(
            torch.tensor([donor.row.ids]),
            fwd_hooks=[(name, keep(name)) for name in names],
            position_ids=torch.tensor([donor.row.read_at]),
        )
        assert set(tensors) == names
        ids = [*base.row.ids, *suffix.ids]
        logits = bridge.run_with_hooks(
            torch.tensor([ids]).expand(len(swaps), -1),
            fwd_hooks=[(name, write(name)) for name in names],
            position_ids=torch.tensor([[*base.row.read_at, *suffix.positions]]).expand(len(swaps), -1),
            return_type="logits",
        )
    return logits[:, -len(suffix) :]


def _hooks(swap: Swap) -> Iterator[str]:
    """The hooks at which a swap is made."""
    families: dict[str, tuple[Any, ...]] = {"K": ("k",), "V": ("v",), "KV": ("k", "v")}
    for layer in swap.layers:
        for family in families.get(swap.part, (swap.part,)):
            yield f"blocks.{layer}.{HOOKS[family]}"
