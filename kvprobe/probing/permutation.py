"""P-values for a scan over many probes: which of them read more than the context tells, and how sure that is.

The null is that labels are exchangeable within a context: they are permuted there, all targets together, and every
probe is fitted again. To permute against fixed predictions would be cheaper and wrong: the folds train on each
other, so that their accuracies share their luck (over 2,000 nulls of tests/probing/test_permutation.py, 7.4 % of scans then
find something at 5 %, and 4.1 % this way, where ties take away a part). A probe that only recognises the context keeps
its accuracy under the permutation.

Over the scan the family-wise error is controlled by the step-down maximum of the standardised accuracies (Westfall and
Young 1993), which takes account of how alike the probes are; the false discovery rate is that of Benjamini and
Hochberg (1995), for exploratory maps.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.fixed import fixed_ridge
from kvprobe.probing.ridge import VARIANCE_FLOOR
from kvprobe.probing.splits import centred_within


def permuted_hits(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    orders: Int[np.ndarray, "count samples"],
    size: Float[Tensor, "probes"] | None = None,
) -> Float[np.ndarray, "assignments probes"]:
    """Hits, summed over targets and samples, of ridge probes at one fixed penalty: with the true labels first, then with the
    labels in each of these orders.

    Args:
        orders: see `kvprobe.probing.controls.permuted_within`.
        size: root mean square of what the probes read before any centring; that of `features` by default.
    """
    every = torch.from_numpy(np.concatenate([np.arange(labels.shape[1])[None], orders])).to(labels.device)
    answers = labels[:, every].transpose(0, 1)
    found = fixed_ridge(features, answers.flatten(0, 1), folds, classes, size=size).predicted
    # Whole numbers of hits: equal accuracies stay equal, which p-values must count as ties.
    return found.eq(answers.flatten(0, 1)).sum(2).unflatten(1, answers.shape[:2]).sum(2).T.double().cpu().numpy()


def p_values(scores: Float[np.ndarray, "assignments probes"]) -> Float[np.ndarray, "probes"]:
    """Of each probe alone: the share of assignments, the true one included, in which it does as well."""
    return (scores >= scores[0]).mean(0)


def paired_features(
    features: Float[Tensor, "probes samples dim"], contexts: Int[np.ndarray, "samples"]
) -> Float[Tensor, "probes samples dim"]:
    """Features centred within context, and exactly 0 where only round-off is left, which probes would read as signal."""
    centred = centred_within(features.transpose(0, 1), contexts).transpose(0, 1)
    size = features.square().mean((1, 2)).sqrt()
    varies = centred.square().mean(1).sqrt() > VARIANCE_FLOOR * size[:, None]
    return centred * varies[:, None]


def step_down(scores: Float[np.ndarray, "assignments probes"]) -> Float[np.ndarray, "probes"]:
    """Family-wise p-values by the step-down maximum (Westfall and Young 1993, algorithm 4.1).

    Each probe is standardised over all assignments of the labels, the true one included, so that all are treated
    alike: the level is exact whatever the probes' floors and spreads are.

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


def false_discovery_rate(p: Float[np.ndarray, "probes"]) -> Float[np.ndarray, "probes"]:
    """q-values of Benjamini and Hochberg (1995): the smallest false discovery rate at which each would be reported."""
    order = np.argsort(p, kind="stable")
    raised = p[order] * len(p) / np.arange(1, len(p) + 1)
    q = np.empty(len(p))
    q[order] = np.minimum(np.minimum.accumulate(raised[::-1])[::-1], 1.0)
    return q
