"""Variants of one conversation: how K and V of its slots vary with what differs between them, and erasers of that.

Only how they vary is kept: each slot's average over the variants is taken off, and kept beside it. So what is erased
is what a paired probe reads, and a slot from which all is erased holds its conversation's average.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing.inlp import inlp
from kvprobe.erasing.leace import leace_of
from kvprobe.erasing.subspace import Eraser
from kvprobe.inference.model import Model
from kvprobe.probing.gram import Moments, one_hot_answers
from kvprobe.studies.use.checks import Samples
from kvprobe.text.tokens import Tokens

PARTS = ("K", "V")


def read_variants(
    model: Model,
    rows: Sequence[Tokens],
    places: Mapping[str, range],
    labels: Int[Tensor, "targets variants"],
    *,
    apart: Collection[str] = (),
    batch: int = 32,
) -> dict[str, Tensor]:
    """K and V at places of one conversation with each of its variants.

    Args:
        rows: the variants, of the same tokens before the first place.
        places: their slots, one place next to the other.
        labels: what distinguishes the variants, as class numbers.
        apart: places whose slots are kept each by itself; of the others the mean over slots is.
        batch: variants that are read side by side.

    Returns:
        `labels`; and by part (`K`, `V`), KV heads side by side: `average.K` `[layers, slots, width]` over the variants,
        of the slots of all places; by place apart, `PLACE.K` `[layers, variants, slots, width]`; by other place,
        `PLACE.K` `[layers, variants, width]`, and `PLACE.gram.K` `[layers, width, width]`, the mean over its slots of
        their second moments, summed over variants. All but the averages are centred: the average is taken off.
    """
    start, stop = min(slots.start for slots in places.values()), max(slots.stop for slots in places.values())
    prefix = model.prefill(rows[0][:start])
    pieces = [
        model.capture([row[start:stop] for row in rows[first : first + batch]], ("k", "v"), past=prefix)
        for first in range(0, len(rows), batch)
    ]
    tensors = {"labels": labels}
    for part, family in zip(PARTS, ("k", "v"), strict=True):
        # layers, variants, slots, width
        vectors = torch.cat([piece.stack(family) for piece in pieces], 1).float().transpose(2, 3).flatten(3)
        average = vectors.mean(1)
        vectors = vectors - average[:, None]
        tensors[f"average.{part}"] = average
        for place, slots in places.items():
            of_place = vectors[:, :, slots.start - start : slots.stop - start]
            if place in apart:
                tensors[f"{place}.{part}"] = of_place
            else:
                tensors[f"{place}.{part}"] = of_place.mean(2)
                tensors[f"{place}.gram.{part}"] = torch.einsum("lcsi,lcsj->lij", of_place, of_place) / len(slots)
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


def average_cache(base: KVCache, read: Mapping[str, Tensor], start: int) -> KVCache:
    """One variant's cache with the average over variants in each slot that `read_variants` read, from `start` on."""

    def averaged(tensors: tuple[Tensor, ...], average: Float[Tensor, "layers slots width"]) -> tuple[Tensor, ...]:
        averages = []
        for tensor, of_layer in zip(tensors, average.to(tensors[0].device), strict=True):
            filled = tensor.clone()
            heads = of_layer.unflatten(1, (tensor.shape[1], tensor.shape[3])).transpose(0, 1)
            filled[0, :, start : start + len(of_layer)] = heads.to(tensor.dtype)
            averages.append(filled)
        return tuple(averages)

    return base.with_parts({"K": averaged(base.keys, read["average.K"]), "V": averaged(base.values, read["average.V"])})


@dataclass(frozen=True)
class VariantReads:
    """Several conversations, each with what `read_variants` gave; a sample is a variant of one of them."""

    reads: Sequence[Mapping[str, Tensor]]

    @property
    def labels(self) -> Int[Tensor, "targets samples"]:
        return torch.cat([read["labels"] for read in self.reads], 1)

    @property
    def conversations(self) -> Int[Tensor, "samples"]:
        """The number of each sample's conversation."""
        counts = torch.tensor([read["labels"].shape[1] for read in self.reads])
        return torch.arange(len(counts)).repeat_interleave(counts)

    def features(self, place: str, part: str, slot: int | None = None) -> Float[Tensor, "layers samples width"]:
        """What one slot of a place holds whose slots are kept apart, or a place on average over its slots."""
        vectors = torch.cat([read[f"{place}.{part}"] for read in self.reads], 1)
        return vectors if slot is None else vectors[:, :, slot]

    def samples(self, place: str, part: str, slot: int | None = None) -> Samples:
        """What probes read there, and all labels; or in a slot by itself the label of the same number."""
        labels = self.labels if slot is None else self.labels[slot : slot + 1]
        return Samples(self.features(place, part, slot), labels, self.conversations)

    def erasers(
        self,
        place: str,
        part: str,
        slot: int | None,
        labels: Int[Tensor, "targets samples"],
        classes: int,
        shrinkage: float = 0.0,
    ) -> tuple[Eraser, Eraser]:
        """Those of LEACE and of INLP, for all layers; the last third of the conversations says when INLP ends.

        Where the slots of a place share an eraser, LEACE takes every slot for a sample. What covaries with the labels
        is the same for slots as for their mean, so that the mean is guarded too; only the metric of least change
        differs.
        """
        vectors = self.features(place, part, slot)
        moments = Moments.of(vectors.double(), one_hot_answers(labels, classes, torch.float64))
        if slot is None:
            gram = torch.stack([read[f"{place}.gram.{part}"].double() for read in self.reads]).sum(0)
            moments = replace(moments, gram=gram)
        count = len(self.reads)
        held_out = self.conversations >= count - max(1, count // 3)
        return leace_of(moments, shrinkage), inlp(vectors, labels, classes, held_out)
