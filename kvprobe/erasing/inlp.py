"""INLP: train a probe, project away what it reads, and train the next on the rest, until a probe is at chance.

Iterative null-space projection (Ravfogel et al. 2020, arXiv 2004.07667). It needs no closed form and works for any
probe, but erases more than LEACE: each round takes a direction for each class of each target, even if little was left
to take.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.erasing.subspace import Eraser
from kvprobe.errors import UserError
from kvprobe.probing.gram import Moments, one_hot_answers
from kvprobe.probing.linear import LinearProbes, check_features, check_problem
from kvprobe.probing.ridge import VARIANCE_FLOOR

ROUNDS = 8
_PENALTY = 1e-2
"""Ridge penalty on the probes' weights for each sample, on features of unit variance."""
_ERRORS = 2
"""Standard errors above the share of the commonest class up to which a probe counts as at chance."""


@checked_arguments
def inlp(
    features: Float[Tensor, "sites samples dim"],
    labels: Int[Tensor, "targets samples"],
    classes: int,
    held_out: Bool[Tensor, "samples"],
    rounds: int = ROUNDS,
) -> Eraser:
    """The eraser of all targets together; each site stops once its probe is at chance.

    Projections are orthogonal in features scaled to unit variance, which is what the probes read.

    Args:
        held_out: samples on which each round's probe is judged and not trained; take them from other conversations
            where there are several.
        rounds: most rounds to run.

    Raises:
        UserError: labels out of range or of one class, no sample held out or none left, or features that are not
            finite.
    """
    check_features(features)
    if not 0 < int(held_out.sum()) < len(held_out):
        raise UserError(
            f"{int(held_out.sum())} of {len(held_out)} samples are held out; hold out at least one, and not all."
        )
    check_problem(labels[:, ~held_out], torch.arange(int((~held_out).sum())) % 3, classes)
    answers = one_hot_answers(labels, classes, features.dtype)
    whole = Moments.of(features, answers)
    deviation = (whole.gram.diagonal(dim1=1, dim2=2) / whole.count).sqrt()
    varies = deviation > VARIANCE_FLOOR * whole.size[:, None]
    scale = torch.where(varies, deviation, 1.0)
    scaled = (features - whole.features[:, None]) / scale[:, None] * varies[:, None]
    basis = _basis(scaled, answers, labels, classes, held_out, rounds)
    return Eraser(basis / scale[:, :, None], basis.mT * scale[:, None], whole.features, whole.gram / whole.count)


def _basis(
    features: Float[Tensor, "sites samples dim"],
    answers: Float[Tensor, "samples answers"],
    labels: Int[Tensor, "targets samples"],
    classes: int,
    held_out: Bool[Tensor, "samples"],
    rounds: int,
) -> Float[Tensor, "sites dim rank"]:
    """Orthonormal directions that the probes of all rounds read, and zeros where a site has fewer than others."""
    moments = Moments.of(features[:, ~held_out], answers[~held_out])
    judged, truth = features[:, held_out], labels[:, held_out]
    # The mean over targets is judged, whose chance is the mean share of the commonest training class.
    chance = float((labels[:, ~held_out].mode(1).values[:, None] == truth).double().mean())
    limit = chance + _ERRORS * (chance * (1 - chance) / truth.numel()) ** 0.5
    sites, _, dim = features.shape
    basis = features.new_zeros(sites, dim, 0)
    reading = torch.ones(sites, dtype=torch.bool, device=features.device)
    for _ in range(rounds):
        left = torch.eye(dim).to(basis) - basis @ basis.mT
        probes = _probes(moments, left, classes)
        reading &= probes.scores(judged).argmax(-1).eq(truth).double().mean((1, 2)) > limit
        if not bool(reading.any()):
            break
        directions, size, _ = torch.linalg.svd(left @ probes.weights, full_matrices=False)
        informative = (size > 1e-4 * size[:, :1]) & reading[:, None]
        basis = torch.cat([basis, directions * informative[:, None]], 2)
    # Sites that stopped early have columns of zeros; these go to the end, and columns beyond `dim` are dropped.
    order = (basis.square().sum(1) < 0.5).to(torch.uint8).argsort(dim=1, stable=True)[:, : min(dim, basis.shape[2])]
    return basis.gather(2, order[:, None].expand(-1, dim, -1))


def _probes(moments: Moments, left: Float[Tensor, "sites dim dim"], classes: int) -> LinearProbes:
    """Ridge probes of what a projection leaves of the features."""
    gram = left @ moments.gram @ left
    gram.diagonal(dim1=1, dim2=2).add_(_PENALTY * moments.count)
    weights = left @ torch.linalg.solve(gram, left @ moments.cross)
    return LinearProbes(moments.features, weights, moments.answers.expand(len(weights), -1), classes)
