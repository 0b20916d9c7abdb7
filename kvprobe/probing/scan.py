"""A scan over many probes that says which of them read more than the context tells, and how sure that is.

The null is that labels are exchangeable within a context: they are permuted there, all targets together, and every
probe is fitted again. To permute against fixed predictions would be cheaper and wrong: the folds train on each
other, so that their accuracies share their luck (over 2,000 nulls of tests/probing/test_scan.py, 7.4 % of scans then
find something at 5 %, and 4.1 % this way, where ties take away a part). A probe that only recognises the context keeps its accuracy under the permutation, which is its floor.

Over the scan the family-wise error is controlled by the step-down maximum of the standardised accuracies (Westfall and
Young 1993), which takes account of how alike the probes are; the false discovery rate is that of Benjamini and
Hochberg (1995), for exploratory maps.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.controls import Solve, permuted_within
from kvprobe.probing.linear import check_problem
from kvprobe.probing.ridge import VARIANCE_FLOOR, ridge_probes
from kvprobe.probing.splits import centred_within
from kvprobe.stats import cluster_bootstrap, cluster_weights


@dataclass(frozen=True)
class Scan:
    """What a scan found.

    Attributes:
        table: one row per probe, its site first: `accuracy` (mean over targets) with `low` and `high`; `floor`, the
            mean accuracy under permutation; `p`, of this probe alone; `p_family`, corrected for all probes; `q`, the
            false discovery rate.
        chance: accuracy of a guess.
        permutations: how many there were; no p can be below 1 / (permutations + 1).
    """

    table: pd.DataFrame
    chance: float
    permutations: int

    def df(self) -> pd.DataFrame:
        """The table."""
        return self.table


def scan(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    folds: Int[np.ndarray, "samples"],
    classes: int,
    *,
    places: pd.DataFrame | None = None,
    permutations: int = 199,
    solve: Solve = ridge_probes,
    at_once: int = 1,
    rng: np.random.Generator | None = None,
) -> Scan:
    """Accuracy, interval, floor and corrected p-values of every probe.

    Args:
        features: those of `paired_features`, if the split is `paired`.
        places: what to call the probes, one row each (layer, part, head, position); numbered by default.
        at_once: permutations given to the solver in one call, as further targets; more than one is the same only if
            the solver fits each target by itself, as `ridge_probes` does at a single penalty.
        rng: of permutations and bootstrap; seeded with 0 by default.

    Raises:
        ValueError: every context has one label only, no permutations, places and probes that differ in number, or
            what `check_problem` refuses.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    places = pd.DataFrame({"probe": np.arange(len(features))}) if places is None else places
    if len(places) != len(features):
        raise ValueError(f"Each probe needs one place; got {len(places)} places for {len(features)} probes.")
    if permutations < 1 or at_once < 1:
        raise ValueError(f"A scan needs at least one permutation at a time; got {permutations}, {at_once} at once.")
    numbers = torch.from_numpy(folds).to(labels.device)
    check_problem(labels, numbers, classes)
    found, clusters = np.unique(contexts, return_inverse=True)
    if all(bool((labels[:, clusters == c] == labels[:, clusters == c][:, :1]).all()) for c in range(len(found))):
        raise ValueError(
            "Every context has the same labels for all its samples, so that permuting within it changes nothing; "
            "cross contexts with labels."
        )

    hits = solve(features, labels, numbers, classes).predicted.eq(labels)
    counts = [hits.sum((1, 2))[None]]
    orders = torch.from_numpy(permuted_within(clusters, permutations, rng)).to(labels.device)
    for block in orders.split(at_once):
        answers = labels[:, block].transpose(0, 1).flatten(0, 1)
        right = solve(features, answers, numbers, classes).predicted.eq(answers).sum(2)
        counts.append(right.unflatten(1, (len(block), len(labels))).sum(2).T)
    # Whole numbers of hits: equal accuracies stay equal, which p-values must count as ties.
    scores = torch.cat(counts).cpu().double().numpy()

    weights = cluster_weights(len(found), rng)
    accuracy, low, high = cluster_bootstrap(hits.double().mean(1).cpu().numpy(), clusters, weights)
    p = (scores >= scores[0]).mean(0)
    table = places.reset_index(drop=True).assign(
        accuracy=accuracy,
        low=low,
        high=high,
        floor=scores[1:].mean(0) / labels.numel(),
        p=p,
        p_family=step_down(scores),
        q=false_discovery_rate(p),
    )
    return Scan(table, 1 / classes, permutations)


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
