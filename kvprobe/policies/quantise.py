"""A quantised cache as in KIVI: keys per channel, values per token, the newest slots at full precision."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, Within
from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import QuantisationFormat
from kvprobe.cache.slots import Rounds
from kvprobe.errors import UserError
from kvprobe.policies.codes import Codes, codes_of_keys, codes_of_values
from kvprobe.policies.policy import Live, Policy, Scene


@dataclass(frozen=True)
class Quantise(Policy):
    """Round old slots to `bits` per number: keys in groups of `group` slots per channel, values in groups of `group`
    channels per slot. The last `tail` live slots keep full precision.

    Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv 2402.02750). Each group
    stores a scale and a minimum in float16. Slots are quantised once, in whole groups, when `group` of them have left
    the tail. So the tail holds `tail` to `tail + group − 1` slots; in KIVI values leave one by one. Keys are rounded as
    stored, after the rotary embedding. kvprobe holds the rounded numbers unpacked; `KVCache.footprint` gives their
    packed size.
    """

    bits: Annotated[int, Within(1, 8)]
    group: AtLeastOne = 32
    tail: AtLeastZero = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.provenance != "retained" or self.mode != "gapped":
            raise UserError("Quantise moves and recomputes nothing; give mode and provenance to another policy.")

    @property
    def slot_count(self) -> Rounds:
        return Rounds(self.bits, self.group, self.tail, self.every)

    def keep(self, scene: Scene) -> Live:
        return torch.ones_like(scene.live)

    def act(self, scene: Scene) -> Scene:
        cache, quantisation = scene.cache, QuantisationFormat(self.bits, self.group)
        if cache.ledger.quantisation not in (None, quantisation):
            raise UserError(
                f"The cache was quantised at {cache.ledger.quantisation}, which {self} cannot continue; use the same "
                f"bits and group."
            )
        leaving = {row: self._leaving(cache, row) for row in range(cache.batch) if row not in scene.ended}
        quantised = cache.ledger.quantised.clone()
        for row, slots in leaving.items():
            if slots.numel():
                numbers = int(quantised[row].max()) + 1 + torch.arange(len(slots), device=slots.device)
                quantised[row, slots.flatten()] = numbers.repeat_interleave(self.group)

        def rounded(tensor: Tensor, codes_of: Callable[[Tensor, QuantisationFormat], Codes]) -> Tensor:
            if not any(slots.numel() for slots in leaving.values()):
                return tensor
            # A copy of its own: rows of a fork share storage, and so do caches.
            written = tensor.clone(memory_format=torch.contiguous_format)
            for row, slots in leaving.items():
                if slots.numel():
                    written[row][:, slots] = codes_of(tensor[row][:, slots], quantisation).numbers().to(tensor.dtype)
            return written

        keys = tuple(rounded(tensor, codes_of_keys) for tensor in cache.keys)
        values = tuple(rounded(tensor, codes_of_values) for tensor in cache.values)
        ledger = replace(cache.ledger, quantised=quantised, quantisation=quantisation)
        return scene.with_cache(replace(cache.with_parts({"K": keys, "V": values}), ledger=ledger))

    def _leaving(self, cache: KVCache, row: int) -> Int[Tensor, "groups group"]:
        """Slots of this row that have left the tail and are not quantised yet, in whole groups."""
        live = cache.ledger.live_somewhere[row].nonzero()[:, 0]
        old = live[: max(0, len(live) - self.tail)]
        fine = old[cache.ledger.quantised[row, old] < 0]
        whole = len(fine) // self.group
        return fine[: whole * self.group].view(whole, self.group)
