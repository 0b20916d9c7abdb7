"""Ridge probes at one penalty for very many labelings of the same samples, as permutation tests need them.

At a fixed penalty the out-of-fold scores are a matrix times the labels, and the features alone decide the matrix. It is
made once per probe; each further labeling is then one product, however wide the features are. The predictions are those
of `kvprobe.probing.ridge.ridge_probes` with that penalty as the only candidate.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.gram import one_hot_answers
from kvprobe.probing.linear import check_features
from kvprobe.probing.ridge import VARIANCE_FLOOR, divided
from kvprobe.threads import one_thread

PENALTY = 0.1
"""Per training sample, on features of unit variance: the middle of the penalties that `ridge_probes` chooses from."""

_CHUNK_BYTES = 60_000_000


@one_thread()
def fixed_ridge(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalty: float = PENALTY,
    size: Float[Tensor, "probes"] | None = None,
) -> Int[Tensor, "probes targets samples"]:
    """Out-of-fold classes by cross-validated ridge classification of every target from every probe's features.

    Args:
        folds: test fold of each sample; all others are trained on.
        size: root mean square of what the probes read before any centring; that of `features` by default.

    Raises:
        UserError: features that are not finite.
    """
    check_features(features)
    size = features.square().mean((1, 2)).sqrt() if size is None else size
    answers = one_hot_answers(labels, classes, features.dtype)
    predicted = torch.empty(len(features), *labels.shape, dtype=torch.long, device=features.device)
    dim, samples = features.shape[2], features.shape[1]
    chunk = max(1, _CHUNK_BYTES // (features.element_size() * (2 * samples * dim + dim * dim + answers.numel() // 4)))
    for fold in range(int(folds.max()) + 1):
        test = folds == fold
        share = answers[~test].mean(0)
        for first in range(0, len(features), chunk):
            here = slice(first, first + chunk)
            smoother = _smoother(
                features[here][:, ~test], features[here][:, test], VARIANCE_FLOOR * size[here], penalty
            )
            scores = torch.matmul(smoother, answers[~test] - share).add_(share)
            predicted[here, :, test] = scores.unflatten(-1, (-1, classes)).argmax(-1).transpose(1, 2)
    return predicted


def _smoother(
    train: Float[Tensor, "probes train dim"],
    test: Float[Tensor, "probes test dim"],
    floor: Float[Tensor, "probes"],
    penalty: float,
) -> Float[Tensor, "probes test train"]:
    """What each centred training answer adds to each test score."""
    mean = train.mean(1, keepdim=True)
    seen, asked = train - mean, test - mean
    deviation = seen.square().mean(1, keepdim=True).sqrt()
    scale = torch.where(deviation > floor[:, None, None], 1 / deviation, 0.0)
    seen, asked = seen * scale, asked * scale
    # Of the two equal forms, the one with the smaller system of equations.
    few = seen.shape[2] > seen.shape[1]
    gram = seen @ seen.mT if few else seen.mT @ seen
    ridge = gram.new_full((len(gram),), penalty * train.shape[1])
    return divided(asked @ seen.mT, gram, ridge) if few else divided(asked, gram, ridge) @ seen.mT
