"""Patching along a subspace: of what the donor would write, only the part inside it, and the rest beside it.

A probe reads a layer's K (or V) of a slot along the directions of its weights. Swapping along them alone asks whether the
model reads there, too; the full swap beside it says how much there was to find, and the rest how much lies elsewhere
(Makelov et al. 2023, arXiv 2311.17030: a subspace patch alone can mislead).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing.caches import interchange
from kvprobe.erasing.subspace import Subspace

Along = Mapping[tuple[int, str], Float[Tensor, "directions width"] | Subspace]
"""A subspace by layer and part (`K` or `V`), over all KV heads of a slot: width is kv_heads × d. It is told by directions, which
need be neither orthogonal nor of length one, or by a `kvprobe.erasing` eraser, whose projection may be oblique. Where a layer or
part has none, nothing is swapped along it."""

CONTENTS = ("full", "along", "rest")


def contents(along: Along | None) -> tuple[str, ...]:
    """What each cell is swapped for."""
    return ("full",) if along is None else CONTENTS


def split(base: KVCache, other: KVCache, along: Along) -> dict[str, KVCache]:
    """The donor's cache in full, inside the subspaces only, and outside them only; the base elsewhere.

    Raises:
        UserError: a layer or part that does not exist, or directions of another width.
    """
    subspaces = {
        site: given if isinstance(given, Subspace) else Subspace.spanned(given) for site, given in along.items()
    }
    inside = interchange(base, other, subspaces, slots=torch.ones_like(base.ledger.padding))

    def beyond(own: tuple[Tensor, ...], theirs: tuple[Tensor, ...], near: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(mine + yours - between for mine, yours, between in zip(own, theirs, near, strict=True))

    keys = beyond(base.keys, other.keys, inside.keys)
    values = beyond(base.values, other.values, inside.values)
    return {"full": other, "along": inside, "rest": replace(base, keys=keys, values=values)}
