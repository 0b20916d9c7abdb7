"""How few dimensions carry a label: η² of each dimension, and accuracy of probes on the k best (Gurnee et al. 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.intervals import held_out_means
from kvprobe.probing.linear import check_problem
from kvprobe.probing.ridge import VARIANCE_FLOOR, ridge_probes
from kvprobe.probing.splits import centred_within
from kvprobe.stats import SHARE

KS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class SparseCurves:
    """Accuracy against the number of dimensions.

    Attributes:
        table: one row per probe and k: `accuracy` (mean over targets) with `low` and `high`, and `random`, the
            accuracy of k dimensions drawn at random.
        chosen: the dimensions by η² in the training part of each fold, best first.
        hits: share of each sample's targets that each probe gets right, by k, with the best dimensions and with random
            ones.
        chance: accuracy of a guess.
    """

    table: pd.DataFrame
    chosen: Int[Tensor, "probes folds targets k"]
    hits: Mapping[int, tuple[Float[np.ndarray, "probes samples"], Float[np.ndarray, "probes samples"]]]
    chance: float

    def df(self) -> pd.DataFrame:
        """The table."""
        return self.table


def eta_squared(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    classes: int,
    *,
    contexts: Int[np.ndarray, "samples"] | None = None,
) -> Float[Tensor, "probes targets dim"]:
    """Share of each dimension's variance that lies between labels; 0 for a constant dimension.

    Labels unrelated to the features leave (labels present − 1) / (samples − 1) on average.

    Args:
        contexts: centre the features within each of them first, so that only variance within contexts counts.
    """
    if contexts is None:
        centred = features.double() - features.double().mean(1, keepdim=True)
    else:
        centred = centred_within(features.double().transpose(0, 1), contexts).transpose(0, 1)
    total = centred.square().sum(1)
    onehot = torch.nn.functional.one_hot(labels, classes).double()
    sums = torch.einsum("psd,tsc->ptcd", centred, onehot)
    between = (sums.square() / onehot.sum(1).clamp(min=1)[None, :, :, None]).sum(2)
    floor = (VARIANCE_FLOOR * features.double().square().mean((1, 2)).sqrt()).square() * features.shape[1]
    varies = (total > floor[:, None])[:, None]
    return torch.where(varies, between / total.clamp(min=torch.finfo(torch.double).tiny)[:, None], 0.0).to(features)


def sparse_curves(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    folds: Int[np.ndarray, "samples"],
    classes: int,
    *,
    ks: Sequence[int] | None = None,
    rng: np.random.Generator | None = None,
) -> SparseCurves:
    """Accuracy of probes on the k dimensions of largest η², chosen anew in each training part, for each target.

    Args:
        ks: how many dimensions; by default those of `KS` that there are.
        contexts: number of each sample's context, over which intervals are.
        rng: of the random dimensions; seeded with 0 by default.

    Raises:
        UserError: a k below 1 or above the number of dimensions, or what `check_problem` refuses.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    probes, _, dim = features.shape
    ks = sorted(set([k for k in KS if k <= dim] if ks is None else ks))
    if not ks or ks[0] < 1 or ks[-1] > dim:
        raise UserError(f"k must lie in 1 to {dim}, the number of dimensions; got {ks}.")
    numbers = torch.from_numpy(folds).to(features.device)
    check_problem(labels, numbers, classes)
    count = int(folds.max()) + 1
    training = [numbers != fold for fold in range(count)]
    ranked = torch.stack([eta_squared(features[:, rows], labels[:, rows], classes) for rows in training], 1)
    chosen = ranked.argsort(dim=-1, descending=True, stable=True)[..., : ks[-1]]
    drawn = np.argsort(rng.random((probes, count, len(labels), dim)), -1)[..., : ks[-1]]
    random_dimensions = torch.from_numpy(drawn.copy()).to(features.device)

    tables, hits = [], {}
    for k in ks:
        best, random = (
            _hits(features, labels, numbers, classes, dimensions[..., :k]) for dimensions in (chosen, random_dimensions)
        )
        accuracy, low, high = held_out_means(best, contexts, SHARE)
        columns = {"accuracy": accuracy, "low": low, "high": high, "random": random.mean(-1)}
        tables.append(pd.DataFrame({"probe": np.arange(probes), "k": np.full(probes, k)} | columns))
        hits[k] = (best, random)
    table = pd.concat(tables).sort_values(["probe", "k"], ignore_index=True)
    return SparseCurves(table, chosen, hits, 1 / classes)


def _hits(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    dimensions: Int[Tensor, "probes folds targets k"],
) -> Float[np.ndarray, "probes samples"]:
    """Share of targets that probes on these dimensions get right, each fold with the dimensions that it chose."""
    probes, count, targets, _ = dimensions.shape
    hits = torch.zeros(probes, features.shape[1], dtype=torch.double, device=features.device)
    for target in range(targets):
        index = dimensions[:, :, target, None].expand(-1, -1, features.shape[1], -1)
        seen = features[:, None].expand(-1, count, -1, -1).gather(3, index).flatten(0, 1)
        predicted = ridge_probes(seen, labels[target : target + 1], folds, classes).predicted
        # The probes with the dimensions of one fold are fitted on all folds; only their own fold's guesses are fair.
        fair = predicted[:, 0].unflatten(0, (probes, count)).gather(1, folds.expand(probes, 1, -1))[:, 0]
        hits += fair.eq(labels[target])
    return (hits / targets).cpu().numpy()
