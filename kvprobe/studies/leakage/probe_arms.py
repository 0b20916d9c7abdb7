"""Probes of an arm with every floor that its slots can have; `kvprobe.probe` also reads the conversations."""

from collections.abc import Sequence

import numpy as np

from kvprobe.inference.model import Model
from kvprobe.probing.arms import Arms
from kvprobe.probing.claims import FLOOR, Probing
from kvprobe.probing.differences import less_restart, nothing
from kvprobe.probing.probe import embeddings
from kvprobe.probing.probe_features import probe_features

UNTRAINED = "untrained"
"""The floor of a model before it learned anything."""


def probe_arm(
    model: Model,
    arms: Arms,
    arm: str,
    restart: str | None = None,
    *,
    others: Sequence[str] = (),
    untrained: Arms | None = None,
    folds: int,
    permutations: int,
    rng: np.random.Generator,
) -> Probing:
    """What probes read of an arm.

    Args:
        restart: the arm of the same tokens at the same positions, computed without what is hidden; with it come the
            input embeddings of these tokens, whose texts the arms must have.
        others: more arms to be floors, under their own names.
        untrained: what a model before training gave on the same conversations.
        folds, permutations, rng: see `probe_features`, which also says what is refused.
    """
    features, floors = arms.features(arm), {}
    if restart is not None:
        floors = {FLOOR: arms.features(restart), "embedding": embeddings(model, features)}
    if untrained is not None:
        floors[UNTRAINED] = untrained.features(arm)
    floors |= {other: arms.features(other) for other in others}
    note = f"Fitting probes, {arm}"
    return probe_features(features, floors, folds=folds, permutations=permutations, rng=rng, note=note)


def probe_change(
    arms: Arms, arm: str, restart: str, *, folds: int, permutations: int, rng: np.random.Generator
) -> Probing:
    """What probes read of an arm less its restart: of what the hidden text changed. See `probe_arm`."""
    changed = less_restart(arms.features(arm), arms.features(restart))
    floors, note = {FLOOR: nothing(changed)}, f"Fitting probes, {arm} less {restart}"
    return probe_features(changed, floors, folds=folds, permutations=permutations, rng=rng, note=note)
