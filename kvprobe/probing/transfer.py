"""Transfer: a probe that was trained at one place (a segment, a layer, a distance) and is tested at another.

If it reads there as well as a probe trained there, the two places hold the same information in the same directions. The
features of each place are centred by that place's own training mean, and the probe's evidence is scaled to the spread
that it has where the probe was trained. So neither an offset nor a fading signal is an obstacle, since neither carries
the label. No context is both trained and tested on, at any place.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.models.lens import Family
from kvprobe.probing.arms import Arms
from kvprobe.probing.by_split import BySplit, Folds
from kvprobe.probing.features import Site
from kvprobe.probing.intervals import held_out_means
from kvprobe.probing.linear import check_problem
from kvprobe.probing.ridge import fitted_by_fold
from kvprobe.probing.splits import Split, centred_within
from kvprobe.stats import SHARE
from kvprobe.tidy import crossed


def transfer(
    features: Float[Tensor, "places samples dim"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    folds: Int[np.ndarray, "samples"],
    classes: int,
    *,
    places: Sequence[Hashable] | None = None,
) -> pd.DataFrame:
    """Accuracy of the probe of each place at each place; see `transferred`.

    Args:
        contexts: number of each sample's context; all samples of a context share a fold.
        places: their names; numbers by default.

    Returns:
        One row per pair of places: `train`, `test`, `accuracy` (a mean over targets) with `low` and `high`, its 95 %
        interval.

    Raises:
        UserError: what `check_problem` and `transferred` refuse, or a number of names other than that of places.
    """
    names = list(range(len(features))) if places is None else list(places)
    if len(names) != len(features):
        raise UserError(f"There are {len(names)} names for {len(features)} places; give one name for each place.")
    numbers = torch.from_numpy(folds).to(labels.device)
    check_problem(labels, numbers, classes, contexts)
    hits = transferred(features, labels, numbers, classes).eq(labels).double().mean(2).cpu().numpy()
    accuracy, low, high = held_out_means(hits, contexts, SHARE)
    return crossed({"train": names, "test": names}, {"accuracy": accuracy, "low": low, "high": high})


def transferred(
    features: Float[Tensor, "places samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    size: Float[Tensor, "places"] | None = None,
) -> Int[Tensor, "places places targets samples"]:
    """Prediction of the ridge probe trained at the first place for each sample at the second, with the sample's fold
    held out.

    The penalty is chosen on the inner fold of the training place. The diagonal holds the predictions of `ridge_probes`.

    Args:
        features: of the same samples at each place, all of the same family and width.
        size: root mean square of what is read at each place before any centring; that of `features` by default.

    Raises:
        UserError: fewer than three folds, labels out of range, or features that are not finite.
    """
    shape = (len(features), len(features), *labels.shape)
    predicted = torch.empty(shape, dtype=torch.long, device=features.device)
    for fold, (fitted,) in enumerate(fitted_by_fold(features, [labels], folds, classes, size=size)):
        probes = fitted.probes
        seen, trained = features - probes.mean[:, None], folds != fold
        for train, (weights, intercept) in enumerate(zip(probes.weights, probes.intercept, strict=True)):
            evidence = seen @ weights
            spread = evidence[:, trained].square().mean((1, 2)).sqrt()
            factor = torch.where(spread > 0, spread[train] / spread, 0.0)[:, None, None]
            scores = (evidence[:, fitted.test] * factor + intercept).unflatten(-1, (-1, classes))
            predicted[train][..., fitted.test] = scores.argmax(-1).transpose(1, 2)
    return predicted


@dataclass(frozen=True)
class ChosenTransfer:
    """Transfer at the site that each test fold chose for all arms.

    Attributes:
        picks: the site of each test fold.
        hits: share of each sample's targets that is read right, by the arm of training and the arm of the test.
    """

    picks: tuple[tuple[Family, Site], ...]
    hits: Float[np.ndarray, "arms arms samples"]


def transfer_where_chosen(arms: Arms, fits: Mapping[str, BySplit], split: Split, folds: Folds) -> ChosenTransfer:
    """Transfer between arms at one site for all: for each test fold, that of the best inner accuracy, mean over arms.

    Args:
        fits: of each arm, which gives the places of `transferred`, in order.
        folds: those of the fits. Except under `random`, no context is both trained and tested on.

    Raises:
        UserError: see `transferred`.
    """
    sites = next(iter(fits.values())).sites
    inner = torch.stack([of_arm.inner[split] for of_arm in fits.values()]).mean(0)
    picks = tuple(sites[best] for best in inner.argmax(0).tolist())
    hits = np.empty((len(fits), len(fits), len(folds[split])))
    for family, site in dict.fromkeys(picks):
        read, sizes = [], []
        for arm in fits:
            seen = arms.features(arm, (family,)).at(family, site)[0].contiguous()
            sizes.append(seen.square().mean().sqrt())
            read.append(centred_within(seen, arms.contexts) if split == "paired" else seen)
        numbers, classes = torch.from_numpy(folds[split]), len(arms.target.classes)
        predicted = transferred(torch.stack(read), arms.labels, numbers, classes, torch.stack(sizes))
        tested = np.isin(folds[split], [fold for fold, pick in enumerate(picks) if pick == (family, site)])
        hits[..., tested] = predicted.eq(arms.labels).double().mean(2).numpy()[..., tested]
    return ChosenTransfer(picks, hits)
