"""How few dimensions carry a label: η² of each dimension, and accuracy of probes on the k best (Gurnee et al. 2023)."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.linear import check_problem
from kvprobe.probing.ridge import VARIANCE_FLOOR, fitted_by_fold, ridge_probes
from kvprobe.probing.splits import Split, centred_within, paired_features
from kvprobe.threads import one_thread

KS = (1, 2, 4, 8, 16, 32, 64)
Hits = Mapping[int, tuple[Float[np.ndarray, "probes samples"], Float[np.ndarray, "probes samples"]]]


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


def hits_by_count(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    folds: Int[np.ndarray, "samples"],
    classes: int,
    *,
    split: Split,
    ks: Sequence[int],
    seed: int,
) -> pd.DataFrame:
    """The share of each sample's targets that one probe gets right: a row per sample and k.

    Columns: `sample`, `context`, `k`, `right` on the best k dimensions, and `random` on k random ones. The last rows,
    of which `every` is true, are of all dimensions.

    Args:
        split: how features are centred; see `kvprobe.probing.splits`.
        seed: of the random dimensions.
    """
    read = paired_features(features[None], contexts) if split == "paired" else features[None]
    size = features.square().mean().sqrt()[None]
    whole = ridge_probes(read, labels, torch.from_numpy(folds), classes, size=size).predicted[0]
    hits = sparse_hits(read, labels, folds, classes, ks=ks, rng=np.random.default_rng([seed, 6]))[1] if ks else {}
    tables = [
        pd.DataFrame({"k": k, "every": False, "right": best[0], "random": random[0]})
        for k, (best, random) in hits.items()
    ]
    every = whole.eq(labels).double().mean(0).numpy()
    tables.append(pd.DataFrame({"k": features.shape[1], "every": True, "right": every, "random": np.nan}))
    known = {"sample": range(len(contexts)), "context": contexts}
    return pd.concat([table.assign(**known) for table in tables], ignore_index=True)


@one_thread()
def sparse_hits(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[np.ndarray, "samples"],
    classes: int,
    *,
    ks: Sequence[int] | None = None,
    rng: np.random.Generator | None = None,
    only: Sequence[int] | None = None,
) -> tuple[Int[Tensor, "probes folds targets k"], Hits]:
    """Probes on the k dimensions of largest η², chosen anew in each training part, for each target.

    Returns the dimensions by η² in the training part of each fold, best first; and by k the share of each sample's
    targets that each probe gets right with the best k dimensions and with k random ones.

    Args:
        ks: how many dimensions; by default those of `KS` that there are.
        rng: of the random dimensions; seeded with 0 by default.
        only: the test folds to read; the hits of samples in others are zero.

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
    both = torch.stack([chosen, torch.from_numpy(drawn.copy()).to(features.device)])
    asked = range(count) if only is None else only
    hits = {k: _hits(features, labels, numbers, classes, both[..., :k], asked) for k in ks}
    return chosen, {k: (best, random) for k, (best, random) in hits.items()}


def _hits(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    dimensions: Int[Tensor, "kinds probes folds targets k"],
    only: Sequence[int],
) -> Float[np.ndarray, "kinds probes samples"]:
    """Share of targets that probes on these dimensions get right, each fold with the dimensions that it chose."""
    probes, samples, _ = features.shape
    hits = torch.zeros(len(dimensions) * probes, samples, dtype=torch.double, device=features.device)
    for target, fold in product(range(len(labels)), only):
        parts = dimensions[:, :, fold, target, None].expand(-1, -1, samples, -1)
        seen = torch.cat([features.gather(2, part) for part in parts])
        answers = labels[target : target + 1]
        ((fitted,),) = fitted_by_fold(seen, [answers], folds, classes, only=[fold])
        hits[:, fitted.test] += fitted.predicted.eq(answers[:, fitted.test])[:, 0]
    return (hits / len(labels)).unflatten(0, dimensions.shape[:2]).cpu().numpy()
