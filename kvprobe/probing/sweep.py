"""A sweep: the same probe at every layer and read-out, under one split, as predictions and as a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.intervals import held_out_means
from kvprobe.probing.ridge import RidgeResult, ridge_probes
from kvprobe.probing.splits import Split, centred_within
from kvprobe.stats import SHARE

READS = ("mean", "last")
"""How a segment's slots become one vector: their mean, or the last one."""

_CHUNK_BYTES = 30_000_000  # of Gram matrices at once: more would not stay in the processor's cache, and be half as fast


def read_outs(stacked: Tensor) -> Float[Tensor, "rows layers reads dim"]:
    """Captured layers of a family as one vector per row and layer, KV heads side by side: the mean over the slots,
    and the last slot.

    Args:
        stacked: `[layers, rows, kv_heads, slots, d_head]` or `[layers, rows, slots, d_model]`.
    """
    vectors = stacked.float()
    if vectors.dim() == 5:
        vectors = vectors.permute(0, 1, 3, 2, 4).flatten(3)
    return torch.stack([vectors.mean(2), vectors[:, :, -1]], 2).transpose(0, 1)


def sites(features: Float[Tensor, "rows layers reads dim"]) -> list[tuple[int, int]]:
    """(layer, read-out) of every probe of a sweep, in order."""
    _, layers, reads, _ = features.shape
    return [(layer, read) for layer in range(layers) for read in range(reads)]


def sweep(
    features: Float[Tensor, "rows layers reads dim"],
    rows: Int[np.ndarray, "samples"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    split: Split,
    folds: Int[np.ndarray, "samples"],
    classes: int,
) -> RidgeResult:
    """Probes at every site, a few at a time so that little is held at once.

    Args:
        rows: which row of `features` each sample reads; several may read the same.
        split: `paired` centres features within each context first.
    """
    places, dim = sites(features), features.shape[-1]
    chunk = max(1, _CHUNK_BYTES // (4 * dim * dim * (int(folds.max()) + 1)))
    results = []
    for first in range(0, len(places), chunk):
        layers, reads = (torch.tensor(index) for index in zip(*places[first : first + chunk], strict=True))
        seen = features[:, layers, reads][torch.from_numpy(rows)]
        size = seen.square().mean((0, 2)).sqrt()
        if split == "paired":
            seen = centred_within(seen, contexts)
        probes = seen.transpose(0, 1).contiguous()
        results.append(ridge_probes(probes, labels, torch.from_numpy(folds), classes, size=size))
    return RidgeResult(
        torch.cat([result.predicted for result in results]),
        torch.cat([result.inner_accuracy for result in results]),
        torch.cat([result.penalty for result in results]),
    )


def best_by_inner_fold(
    candidates: Sequence[tuple[str, tuple[int, int], RidgeResult, int]], folds: Int[np.ndarray, "samples"]
) -> tuple[Int[np.ndarray, "samples digits"], list[dict[str, Any]]]:
    """For each test fold, the predictions of the one probe that did best on that fold's inner fold.

    The choice never sees the test fold, so the accuracy of these predictions is not flattered by the search over
    layers, families and read-outs.
    """
    inner = torch.stack([result.inner_accuracy[index] for *_, result, index in candidates])
    targets = candidates[0][2].predicted.shape[1]
    predicted = np.empty((len(folds), targets), dtype=np.int64)
    picks = []
    for fold in range(inner.shape[1]):
        family, (layer, read), result, index = candidates[int(inner[:, fold].argmax())]
        rows = np.flatnonzero(folds == fold)
        predicted[rows] = result.predicted[index][:, rows].T.numpy()
        picks.append({"fold": fold, "family": family, "layer": layer, "read": READS[read]})
    return predicted, picks


def accuracy_table(
    result: RidgeResult,
    places: list[tuple[int, int]],
    labels: Int[Tensor, "targets samples"],
    clusters: Int[np.ndarray, "samples"],
    **constant: str,
) -> pd.DataFrame:
    """One row per site: accuracy (mean over targets) with its interval, beside the `constant` columns."""
    hits = result.predicted.eq(labels).double().mean(1).numpy()
    accuracy, low, high = held_out_means(hits, clusters, SHARE)
    return pd.DataFrame(
        {
            **constant,
            "read": [READS[read] for _, read in places],
            "layer": [layer for layer, _ in places],
            "accuracy": accuracy,
            "low": low,
            "high": high,
        }
    )
