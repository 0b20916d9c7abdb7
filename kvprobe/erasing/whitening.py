"""Whitening: coordinates in which features have unit variance in every direction in which they vary at all."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.probing.ridge import VARIANCE_FLOOR


@dataclass(frozen=True)
class Whitening:
    """The symmetric root of a covariance and its pseudo-inverse, in fp64.

    Attributes:
        axes: eigenvectors of the covariance, one a column.
        varies: which of them the features vary along, beyond round-off.
    """

    whiten: Float[Tensor, "sites dim dim"]
    unwhiten: Float[Tensor, "sites dim dim"]
    axes: Float[Tensor, "sites dim dim"]
    varies: Bool[Tensor, "sites dim"]

    @classmethod
    def of(cls, covariance: Float[Tensor, "sites dim dim"], mean: Float[Tensor, "sites dim"]) -> "Whitening":
        """Of features with this covariance and mean; variation below `VARIANCE_FLOOR` of their size counts as none."""
        covariance, mean = covariance.double(), mean.double()
        variance, axes = torch.linalg.eigh(covariance)
        size = covariance.diagonal(dim1=1, dim2=2).mean(1) + mean.square().mean(1)
        round_off = torch.finfo(torch.float32).eps * variance[:, -1]
        varies = variance > torch.maximum(VARIANCE_FLOOR**2 * size, round_off)[:, None]
        deviation = torch.where(varies, variance.clamp(min=0).sqrt(), 0.0)
        inverse = torch.where(varies, 1 / deviation, 0.0)
        return cls(axes * inverse[:, None] @ axes.mT, axes * deviation[:, None] @ axes.mT, axes, varies)
