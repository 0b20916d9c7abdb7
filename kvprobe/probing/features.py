"""What probes read: one vector per conversation and site. A site is a layer, a KV head or all side by side, and a
read-out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.models.lens import Family
from kvprobe.probing.splits import Split, centred_within, paired_features
from kvprobe.tasks.designs import Target

READS = ("mean", "last")
"""How a segment's slots become one vector: their mean, or the last one."""

_CHUNK_BYTES = 20_000_000


class Site(NamedTuple):
    """Where a probe reads.

    Attributes:
        layer: whose K, V or residual stream.
        head: KV head, or None where heads are side by side or there are none.
        read: how a segment's slots become one vector: `mean`, `last`, or `slot` for a design of single slots.
    """

    layer: int
    head: int | None
    read: str


@dataclass(frozen=True)
class Features:
    """What probes read of every sample, and what they are to recover.

    Attributes:
        tensors: by family.
        sites: by family, in the order of its tensor.
        rows: which row each sample reads; several may read the same.
        labels: class numbers.
        contexts: number of each sample's context.
        texts: the tokens that each sample's vectors were read from.
    """

    tensors: Mapping[Family, Float[Tensor, "rows sites dim"]]
    sites: Mapping[Family, tuple[Site, ...]]
    rows: Int[np.ndarray, "samples"]
    labels: Int[Tensor, "targets samples"]
    contexts: Int[np.ndarray, "samples"]
    target: Target
    texts: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of_read_outs(
        cls,
        tensors: Mapping[Family, Float[Tensor, "rows layers reads dim"]],
        rows: Int[np.ndarray, "samples"],
        labels: Int[Tensor, "targets samples"],
        contexts: Int[np.ndarray, "samples"],
        target: Target,
        texts: tuple[tuple[int, ...], ...] | None = None,
    ) -> "Features":
        """Features from what `read_outs` returned, heads side by side."""
        sites: dict[Family, tuple[Site, ...]] = {
            family: tuple(Site(layer, None, read) for layer in range(tensor.shape[1]) for read in READS)
            for family, tensor in tensors.items()
        }
        flat: dict[Family, Tensor] = {family: tensor.flatten(1, 2) for family, tensor in tensors.items()}
        return cls(flat, sites, rows, labels, contexts, target, texts)

    @property
    def family_sites(self) -> tuple[tuple[Family, Site], ...]:
        """Family and site of every probe, in order."""
        pairs: list[tuple[Family, Site]] = [(family, site) for family in self.tensors for site in self.sites[family]]
        return tuple(pairs)

    @property
    def at_once(self) -> int | None:
        """How many batches to work on at once: one on a GPU, whose memory a batch may fill; None for as many as there
        are threads."""
        return 1 if any(tensor.is_cuda for tensor in self.tensors.values()) else None

    def batches(self, split: Split) -> "Iterator[Batch]":
        """A few sites at a time, to limit memory, in the order of `family_sites`: what they read (centred within
        context for the paired split), and its root mean square before that."""
        for tensor in self.tensors.values():
            rows = torch.from_numpy(self.rows).to(tensor.device)
            chunk = max(1, _CHUNK_BYTES // (8 * len(rows) * tensor.shape[2]))
            for part in tensor.split(chunk, 1):
                seen = part[rows]
                size = seen.square().mean((0, 2)).sqrt()
                if split == "paired":
                    seen = centred_within(seen, self.contexts)
                yield seen.transpose(0, 1).contiguous(), size

    def at(self, family: Family, site: Site, split: Split = "random") -> Float[Tensor, "1 samples dim"]:
        """What the probe at one site reads: centred within context for the paired split, with round-off set to zero."""
        seen = self.tensors[family][:, self.sites[family].index(site)][torch.from_numpy(self.rows)][None]
        return paired_features(seen, self.contexts) if split == "paired" else seen


Batch = tuple[Float[Tensor, "probes samples dim"], Float[Tensor, "probes"]]
"""What probes read at a few sites of a family, and its root mean square."""


def read_outs(stacked: Tensor) -> Float[Tensor, "rows layers reads dim"]:
    """Captured layers of a family as one vector per row and layer, KV heads side by side: the mean over the slots,
    and the last slot.

    Args:
        stacked: `[layers, rows, kv_heads, slots, d_head]` or `[layers, rows, slots, d_model]`.
    """
    vectors = stacked.float()
    if vectors.dim() == 5:
        vectors = vectors.permute(0, 1, 3, 2, 4).flatten(3)
    return torch.stack([vectors.mean(2), vectors[:, :, -1]], 2).transpose(0, 1)
