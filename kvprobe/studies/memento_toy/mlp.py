"""A probe with one hidden layer, for what no linear probe reads."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvprobe.probing.linear import check_features, check_problem
from kvprobe.probing.ridge import VARIANCE_FLOOR

HIDDEN, BATCH = 256, 256
EPOCHS, PATIENCE = 60, 5
"""At most so many passes over the training samples, and so many without a better accuracy on the inner fold."""
_RATE, _DECAY = 1e-3, 1e-2
_SPHERE = 1e-3
"""Variance that is added in every direction before whitening, for features of unit variance."""


def mlp_predictions(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    rng: np.random.Generator,
) -> Int[Tensor, "targets tested"]:
    """The class of each sample of fold 0; see `mlp_scores`."""
    return mlp_scores(features, labels, folds, classes, rng)[1].argmax(2)


def mlp_scores(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    rng: np.random.Generator,
) -> tuple[Float[Tensor, "targets inner classes"], Float[Tensor, "targets tested classes"]]:
    """The score of each class by one network for all targets, for the samples of fold 1 and of fold 0.

    It is trained with AdamW on all folds but 0 and 1, and the pass is taken after which it is most accurate on fold 1.
    Features are whitened: what a hidden channel holds is often in directions of little variance, along which gradient
    descent would hardly learn.

    Raises:
        UserError: features that are not finite, or labels and folds that no probe can be fitted to.
    """
    check_features(features[None])
    check_problem(labels, folds, classes)
    white = _whitened(features, folds > 1)
    trained, inner, test = torch.nonzero(folds > 1)[:, 0], folds == 1, folds == 0
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(int(rng.integers(2**31)))
        layers = nn.Linear(features.shape[1], HIDDEN), nn.GELU(), nn.Linear(HIDDEN, len(labels) * classes)
        network = nn.Sequential(*layers, nn.Unflatten(1, (len(labels), classes))).to(features.device)
        optimiser = torch.optim.AdamW(network.parameters(), _RATE, weight_decay=_DECAY)
        best, since, scores = -1.0, 0, (torch.empty(0), torch.empty(0))
        for _ in range(EPOCHS):
            order = torch.from_numpy(rng.permutation(len(trained))).to(trained.device)
            for some in trained[order].split(BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(white[some]).transpose(1, 2), labels[:, some].T).backward()
                optimiser.step()
            with torch.no_grad():
                of_inner = network(white[inner]).transpose(0, 1)
                accuracy = of_inner.argmax(2).eq(labels[:, inner]).double().mean().item()
                since += 1
                if accuracy > best:
                    best, since, scores = accuracy, 0, (of_inner, network(white[test]).transpose(0, 1))
            if since == PATIENCE:
                break
    return scores


def _whitened(features: Float[Tensor, "samples dim"], trained: Tensor) -> Float[Tensor, "samples dim"]:
    """The features in coordinates in which those of the training samples have about unit variance."""
    mean, deviation = features[trained].mean(0), features[trained].std(0)
    floor = VARIANCE_FLOOR * features[trained].square().mean().sqrt()
    scaled = (features - mean) * torch.where(deviation > floor, 1 / deviation, 0.0)
    seen = scaled[trained].double()
    variance, axes = torch.linalg.eigh(seen.mT @ seen / len(seen))
    return scaled @ (axes / (variance.clamp(min=0) + _SPHERE).sqrt()).to(scaled.dtype)
