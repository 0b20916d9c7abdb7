"""A subspace of features, as a matrix that reads coordinates and one that writes them; and its erasure."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.brief import Brief


@dataclass(frozen=True, repr=False)
class Subspace(Brief):
    """A projection of rank r: the part of a change that lies inside is `change @ read @ write`.

    It is orthogonal where `write` is the transpose of `read`, else oblique. Sites of lower rank than others of their
    batch have columns of zeros.

    Attributes:
        read: maps a change to its coordinates.
        write: the direction of each coordinate.
    """

    read: Float[Tensor, "*sites dim rank"]
    write: Float[Tensor, "*sites rank dim"]

    @classmethod
    def spanned(cls, directions: Float[Tensor, "directions dim"]) -> "Subspace":
        """The orthogonal projection onto the span of some directions, which need not be orthogonal or of length one."""
        _, singular, right = torch.linalg.svd(torch.atleast_2d(directions).float(), full_matrices=False)
        basis = right[singular > 1e-6 * singular.max()]
        return cls(basis.T, basis)

    @property
    def rank(self) -> Int[Tensor, "*sites"]:
        """Dimensions inside: the trace of the projection."""
        return (self.read * self.write.mT).sum((-2, -1)).round().long()

    def inside(self, change: Float[Tensor, "*sites samples dim"]) -> Float[Tensor, "*sites samples dim"]:
        """The part of a change that lies inside, in fp32."""
        return change.float() @ self.read.to(change.device) @ self.write.to(change.device)


@dataclass(frozen=True, repr=False)
class Eraser(Subspace):
    """An affine map that takes a concept out of features: what lies inside a subspace is set to what it is on average.

    Attributes:
        mean: of the features that it was fitted on, which it leaves as it is.
        covariance: of those features; `share` and random subspaces are measured in it.
    """

    mean: Float[Tensor, "*sites dim"]
    covariance: Float[Tensor, "*sites dim dim"]

    def erased(
        self, features: Float[Tensor, "*sites samples dim"], strength: float = 1.0
    ) -> Float[Tensor, "*sites samples dim"]:
        """The features without the concept.

        Args:
            strength: 0 leaves them as they are, 1 erases, and beyond 1 the concept is reversed.
        """
        deviation = features.float() - self.mean.to(features.device)[..., None, :]
        return (features.float() - strength * self.inside(deviation)).to(features.dtype)

    @property
    def share(self) -> Float[Tensor, "*sites"]:
        """Mean squared change that the erasure makes, over the features' variance; an oblique one may exceed 1."""
        projection = self.read @ self.write
        moved = (projection.mT @ self.covariance @ projection).diagonal(dim1=-2, dim2=-1).sum(-1)
        return moved / self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=torch.finfo(moved.dtype).tiny)

    def at(self, site: int) -> "Eraser":
        """The eraser of one site of a batch."""
        return Eraser(self.read[site], self.write[site], self.mean[site], self.covariance[site])
