"""A subspace of features, told by what is read of a vector and where that is written; and the erasure of what lies in it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Subspace:
    """A projection of rank r: the part of a change that lies inside is `change @ read @ write`.

    It is orthogonal where `write` is the transpose of `read`, else oblique. Sites of lower rank than others of their batch have
    columns of zeros.

    Attributes:
        read: the coordinates of a change.
        write: where each coordinate points to.
    """

    read: Float[Tensor, "*sites dim rank"]
    write: Float[Tensor, "*sites rank dim"]

    @classmethod
    def spanned(cls, directions: Float[Tensor, "directions dim"]) -> "Subspace":
        """The orthogonal projection onto the span of some directions, which need be neither orthogonal nor of length one."""
        _, singular, right = torch.linalg.svd(torch.atleast_2d(directions).float(), full_matrices=False)
        basis = right[singular > 1e-6 * singular.max()]
        return cls(basis.T, basis)

    @property
    def rank(self) -> Int[Tensor, "*sites"]:
        """Dimensions inside, which of a projection is its trace."""
        return (self.read * self.write.mT).sum((-2, -1)).round().long()

    def inside(self, change: Float[Tensor, "*sites samples dim"]) -> Float[Tensor, "*sites samples dim"]:
        """The part of a change that lies inside, in fp32."""
        return change.float() @ self.read.to(change.device) @ self.write.to(change.device)


@dataclass(frozen=True)
class Eraser(Subspace):
    """An affine map that takes a concept out of features: what lies inside a subspace is set to what it is on average.

    Attributes:
        mean: of the features that it was fitted on, which it leaves as it is.
        covariance: of those features, in which the size of what it does is measured and random subspaces are drawn.
    """

    mean: Float[Tensor, "*sites dim"]
    covariance: Float[Tensor, "*sites dim dim"]

    def erased(
        self, features: Float[Tensor, "*sites samples dim"], strength: float = 1.0
    ) -> Float[Tensor, "*sites samples dim"]:
        """The features without the concept.

        Args:
            strength: of the erasure: 0 leaves them as they are, 1 erases, beyond it the concept is turned into its opposite.
        """
        away = features.float() - self.mean.to(features.device)[..., None, :]
        return (features.float() - strength * self.inside(away)).to(features.dtype)

    @property
    def share(self) -> Float[Tensor, "*sites"]:
        """Mean squared change that the erasure makes, over the features' variance; an oblique one may exceed 1."""
        projection = self.read @ self.write
        moved = (projection.mT @ self.covariance @ projection).diagonal(dim1=-2, dim2=-1).sum(-1)
        return moved / self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=torch.finfo(moved.dtype).tiny)

    def at(self, site: int) -> "Eraser":
        """The eraser of one site of a batch."""
        return Eraser(self.read[site], self.write[site], self.mean[site], self.covariance[site])
