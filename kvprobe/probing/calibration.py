"""Probabilities that can be believed, from ridge or logistic probes, and the bits that they are worth.

A probe's probabilities are softmax(log frequency of the class + evidence / temperature), the frequency that of its training
set and the temperature fitted on the inner fold (Guo et al. 2017, arXiv 1706.04599). A temperature that was fitted on n samples
says nothing of what happens less than once in n + 1: this share of the probability goes by the frequencies alone. Without it a few
samples of which a probe is sure and wrong would decide its bits. A probe that reads nothing falls back on the frequencies and not
on a uniform guess: its information is then zero, neither more nor less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.linear import OutOfFold, check_features, check_problem, check_variation, log_frequency
from kvprobe.probing.logistic import LOGISTIC_PENALTIES, logistic_evidence
from kvprobe.probing.ridge import PENALTIES, VARIANCE_FLOOR, ridge_evidence

Solver = Literal["ridge", "logistic"]

_SOLVERS = {"ridge": (ridge_evidence, PENALTIES), "logistic": (logistic_evidence, LOGISTIC_PENALTIES)}

COLDEST, HOTTEST = 1e-3, 1e3
"""Temperatures between which the best is sought; at the hottest nothing is left of the evidence."""

_HALVINGS = 14  # to a thousandth of the temperature
_CHUNK_BYTES = 60_000_000  # of features and scores at once on a CPU: more would not be faster
_DEVICE_SHARE = 0.2  # of a device's free memory, for the features and scores of a chunk


@dataclass(frozen=True)
class CalibratedResult:
    """Out-of-fold predictions of a batch of probes, with their probabilities.

    Attributes:
        predicted: class of each sample, by probes that were not trained on it.
        confidence: calibrated probability of that class.
        bits: surprisal of the true class, -log2 of its calibrated probability.
        base_bits: surprisal of the true class to one who knows the class frequencies only.
        inner_accuracy: accuracy on the inner fold, by outer fold: all that may be used to choose between probes.
        penalty: the chosen penalty, by outer fold.
        temperature: what the evidence was divided by, by outer fold.
    """

    predicted: Int[Tensor, "probes targets samples"]
    confidence: Float[Tensor, "probes targets samples"]
    bits: Float[Tensor, "probes targets samples"]
    base_bits: Float[Tensor, "targets samples"]
    inner_accuracy: Float[Tensor, "probes folds"]
    penalty: Float[Tensor, "probes targets folds"]
    temperature: Float[Tensor, "probes targets folds"]

    @property
    def information(self) -> Float[Tensor, "probes targets samples"]:
        """Bits that the features tell of each sample's class; the mean is V-information (Xu et al. 2020, arXiv 2002.10689).

        It is H(Y) − CE on test folds, H(Y) too measured with frequencies of the training folds; below zero where a probe
        misleads.
        """
        return self.base_bits - self.bits


def calibrated_probes(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    solver: Solver = "ridge",
    *,
    contexts: Int[np.ndarray, "samples"] | None = None,
    penalties: Sequence[float] | None = None,
    size: Float[Tensor, "probes"] | None = None,
    may_be_constant: bool = False,
) -> CalibratedResult:
    """Cross-validated probes of every target, with calibrated probabilities, a few probes at a time.

    Args:
        features: where they lie, the work is done.
        labels: class number of each sample, per target.
        folds: outer test fold of each sample; fold f takes fold f + 1 as its inner fold.
        contexts: number of each sample's context, where no context may be in two folds.
        penalties: those of the solver by default.
        size: root mean square of what the probes read before any centring, against which constant features are
            told; that of `features` by default.
        may_be_constant: for a floor or control, whose features rightly may not vary.

    Raises:
        UserError: fewer than three folds or an empty one, a context in two folds, labels out of range or of one
            class, fewer samples than classes, features that are constant or not finite.
    """
    check_problem(labels, folds, classes, contexts)
    solve, usual = _SOLVERS[solver]
    penalties = usual if penalties is None else penalties
    count, targets = int(folds.max()) + 1, len(labels)
    out = CalibratedResult(
        torch.empty(len(features), *labels.shape, dtype=torch.long, device=features.device),
        features.new_empty(len(features), *labels.shape),
        features.new_empty(len(features), *labels.shape),
        _base_bits(labels, folds, classes).to(features.dtype),
        features.new_empty(len(features), count),
        features.new_empty(len(features), targets, count),
        features.new_empty(len(features), targets, count),
    )
    chunk = _chunk(features, targets * classes)
    for first in range(0, len(features), chunk):
        here = slice(first, first + chunk)
        seen = features[here]
        check_features(seen)
        read = seen.square().mean((1, 2)).sqrt() if size is None else size[here]
        if not may_be_constant:
            check_variation(seen, VARIANCE_FLOOR * read, first)
        found = solve(seen, labels, folds, classes, penalties, read)
        temperature, probability = calibrated(found, labels, folds, classes)
        out.predicted[here] = found.predicted
        out.confidence[here] = probability.gather(-1, found.predicted[..., None])[..., 0].exp()
        out.bits[here] = -probability.gather(-1, _answers(probability, labels))[..., 0] / log(2)
        out.inner_accuracy[here] = found.inner_accuracy
        out.penalty[here] = found.penalty
        out.temperature[here] = temperature
    return out


def calibrated(
    found: OutOfFold, labels: Int[Tensor, "targets samples"], folds: Int[Tensor, "samples"], classes: int
) -> tuple[Float[Tensor, "probes targets folds"], Float[Tensor, "probes targets samples classes"]]:
    """Temperature by outer fold, and the log probabilities of every sample's classes, on its test fold."""
    count = int(folds.max()) + 1
    temperatures, out = [], torch.empty_like(found.evidence)
    for fold in range(count):
        inner, test = folds == (fold + 1) % count, folds == fold
        known = log_frequency(labels[:, ~inner & ~test], classes)[:, None].to(out.dtype)
        temperature = fit_temperature(found.inner_evidence[:, :, inner], known, labels[:, inner])
        known = log_frequency(labels[:, ~test], classes)[:, None].to(out.dtype)
        told = (known + found.evidence[:, :, test] / temperature[..., None, None]).log_softmax(-1)
        rare = 1 / (int(inner.sum()) + 1)
        out[:, :, test] = torch.logaddexp(told + log(1 - rare), known + log(rare))
        temperatures.append(temperature)
    return torch.stack(temperatures, -1), out


def fit_temperature(
    evidence: Float[Tensor, "probes targets samples classes"],
    known: Float[Tensor, "targets 1 classes"],
    labels: Int[Tensor, "targets samples"],
) -> Float[Tensor, "probes targets"]:
    """The temperature of least cross-entropy of softmax(known + evidence / temperature), by bisection.

    Cross-entropy is convex in the inverse temperature, so the sign of its slope says on which side the minimum is.
    """
    truth = evidence.gather(-1, _answers(evidence, labels))[..., 0].mean(-1)
    low = torch.full_like(truth, log(COLDEST))
    high = torch.full_like(truth, log(HOTTEST))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        probability = (known + evidence * (-middle).exp()[..., None, None]).softmax(-1)
        hotter = (probability * evidence).sum(-1).mean(-1) >= truth
        low, high = torch.where(hotter, middle, low), torch.where(hotter, high, middle)
    return high.exp()


def _answers(
    scores: Float[Tensor, "probes targets samples classes"], labels: Int[Tensor, "targets samples"]
) -> Int[Tensor, "probes targets samples 1"]:
    return labels.expand(len(scores), -1, -1)[..., None]


def _base_bits(
    labels: Int[Tensor, "targets samples"], folds: Int[Tensor, "samples"], classes: int
) -> Float[Tensor, "targets samples"]:
    """Surprisal of each label to one who knows the class frequencies of the other folds."""
    out = torch.empty(labels.shape, device=labels.device)
    for fold in range(int(folds.max()) + 1):
        test = folds == fold
        out[:, test] = -log_frequency(labels[:, ~test], classes).gather(1, labels[:, test]) / log(2)
    return out


def _chunk(features: Float[Tensor, "probes samples dim"], outputs: int) -> int:
    """How many probes to solve at once."""
    _, samples, dim = features.shape
    each = features.element_size() * (samples * (2 * dim + 6 * outputs) + 4 * dim * dim + 20 * dim * outputs)
    room = _CHUNK_BYTES
    if features.device.type == "cuda":
        room = int(_DEVICE_SHARE * torch.cuda.mem_get_info(features.device)[0])
    return max(1, room // each)
