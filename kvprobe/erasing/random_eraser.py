"""The control of an erasure: a subspace of the same rank that has nothing to do with the concept."""

import numpy as np
import torch

from kvprobe.arguments import checked_arguments
from kvprobe.erasing.subspace import Eraser
from kvprobe.erasing.whitening import Whitening


@checked_arguments
def random_eraser(like: Eraser, rng: np.random.Generator) -> Eraser:
    """An eraser of as many random directions at each site, drawn where features have unit variance in all directions.

    It removes as much whitened variance as `like` does, and has the distribution of what LEACE finds when labels are
    shuffled. Directions drawn in plain coordinates would mostly be ones along which features hardly vary, and would
    erase next to nothing.
    """
    sites, dim = like.mean.shape[:-1], like.mean.shape[-1]
    whitening = Whitening.of(like.covariance.reshape(-1, dim, dim), like.mean.reshape(-1, dim))
    ranks = like.rank.reshape(-1)
    width = like.read.shape[-1]
    drawn = torch.from_numpy(rng.standard_normal((len(ranks), dim, width))).to(whitening.axes)
    # Directions along which no feature varies are left out.
    varying = whitening.axes * whitening.varies[:, None]
    basis = torch.linalg.qr(varying @ (varying.mT @ drawn)).Q
    ranks = torch.minimum(ranks, whitening.varies.sum(1))[:, None]
    basis = basis * (torch.arange(width, device=ranks.device) < ranks)[:, None]
    return Eraser(
        (whitening.whiten @ basis).float().reshape(*sites, dim, width),
        (basis.mT @ whitening.unwhiten).float().reshape(*sites, width, dim),
        like.mean,
        like.covariance,
    )
