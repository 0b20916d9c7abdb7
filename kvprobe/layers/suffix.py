"""A suffix read after a cache: what each component adds to the residual stream, and the same with some replaced.

Every replacement is a row of one pass. Rows share the cache, which is not copied, and join the pass at the first layer
at which they differ from the run without replacements (see `kvprobe.patching.rows`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.capture import Edit, editing, plain_ports
from kvprobe.inference.forward import as_seen
from kvprobe.models.attending import Attend, Attending
from kvprobe.models.hooks import Hook, hooked
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import Family
from kvprobe.models.ports import Port
from kvprobe.patching.reader import Reader
from kvprobe.patching.rows import BYTES, ROWS, Rows, forward, joining
from kvprobe.text.tokens import Tokens

Kind = Literal["attn", "mlp", "head"]
BLOCKS: Mapping[Kind, Family] = {"attn": "attn_out", "mlp": "mlp_out"}
_BESIDE: Mapping[Family, Family] = {"attn_out": "mlp_out", "mlp_out": "attn_out"}
"""A layer may have one of the two alone (Nemotron-H)."""


@dataclass(frozen=True, order=True)
class Component:
    """An attention block, an MLP, or one head."""

    kind: Kind
    layer: int
    head: int | None = None


@dataclass(frozen=True)
class Outputs:
    """What one run computes over a suffix.

    Attributes:
        hidden: the residual stream before each block, and after the last.
        attn: what each attention block adds to it, or block that keeps a state, after any norm of its own; zeros where
            there is none.
        mlp: likewise.
        heads: by layer that attends, what each head reads, before W_O.
        logits: after the suffix's last tokens.
    """

    hidden: Float[Tensor, "layers_and_last queries d_model"]
    attn: Float[Tensor, "layers queries d_model"]
    mlp: Float[Tensor, "layers queries d_model"]
    heads: Mapping[int, Float[Tensor, "heads queries d_value"]]
    logits: Float[Tensor, "kept vocab"]

    @property
    def silent(self) -> "Outputs":
        """The same with components that add nothing."""
        heads = {layer: torch.zeros_like(output) for layer, output in self.heads.items()}
        return replace(self, attn=torch.zeros_like(self.attn), mlp=torch.zeros_like(self.mlp), heads=heads)


@dataclass(frozen=True)
class Replacement:
    """One row: the outputs of these components are those of another run."""

    components: tuple[Component, ...]
    outputs: Outputs = field(repr=False)


class Suffix:
    """A suffix to be read after a cache of one row.

    Raises:
        UserError: the plain model has no module whose output is what its attention or its MLP adds to the residual
            stream.
    """

    def __init__(self, lanes: Lanes, cache: KVCache, suffix: Tokens) -> None:
        self.lanes, self.reader = lanes, Reader(lanes, as_seen(lanes, cache), {}, suffix)
        self.layers, own = range(len(lanes.blocks)), lanes.own_ports
        families: tuple[Family, ...] = ("resid_pre", "resid_post", *BLOCKS.values())
        if own is None:
            ports = plain_ports(lanes, dict.fromkeys(families, self.layers))
        else:
            ports = {place: own.get(place) for place in product(families, self.layers)}
        for (family, layer), port in ports.items():
            other = ports.get((_BESIDE[family], layer)) if own and family in _BESIDE else None
            if port is None and other is None:
                raise UserError(
                    f"{type(lanes.plain).__name__} has no module whose output is {family!r} of layer {layer} as it is "
                    "added to the residual stream (Granite scales it on the way), so components cannot be restored "
                    "one by one; patch K and V with patch_sweep instead."
                )
        self.ports = {place: port for place, port in ports.items() if port is not None}

    @property
    def components(self) -> list[Component]:
        """Attention blocks (or blocks that keep a state), MLPs and heads of each layer, as far as it has them."""
        geometry, components = self.lanes.geometry, list[Component]()
        for layer in self.layers:
            components += [Component(kind, layer) for kind, family in BLOCKS.items() if (family, layer) in self.ports]
            heads = range(geometry.n_heads if layer in geometry.attending else 0)
            components += [Component("head", layer, head) for head in heads]
        return components

    def outputs(self, kept: int = 1) -> Outputs:
        """Read the suffix, and record what every component adds."""
        layers = self.layers
        heads: dict[int, Tensor] = {}
        recorded: dict[tuple[Family, int], Tensor] = {}

        def attend(attending: Attending) -> Tensor:
            output = self.reader.attention(attending)
            heads[attending.layer] = output[0]
            return output

        def record(key: tuple[Family, int], tensor: Tensor) -> Tensor:
            recorded[key] = tensor[0].clone()
            return tensor

        with editing(self.lanes, [(port, partial(record, key)) for key, port in self.ports.items()]):
            logits = self._clean(attend, kept)
        before = [recorded["resid_pre", layer] for layer in layers]
        hidden = torch.stack([*before, recorded["resid_post", layers[-1]]])
        none = torch.zeros_like(hidden[0])
        attn, mlp = (torch.stack([recorded.get((family, at), none) for at in layers]) for family in BLOCKS.values())
        self._refuse_other_sums(hidden, attn + mlp)
        return Outputs(hidden, attn, mlp, heads, logits)

    def _clean(self, attend: Attend, kept: int) -> Float[Tensor, "kept vocab"]:
        """Read the suffix in one row."""
        ordinary, new = self.reader.ordinary(kept), self.reader.new
        with (
            torch.no_grad(),
            self.lanes.attention_replaced_by(attend),
            self.reader.memories.given(Rows([]), {}) as memories,
        ):
            return forward(self.lanes, new.tokens, new.positions, ordinary, memories)[0]

    def _refuse_other_sums(
        self,
        hidden: Float[Tensor, "layers_and_last queries d_model"],
        added: Float[Tensor, "layers queries d_model"],
    ) -> None:
        """Refuse a model whose blocks do not add the sum of their attention's and MLP's outputs to the stream."""
        sums, allowed = hidden[:-1] + added, 1e-4 if self.lanes.dtype == torch.float32 else 0.05
        off = float((hidden[1:] - sums).float().norm() / hidden.float().norm())
        if not off <= allowed and not self._read_within(sums, allowed):
            raise UserError(
                f"The blocks of {type(self.lanes.plain).__name__} add something else to the residual stream than the "
                f"outputs of their attention and MLP (off by {off:.1e}), so components cannot be restored one by one; "
                "patch K and V with patch_sweep instead."
            )

    def _read_within(self, sums: Float[Tensor, "layers queries d_model"], allowed: float) -> bool:
        """Whether a module of each block reads the sum, as in blocks that then add what they make of it (Gemma 4)."""
        off = [torch.inf] * len(sums)

        def compare(layer: int, module: object, args: Sequence[object], keywords: Mapping[str, object]) -> None:
            for read in (*args, *keywords.values()):
                if isinstance(read, Tensor) and read.shape == sums[layer][None].shape:
                    apart = (read[0] - sums[layer]).float().norm() / sums[layer].float().norm()
                    off[layer] = min(off[layer], float(apart))

        blocks = enumerate(self.lanes.blocks)
        hooks: list[Hook] = [(part, "input", partial(compare, at)) for at, block in blocks for part in block.children()]
        with hooked(hooks):
            self._clean(self.reader.attention, 1)
        return max(off) <= allowed

    def replaced(self, rows: Sequence[Replacement], kept: int = 1) -> Iterator[Float[Tensor, "kept vocab"]]:
        """Logits after the suffix's last tokens with each replacement, in order, as they become known."""
        at_once = self.at_once(kept)
        for start in range(0, len(rows), at_once):
            yield from self._pass(rows[start : start + at_once], kept)

    def at_once(self, kept: int) -> int:
        """Most replacements to a pass."""
        # Twice a row's logits: they are copied when they are put in order.
        vocabulary = cast(nn.Linear, self.lanes.plain.get_output_embeddings()).weight.shape[0]
        logits = 8 * kept * vocabulary
        return max(1, min(ROWS, BYTES // (self.reader.row_bytes([]) + logits)) - 1)

    def _pass(self, rows: Sequence[Replacement], kept: int) -> Float[Tensor, "rows kept vocab"]:
        places = Rows([min(component.layer for component in replacement.components) for replacement in rows])
        present: dict[tuple[Kind, int], list[tuple[int, Component, Outputs]]] = defaultdict(list)
        for row, replacement in zip(places.numbers, rows, strict=True):
            for component in replacement.components:
                present[component.kind, component.layer].append((row, component, replacement.outputs))

        def attend(attending: Attending) -> Tensor:
            output = self.reader.attention(attending)
            for row, component, other in present.get(("head", attending.layer), []):
                output[row, component.head] = other.heads[attending.layer][component.head]
            return output

        ordinary = self.reader.ordinary(kept)
        writes = [self._writing(kind, layer, present[kind, layer]) for kind, layer in present if kind in BLOCKS]
        with (
            torch.no_grad(),
            self.lanes.attention_replaced_by(attend),
            joining(self.lanes.blocks, places.joining),
            editing(self.lanes, writes),
            self.reader.memories.given(places, {}) as memories,
        ):
            logits = forward(self.lanes, self.reader.new.tokens, self.reader.new.positions, ordinary, memories)
        return places.in_order(logits)[1:]

    def _writing(self, kind: Kind, layer: int, entries: Sequence[tuple[int, Component, Outputs]]) -> tuple[Port, Edit]:
        """For `editing`: rows that replace this block's output have the other run's."""
        rows = torch.tensor([row for row, _, _ in entries], device=self.lanes.device)
        outputs = torch.stack([(other.attn if kind == "attn" else other.mlp)[layer] for _, _, other in entries])

        def write(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            tensor[rows] = outputs
            return tensor

        return self.ports[BLOCKS[kind], layer], write
