"""P-values for many probes at once: which of them read more than the context alone gives away.

The null is that labels are exchangeable within a context: they are permuted there, all targets together, and every
probe is fitted again. Permuting against fixed predictions would be cheaper and wrong, because the folds train on each
other and so their accuracies are correlated. Over 2,000 nulls of tests/probing/test_permutation.py, 7.4 % of searches
then report something at 5 %, against 4.1 % this way, where ties take away a part. A probe that only recognises the
context keeps its accuracy under the permutation.

Over all probes the family-wise error is controlled by the step-down maximum of the standardised accuracies (Westfall
and Young 1993), which takes account of how alike the probes are.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.fixed import fixed_ridge


def permuted_hits(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    orders: Int[np.ndarray, "count samples"],
    size: Float[Tensor, "probes"] | None = None,
) -> Float[np.ndarray, "assignments probes"]:
    """Hits, summed over targets and samples, of ridge probes at one fixed penalty: with the true labels first, then
    with the labels in each of these orders.

    Args:
        orders: see `kvprobe.probing.controls.permuted_within`.
        size: root mean square of what the probes read before any centring; that of `features` by default.
    """
    assignments = torch.from_numpy(np.concatenate([np.arange(labels.shape[1])[None], orders])).to(labels.device)
    answers = labels[:, assignments].transpose(0, 1)
    predicted = fixed_ridge(features, answers.flatten(0, 1), folds, classes, size=size)
    # Whole numbers of hits: equal accuracies stay equal, which p-values must count as ties.
    return predicted.eq(answers.flatten(0, 1)).sum(2).unflatten(1, answers.shape[:2]).sum(2).T.double().cpu().numpy()


def p_values(scores: Float[np.ndarray, "assignments probes"]) -> Float[np.ndarray, "probes"]:
    """The p-value of each probe alone: the share of assignments, the true one included, in which it does as well."""
    return (scores >= scores[0]).mean(0)


def step_down(scores: Float[np.ndarray, "assignments probes"]) -> Float[np.ndarray, "probes"]:
    """Family-wise p-values by the step-down maximum (Westfall and Young 1993, algorithm 4.1).

    Each probe is standardised over all assignments of the labels, the true one included, so that all are treated
    alike: the level is exact for any floors and spreads of the probes.

    Args:
        scores: of the true labels first, then of the permuted ones.
    """
    spread = scores.std(0)
    standard = (scores - scores.mean(0)) / np.where(spread > 0, spread, 1.0)
    order = np.argsort(-standard[0], kind="stable")
    # Largest score among this probe and those below it.
    largest = np.maximum.accumulate(standard[:, order[::-1]], axis=1)[:, ::-1]
    p = np.empty(scores.shape[1])
    p[order] = np.maximum.accumulate((largest >= standard[0, order]).mean(0))
    return p


def sign_flipped(
    change: Float[np.ndarray, "contexts dim"], flips: int, rng: np.random.Generator
) -> Float[np.ndarray, "dim"]:
    """Family-wise p-values of the mean of each column of differences between two arms.

    Where an arm makes no difference, the arms may change places within a context: the signs of its differences are
    flipped, all columns together, and the largest of the standardised means sets the level (step-down).
    """
    signs = rng.choice([-1.0, 1.0], (flips + 1, len(change)))
    signs[0] = 1.0
    return step_down(np.abs(signs @ change) / len(change))
