"""Rotating keys: moving a rotary key from the position at which it was computed to another, once and in fp32.

A rotary embedding multiplies pairs of a key's numbers by a rotation of angle position × frequency, so a key can be
moved to any position without the model. Moving it again and again would add up rounding errors (22 % after 200 moves in
bfloat16). kvprobe therefore stores keys as they were computed, and rotates them from there when they are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """How one layer's keys rotate with position.

    Attributes:
        frequencies: radians per position of each pair of numbers, scaling (linear, Llama 3, YaRN) included.
        layout: whether a pair is (i, i + pairs), as in Llama, or (2i, 2i + 1), as in GPT-J. Numbers of a key beyond
            the pairs are not rotated (partial rotary).
        last: whether the pairs are the last numbers of a key, not the first (the index of HY V4).
    """

    frequencies: Float[Tensor, "pairs"]
    layout: Layout = "half"
    last: bool = False

    def paired(self, keys: Float[Tensor, "*slots d_head"]) -> Complex[Tensor, "*slots pairs"]:
        """Each pair of numbers as a complex one, which turns by a factor; then those that do not turn, as real ones."""
        turning = 2 * len(self.frequencies)
        both = keys[..., -turning:] if self.last else keys[..., :turning]
        still = keys[..., :-turning] if self.last else keys[..., turning:]
        one, other = both.chunk(2, -1) if self.layout == "half" else (both[..., 0::2], both[..., 1::2])
        return torch.complex(torch.cat([one, still], -1), torch.cat([other, torch.zeros_like(still)], -1))


Rotaries = Sequence[Mapping[str, Rotary | None]]
"""How the keys of each layer turn with position, by part; None where they do not."""


@dataclass(frozen=True)
class Rotation:
    """A rotation of every slot from one position to another; the same for all layers of one `Rotary`."""

    cos: Float[Tensor, "batch 1 slots pairs"]
    sin: Float[Tensor, "batch 1 slots pairs"]
    layout: Layout
    last: bool

    @classmethod
    def between(
        cls, rotary: Rotary, origins: Int[Tensor, "batch slots"], positions: Int[Tensor, "batch slots"]
    ) -> "Rotation":
        """The rotation from `origins` to `positions`.

        Both angles are computed in fp32, as in the model itself, so that a rotated key equals one computed at its new
        position even where fp32 no longer resolves the angle.
        """

        def angles(at: Tensor) -> Tensor:
            return (at[:, None, :, None].float() * rotary.frequencies.to(at.device)).double()

        angle = angles(positions) - angles(origins)
        return cls(angle.cos().float(), angle.sin().float(), rotary.layout, rotary.last)

    def of(self, keys: Float[Tensor, "batch kv_heads slots d_head"]) -> Float[Tensor, "batch kv_heads slots d_head"]:
        """These keys, rotated in fp32 and returned in their own dtype."""
        pairs = self.cos.shape[-1]
        if self.last:
            first, last = keys[..., : -2 * pairs], keys[..., -2 * pairs :]
            return torch.cat([first, replace(self, last=False).of(last)], -1)
        paired, unpaired = keys[..., : 2 * pairs].float(), keys[..., 2 * pairs :]
        if self.layout == "half":
            one, other = paired[..., :pairs], paired[..., pairs:]
        else:
            one, other = paired[..., 0::2], paired[..., 1::2]
        rotated = (one * self.cos - other * self.sin, other * self.cos + one * self.sin)
        joined = torch.cat(rotated, -1) if self.layout == "half" else torch.stack(rotated, -1).flatten(-2)
        return torch.cat([joined.to(keys.dtype), unpaired], -1) if unpaired.shape[-1] else joined.to(keys.dtype)
