"""k-sparse curves of the sites that folds chose: each test fold is read at its own pick, as for accuracies."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, Site
from kvprobe.probing.sparse import sparse_curves
from kvprobe.probing.splits import Split


def chosen_curves(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    picks: Sequence[tuple[Family, Site]],
    rng: np.random.Generator,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By k, the share of each sample's targets that are read right from the k best dimensions, and from k random ones.

    Args:
        picks: the site of each test fold.
    """
    classes = len(features.target.classes)
    hits_at = {}
    for family, site in dict.fromkeys(picks):
        seen = features.at(family, site, split)
        hits_at[family, site] = sparse_curves(seen, features.labels, features.contexts, folds, classes, rng=rng).hits
    ks = sorted(set.intersection(*(set(hits) for hits in hits_at.values())))
    samples = np.arange(len(folds))
    by_fold = [hits_at[pick] for pick in picks]
    return {
        k: (
            np.stack([hits[k][0][0] for hits in by_fold])[folds, samples],
            np.stack([hits[k][1][0] for hits in by_fold])[folds, samples],
        )
        for k in ks
    }
