"""Online codelength: how many bits it takes to send the labels to someone who has the features (Voita and Titov 2020).

The samples are sent in blocks of growing size. Probes fitted on all blocks so far code the next one, so a codelength
counts both how well a probe does in the end and how much data it needs to get there. Nothing is held out, and nothing
is tuned on samples that were not sent yet. Instead of choosing a penalty, all candidates code side by side and are
mixed by how well they have done so far: the mixture is at most log2(candidates) bits longer than the best of them. A
uniform guess is one of the candidates, so that labels which the features say nothing about cost hardly more than the
uniform code.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import log, log2

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.gram import one_hot_answers
from kvprobe.probing.intervals import INFORMATION, held_out_means
from kvprobe.probing.linear import check_features
from kvprobe.probing.ridge import PENALTIES, VARIANCE_FLOOR
from kvprobe.probing.splits import Split
from kvprobe.threads import one_thread
from kvprobe.tidy import crossed

BLOCKS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Where blocks end, as shares of the samples (Voita and Titov 2020, section 2.2)."""

SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Factors between ridge scores, which regress on 0 and 1, and logits."""

_CHUNK_BYTES = 100_000_000


@one_thread()
def description(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    classes: int,
    *,
    split: Split = "leave-context-out",
    blocks: Sequence[float] = BLOCKS,
    rng: np.random.Generator | None = None,
) -> pd.DataFrame:
    """Online codelength of every target from every probe's features, beside a uniform and a context-only code.

    One row per probe and target: `bits`, `uniform_bits` and `context_bits` per label, `compression` (uniform bits over
    bits) with `low` and `high` over contexts, and `saved`, bits per label fewer than the context alone needs, with
    `saved_low` and `saved_high`.

    Args:
        features: those of `kvprobe.probing.splits.paired_features`, if the split is `paired`.
        split: `random` sends samples in any order; otherwise whole contexts are sent, each in one block.
        blocks: where blocks end, as rising shares of the samples, the last one 1.
        rng: of the order; seeded with 0 by default.

    Raises:
        UserError: blocks that do not rise to 1, labels out of range or of one class, or features that are not
            finite.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    _check(features, labels, classes, blocks)
    _, clusters = np.unique(contexts, return_inverse=True)
    units = np.arange(len(clusters)) if split == "random" else clusters
    order = np.argsort(rng.permutation(int(units.max()) + 1)[units], kind="stable")
    features, labels, clusters, units = features[:, order], labels[:, order], clusters[order], units[order]
    ends = block_ends(units, blocks)

    chunk = max(1, _CHUNK_BYTES // (4 * len(PENALTIES) * len(SHARPNESS) * labels.numel() * classes))
    probes = torch.cat([_bits(part, labels, ends, classes) for part in features.split(chunk)])
    bits = probes.cpu().numpy()
    context = _context_bits(torch.from_numpy(clusters), labels.cpu(), ends, classes).numpy()

    mean, low, high = held_out_means(bits, clusters, INFORMATION)
    saved, saved_low, saved_high = held_out_means(context - bits, clusters)
    with np.errstate(divide="ignore"):
        best = log2(classes) / low
    columns = {
        "bits": mean,
        "uniform_bits": np.full(mean.shape, log2(classes)),
        "context_bits": np.broadcast_to(context.mean(-1), mean.shape),
        "compression": log2(classes) / mean,
        "low": log2(classes) / high,
        "high": best,
        "saved": saved,
        "saved_low": saved_low,
        "saved_high": saved_high,
    }
    return crossed({"probe": range(mean.shape[0]), "target": range(mean.shape[1])}, columns)


def ridge_log_probs(
    train: Float[Tensor, "probes train dim"],
    labels: Int[Tensor, "targets train"],
    test: Float[Tensor, "probes test dim"],
    classes: int,
) -> Float[Tensor, "candidates probes targets test classes"]:
    """Log-softmax of ridge scores of unseen samples, for each penalty of `PENALTIES` and each factor of `SHARPNESS`."""
    mean = train.mean(1, keepdim=True)
    spread = train.std(1, keepdim=True, correction=0)
    size = train.square().mean((1, 2), keepdim=True).sqrt()
    scale = torch.where(spread > VARIANCE_FLOOR * size, 1 / spread, 0.0)
    seen, asked = (train - mean) * scale, (test - mean) * scale
    answers = one_hot_answers(labels, classes, train.dtype)
    # One eigendecomposition serves all penalties. In fp32 the search for repeated eigenvalues may not end.
    gram = seen.mT @ seen
    values, vectors = (part.to(gram.dtype) for part in torch.linalg.eigh(gram.double()))
    projected, cross = asked @ vectors, vectors.mT @ (seen.mT @ (answers - answers.mean(0)))
    penalties = len(seen[0]) * torch.tensor(PENALTIES).to(train)
    shrunk = cross / (values.clamp(min=0)[None] + penalties[:, None, None])[..., None]
    scores = (answers.mean(0) + projected @ shrunk).unflatten(-1, (-1, classes)).transpose(2, 3)
    sharpened = torch.tensor(SHARPNESS).to(train)[:, None, None, None, None, None] * scores
    return sharpened.flatten(0, 1).log_softmax(-1)


def _check(features: Tensor, labels: Tensor, classes: int, blocks: Sequence[float]) -> None:
    rising = all(early < late for early, late in pairwise((0.0, *blocks)))
    if not blocks or not rising or blocks[-1] != 1:
        raise UserError(f"Blocks must rise from above 0 to 1, the end of the samples; got {tuple(blocks)}.")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UserError(f"Labels must lie in 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}.")
    for target, row in enumerate(labels):
        if len(row.unique()) == 1:
            raise UserError(f"Target {target} has one class in all samples, so there is nothing to send; drop it.")
    check_features(features)


def block_ends(units: Int[np.ndarray, "samples"], blocks: Sequence[float]) -> list[int]:
    """Where blocks end, at a boundary of units (samples, or whole contexts), in order and without empty blocks."""
    bounds = np.append(np.flatnonzero(np.diff(units)) + 1, len(units))
    wanted = np.ceil(np.asarray(blocks) * len(units))
    return sorted({int(bounds[np.searchsorted(bounds, end)]) for end in wanted})


def _bits(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    ends: Sequence[int],
    classes: int,
) -> Float[Tensor, "probes targets samples"]:
    """Bits for each label, in the order in which they are sent."""
    log_likelihoods = []
    for start, end in pairwise(ends):
        log_probs = ridge_log_probs(features[:, :start], labels[:, :start], features[:, start:end], classes)
        asked = labels[None, None, :, start:end, None].expand(*log_probs.shape[:2], -1, -1, 1)
        log_likelihoods.append(log_probs.gather(-1, asked)[..., 0].double())
    first = torch.full((len(features), len(labels), ends[0]), log2(classes), dtype=torch.double, device=features.device)
    if not log_likelihoods:
        return first
    candidates = torch.cat(log_likelihoods, -1)
    # The uniform guess is a candidate, too.
    candidates = torch.cat([candidates, torch.full_like(candidates[:1], -log(classes))])
    evidence = candidates.cumsum(-1).logsumexp(0) - log(len(candidates))
    return torch.cat([first, -torch.diff(evidence, dim=-1, prepend=torch.zeros_like(evidence[..., :1])) / log(2)], -1)


def _context_bits(
    contexts: Int[Tensor, "samples"], labels: Int[Tensor, "targets samples"], ends: Sequence[int], classes: int
) -> Float[Tensor, "targets samples"]:
    """Bits for each label by counts in its own context so far, which start as one count spread as the labels of all
    contexts so far, and these as one for each class."""
    bits = torch.full(labels.shape, log2(classes), dtype=torch.double)
    width = int(contexts.max()) + 1
    for start, end in pairwise(ends):
        for target, row in enumerate(labels):
            cells = contexts[:start] * classes + row[:start]
            counted = torch.bincount(cells, minlength=width * classes).view(width, classes).double()
            overall = (counted.sum(0) + 1) / (start + classes)
            table = (counted + overall) / (counted.sum(1, keepdim=True) + 1)
            bits[target, start:end] = -table[contexts[start:end], row[start:end]].log2()
    return bits
