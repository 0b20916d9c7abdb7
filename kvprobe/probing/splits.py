"""The three ways to hold samples out, reported together because they answer different questions.

`random` asks whether a probe that has seen the same conversation with other codes can read this one. It is the
easiest and the least general. `leave-context-out` asks this for conversations that the probe never saw.
`paired` does so after each feature was centred within its conversation. This needs several codes of the same
conversation, so it shows that the information is linearly there, not that it is readable without knowing the
conversation.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.ridge import VARIANCE_FLOOR

Split = Literal["random", "leave-context-out", "paired"]
SPLITS: tuple[Split, ...] = ("random", "leave-context-out", "paired")


def fold_numbers(
    split: Split, contexts: Int[np.ndarray, "samples"], folds: int, rng: np.random.Generator
) -> Int[np.ndarray, "samples"]:
    """The test fold of each sample; except under `random`, all samples of a context share one.

    Raises:
        UserError: there are fewer contexts (or samples) than folds.
    """
    if split == "random":
        units, index = len(contexts), np.arange(len(contexts))
    else:
        distinct, index = np.unique(contexts, return_inverse=True)
        units = len(distinct)
    if units < folds:
        kind = "samples" if split == "random" else "contexts"
        raise UserError(f"The {split} split needs at least {folds} {kind} for {folds} folds; there are {units}.")
    return rng.permutation(np.arange(units) % folds)[index]


def centred_within(
    features: Float[Tensor, "samples *sites dim"], contexts: Int[np.ndarray, "samples"]
) -> Float[Tensor, "samples *sites dim"]:
    """The features less their mean over the samples of the same context."""
    centred = features.clone()
    for context in np.unique(contexts):
        rows = np.flatnonzero(contexts == context)
        centred[rows] -= features[rows].mean(0)
    return centred


def variation_within(
    features: Float[Tensor, "samples *sites dim"], contexts: Int[np.ndarray, "samples"]
) -> Float[Tensor, "*sites"]:
    """How far features vary within contexts, relative to their size: the largest of all numbers of a site, over samples
    and dimensions. What differs between the samples of a context cannot have reached a site that varies by no more than
    round-off."""
    return centred_within(features, contexts).abs().amax((0, -1)) / features.abs().amax((0, -1))


def paired_features(
    features: Float[Tensor, "probes samples dim"], contexts: Int[np.ndarray, "samples"]
) -> Float[Tensor, "probes samples dim"]:
    """Features centred within context, and exactly 0 where only round-off is left, which probes would read as
    signal."""
    centred = centred_within(features.transpose(0, 1), contexts).transpose(0, 1)
    size = features.square().mean((1, 2)).sqrt()
    varies = centred.square().mean(1).sqrt() > VARIANCE_FLOOR * size[:, None]
    return centred * varies[:, None]
