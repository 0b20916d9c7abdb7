"""Turning keys: moving a rotary key from the position at which it was computed to another, once and in fp32.

A rotary embedding multiplies pairs of a key's numbers by a rotation of angle position × frequency, so a key can be
moved to any position without the model. Moving it again and again would add up rounding (22 % after 200 moves in
bfloat16); kvprobe therefore stores keys as they were computed and turns them, from there, when they are read.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """How one layer's keys turn with position.

    Attributes:
        frequencies: radians per position of each pair of numbers, scaling (linear, Llama 3, YaRN) included.
        layout: whether a pair is (i, i + pairs), as in Llama, or (2i, 2i + 1), as in GPT-J. Numbers of a key beyond
            the pairs are not turned (partial rotary).
    """

    frequencies: Float[Tensor, "pairs"]
    layout: Layout = "half"


@dataclass(frozen=True)
class Rotation:
    """A rotation of every slot from one position to another; the same for all layers of one `Rotary`."""

    cos: Float[Tensor, "batch 1 slots pairs"]
    sin: Float[Tensor, "batch 1 slots pairs"]
    layout: Layout

    @classmethod
    def between(
        cls, rotary: Rotary, origins: Int[Tensor, "batch slots"], positions: Int[Tensor, "batch slots"]
    ) -> "Rotation":
        """The turn from `origins` to `positions`.

        Both angles are taken in fp32, as the model itself takes them, so that a turned key equals one computed at
        its new position even where fp32 no longer resolves the angle.
        """

        def angles(at: Tensor) -> Tensor:
            return (at[:, None, :, None].float() * rotary.frequencies).double()

        angle = angles(positions) - angles(origins)
        return cls(angle.cos().float(), angle.sin().float(), rotary.layout)

    def of(self, keys: Float[Tensor, "batch kv_heads slots d_head"]) -> Float[Tensor, "batch kv_heads slots d_head"]:
        """These keys, turned; in fp32, then in the keys' own dtype."""
        pairs = self.cos.shape[-1]
        turning, still = keys[..., : 2 * pairs].float(), keys[..., 2 * pairs :]
        if self.layout == "half":
            one, other = turning[..., :pairs], turning[..., pairs:]
        else:
            one, other = turning[..., 0::2], turning[..., 1::2]
        turned = (one * self.cos - other * self.sin, other * self.cos + one * self.sin)
        joined = torch.cat(turned, -1) if self.layout == "half" else torch.stack(turned, -1).flatten(-2)
        return torch.cat([joined.to(keys.dtype), still], -1) if still.shape[-1] else joined.to(keys.dtype)
