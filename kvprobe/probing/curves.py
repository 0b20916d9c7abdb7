"""k-sparse curves of the sites that folds chose: each test fold is read at its own pick, as for accuracies."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, Site
from kvprobe.probing.sparse import sparse_hits
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
    by_site = []
    for pick in dict.fromkeys(picks):
        picked = [fold for fold, other in enumerate(picks) if other == pick]
        seen = features.at(*pick, split)
        by_site.append(sparse_hits(seen, features.labels, folds, classes, rng=rng, only=picked)[1])
    ks = sorted(set.intersection(*map(set, by_site)))
    # Hits are zero in folds that picked another site.
    return {
        k: (np.sum([hits[k][0][0] for hits in by_site], axis=0), np.sum([hits[k][1][0] for hits in by_site], axis=0))
        for k in ks
    }
