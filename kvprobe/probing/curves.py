"""k-sparse curves of the sites that folds chose: each test fold is read at its own pick, as accuracies are."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, Site
from kvprobe.probing.permutation import paired_features
from kvprobe.probing.sparse import sparse_curves
from kvprobe.probing.splits import Split


def chosen_curves(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    picks: Sequence[tuple[Family, Site]],
    rng: np.random.Generator,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By k, the share of targets that are read right of each sample from the k best dimensions, and from k at random.

    Args:
        picks: the site of each test fold.
    """
    classes = len(features.target.classes)
    found = {}
    for family, site in dict.fromkeys(picks):
        seen = features.at(family, site)
        seen = paired_features(seen, features.contexts) if split == "paired" else seen
        found[family, site] = sparse_curves(seen, features.labels, features.contexts, folds, classes, rng=rng).hits
    ks = sorted(set.intersection(*(set(hits) for hits in found.values())))
    own = np.arange(len(folds))
    by_fold = [found[pick] for pick in picks]
    return {
        k: (
            np.stack([hits[k][0][0] for hits in by_fold])[folds, own],
            np.stack([hits[k][1][0] for hits in by_fold])[folds, own],
        )
        for k in ks
    }
