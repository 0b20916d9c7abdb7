"""Patching along a subspace: of what the donor would write, only the part along given directions, and the rest beside it.

A probe reads a layer's K (or V) of a slot along the directions of its weights. Swapping along them alone asks whether the
model reads there, too; the full swap beside it says how much there was to find, and the rest how much lies elsewhere
(Makelov et al. 2023, arXiv 2311.17030: a subspace patch alone can mislead).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache import KVCache

Along = Mapping[tuple[int, str], Float[Tensor, "directions width"]]
"""Directions by layer and part (`K` or `V`), each over all KV heads of a slot: width is kv_heads × d. They need be neither
orthogonal nor of length one. Where a layer or part has none, nothing is swapped along them."""

CONTENTS = ("full", "along", "rest")


def contents(along: Along | None) -> tuple[str, ...]:
    """What each cell is swapped for."""
    return ("full",) if along is None else CONTENTS


def split(base: KVCache, other: KVCache, along: Along) -> dict[str, KVCache]:
    """The donor's cache in full, along the directions only, and outside them only; the base elsewhere.

    Raises:
        ValueError: a layer or part that does not exist, or directions of another width.
    """
    for (layer, part), directions in along.items():
        if part not in ("K", "V") or not 0 <= layer < base.n_layers:
            raise ValueError(
                f"There is no {part!r} at layer {layer}; give directions for K or V of layers 0 to {base.n_layers - 1}."
            )
        width = base.n_kv_heads * (base.keys if part == "K" else base.values)[layer].shape[3]
        if directions.dim() != 2 or directions.shape[1] != width:
            raise ValueError(
                f"The directions for {part} of layer {layer} have shape {tuple(directions.shape)}; expected (any, {width}), which "
                f"is KV heads × numbers to a head."
            )

    def toward(part: str, own: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            mine + _projected(yours - mine, along.get((layer, part)))
            for layer, (mine, yours) in enumerate(zip(own, theirs, strict=True))
        )

    keys = toward("K", base.keys, other.keys)
    values = toward("V", base.values, other.values)

    def beyond(own: tuple[Tensor, ...], theirs: tuple[Tensor, ...], near: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(mine + yours - inside for mine, yours, inside in zip(own, theirs, near, strict=True))

    rest = replace(base, keys=beyond(base.keys, other.keys, keys), values=beyond(base.values, other.values, values))
    return {"full": other, "along": replace(base, keys=keys, values=values), "rest": rest}


def _projected(
    change: Float[Tensor, "1 kv_heads slots d"], directions: Float[Tensor, "directions width"] | None
) -> Float[Tensor, "1 kv_heads slots d"]:
    """The part of a change that lies in the span of these directions."""
    if directions is None:
        return torch.zeros_like(change)
    _, heads, slots, width = change.shape
    vectors = change[0].transpose(0, 1).reshape(slots, heads * width)
    _, singular, right = torch.linalg.svd(directions.to(change).float(), full_matrices=False)
    basis = right[singular > 1e-6 * singular.max()]
    inside = (vectors.float() @ basis.T) @ basis
    return inside.view(slots, heads, width).transpose(0, 1)[None].to(change.dtype)
