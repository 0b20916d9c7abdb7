"""Patching along a subspace: of what the donor would write, only the part inside it, or only the part outside.

A probe reads a layer's K (or V) of a slot along the directions of its weights. Swapping along them alone asks whether
the model reads there too. The full swap shows how much there was to find, and the rest how much lies elsewhere (Makelov
et al. 2023, arXiv 2311.17030: a subspace patch alone can mislead).
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache, combined
from kvprobe.erasing.caches import LayerPart, interchange
from kvprobe.erasing.subspace import Subspace
from kvprobe.errors import UserError
from kvprobe.patching.grid import hooked_parts

Along = Mapping[LayerPart | str, Float[Tensor, "directions width"] | Subspace]
"""A subspace by layer and part (`K` or `V`), or by TransformerLens' name of that site, over all KV heads of a slot:
width is kv_heads × d. It is given by directions, which need not be orthogonal or of length one, or by a
`kvprobe.erasing` eraser, whose projection may be oblique. Where a layer or part has none, nothing is swapped along
it."""

CONTENTS = ("full", "along", "rest")


def contents(along: Along | None) -> tuple[str, ...]:
    """What a cell may hold: the donor's vectors in full, or also their parts along a subspace and outside it."""
    return ("full",) if along is None else CONTENTS


def split(base: KVCache, other: KVCache, along: Along) -> dict[str, KVCache]:
    """The donor's cache in full, inside the subspaces only, and outside them only; the base elsewhere.

    Raises:
        UserError: a layer or part that does not exist, or directions of another width.
    """
    subspaces = {
        _layer_part(name): subspace if isinstance(subspace, Subspace) else Subspace.spanned(subspace)
        for name, subspace in along.items()
    }
    inside = interchange(base, other, subspaces, slots=torch.ones_like(base.ledger.padding))
    rest = combined((base, other, inside), lambda held: held[0] + held[1] - held[2], inside.ledger)
    return {"full": other, "along": inside, "rest": rest}


def _layer_part(name: LayerPart | str) -> LayerPart:
    """The layer and part of a key of `Along`."""
    if not isinstance(name, str):
        return name
    hooked = hooked_parts([name])
    if hooked is None:
        raise UserError(f"{name!r} is no layer and part; give (3, 'V'), or the name of a hook, 'blocks.3.attn.hook_v'.")
    return hooked[0]
