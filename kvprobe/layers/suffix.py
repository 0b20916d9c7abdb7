"""A suffix read after a cache: what each component adds on the way, and the same suffix with some of it replaced.

Every replacement is a row of one pass. Rows share the cache, which is not copied, and join the pass at the first layer in
which they differ from the run without any (see `kvprobe.patching.reader`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.capture import Site, editing, plain_sites
from kvprobe.inference.forward import as_seen
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import Family
from kvprobe.patching.patch_sweep import BYTES, ROWS
from kvprobe.patching.reader import Reader, attention, forward, joining
from kvprobe.text.transcript import Tokens

Kind = Literal["attn", "mlp", "head"]
BLOCKS: Mapping[Kind, Family] = {"attn": "attn_out", "mlp": "mlp_out"}


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
        attn: what each attention block adds to it, after any norm of its own.
        mlp: likewise.
        heads: what each head reads, before W_O.
        logits: after the suffix's last tokens.
    """

    hidden: Float[Tensor, "layers_and_last queries d_model"]
    attn: Float[Tensor, "layers queries d_model"]
    mlp: Float[Tensor, "layers queries d_model"]
    heads: Float[Tensor, "layers heads queries d_value"]
    logits: Float[Tensor, "kept vocab"]

    @property
    def silent(self) -> "Outputs":
        """The same with components that add nothing."""
        return replace(
            self,
            attn=torch.zeros_like(self.attn),
            mlp=torch.zeros_like(self.mlp),
            heads=torch.zeros_like(self.heads),
        )


@dataclass(frozen=True)
class Replacement:
    """One row: the outputs of these components are those of another run."""

    components: tuple[Component, ...]
    outputs: Outputs = field(repr=False)

    @property
    def first(self) -> int:
        return min(component.layer for component in self.components)


class Suffix:
    """A suffix to be read after a cache of one row.

    Raises:
        UserError: the plain model has no module that gives out what its attention or its MLP adds.
    """

    def __init__(self, lanes: Lanes, cache: KVCache, suffix: Tokens) -> None:
        self.lanes, self.reader = lanes, Reader(lanes, as_seen(lanes, cache), {}, suffix)
        families: tuple[Family, ...] = ("resid_pre", "resid_post", *BLOCKS.values())
        self.sites: dict[tuple[Family, int], Site] = {}
        for (family, layer), site in plain_sites(lanes, families, range(lanes.geometry.n_layers)).items():
            if site is None:
                raise UserError(
                    f"{type(lanes.plain).__name__} has no module that gives out {family!r} of layer {layer} as it is added to the "
                    f"residual stream (Granite scales it on the way), so components cannot be restored one by one; patch K and V "
                    f"with patch_sweep instead."
                )
            self.sites[family, layer] = site

    def outputs(self, kept: int = 1) -> Outputs:
        """Read the suffix, and keep what every component adds."""
        lanes, layers = self.lanes, range(self.lanes.geometry.n_layers)
        heads: dict[int, Tensor] = {}
        seen: dict[tuple[Family, int], Tensor] = {}

        def attend(given: Attending) -> Tensor:
            found = self._attention(given)
            heads[given.layer] = found[0]
            return found

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(lanes.attention_replaced_by(attend))
            for site, place in self.sites.items():

                def keep(tensor: Tensor, site: tuple[Family, int] = site) -> Tensor:
                    seen[site] = tensor[0].clone()
                    return tensor

                stack.enter_context(editing(lanes, place, keep))
            logits = forward(lanes, self.reader.new.tokens, self.reader.new.positions, kept)[0]
        hidden = [seen["resid_pre", layer] for layer in layers] + [seen["resid_post", layers[-1]]]
        attn, mlp = (torch.stack([seen[family, layer] for layer in layers]) for family in BLOCKS.values())
        self._refuse_other_sums(torch.stack(hidden), attn + mlp)
        return Outputs(torch.stack(hidden), attn, mlp, torch.stack([heads[layer] for layer in layers]), logits)

    def _refuse_other_sums(
        self,
        hidden: Float[Tensor, "layers_and_last queries d_model"],
        added: Float[Tensor, "layers queries d_model"],
    ) -> None:
        """Refuse a model whose blocks add something else to the residual stream than their attention and MLP give out."""
        off = float((hidden[1:] - hidden[:-1] - added).float().norm() / hidden.float().norm())
        if not off <= (1e-4 if self.lanes.dtype == torch.float32 else 0.05):
            raise UserError(
                f"The blocks of {type(self.lanes.plain).__name__} add something else to the residual stream than their attention "
                f"and MLP give out (off by {off:.1e}), so components cannot be restored one by one; patch K and V with "
                f"patch_sweep instead."
            )

    def replaced(self, rows: Sequence[Replacement], kept: int = 1) -> Iterator[Float[Tensor, "kept vocab"]]:
        """Logits after the suffix's last tokens with each replacement, in order, as they become known."""
        # A row's logits, once more while they are put in order.
        logits = 8 * kept * self.lanes.plain.get_output_embeddings().weight.shape[0]
        at_once = max(1, min(ROWS, BYTES // (self.reader.row_bytes([]) + logits)) - 1)
        for start in range(0, len(rows), at_once):
            yield from self._pass(rows[start : start + at_once], kept)

    def _pass(self, rows: Sequence[Replacement], kept: int) -> Float[Tensor, "rows kept vocab"]:
        order = sorted(range(len(rows)), key=lambda number: rows[number].first)
        joining_at: dict[int, int] = defaultdict(int)
        present: dict[tuple[Kind, int], list[tuple[int, Component, Outputs]]] = defaultdict(list)
        for place, number in enumerate(order, start=1):
            joining_at[rows[number].first] += 1
            for component in rows[number].components:
                present[component.kind, component.layer].append((place, component, rows[number].outputs))

        def attend(given: Attending) -> Tensor:
            found = self._attention(given)
            for place, component, outputs in present.get(("head", given.layer), []):
                found[place, component.head] = outputs.heads[given.layer, component.head]
            return found

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.lanes.attention_replaced_by(attend))
            stack.enter_context(joining(self.lanes.blocks, joining_at))
            for kind in BLOCKS:
                for layer in range(self.lanes.geometry.n_layers):
                    if entries := present.get((kind, layer)):
                        stack.enter_context(self._writing(kind, layer, entries))
            found = forward(self.lanes, self.reader.new.tokens, self.reader.new.positions, kept)
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(1, len(order) + 1)
        return found[back.to(found.device)]

    @contextmanager
    def _writing(self, kind: Kind, layer: int, entries: Sequence[tuple[int, Component, Outputs]]) -> Iterator[None]:
        """While this lasts, rows that replace this block's output have the other run's."""
        places = torch.tensor([place for place, _, _ in entries], device=self.lanes.device)
        theirs = torch.stack([(other.attn if kind == "attn" else other.mlp)[layer] for _, _, other in entries])

        def write(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            tensor[places] = theirs
            return tensor

        with editing(self.lanes, self.sites[BLOCKS[kind], layer], write):
            yield

    def _attention(self, given: Attending) -> Float[Tensor, "rows heads queries d_value"]:
        base, layer = self.reader.base, given.layer
        return attention(given, base.keys[layer][0], base.values[layer][0], self.reader.seen(layer))
