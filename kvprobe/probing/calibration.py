"""Calibrated probabilities of ridge probes, and how many bits they are worth.

A probe's probabilities are softmax(log frequency of the class + evidence / temperature). The frequency is that of the
training set, and the temperature is fitted on the inner fold (Guo et al. 2017, arXiv 1706.04599). A temperature that
was fitted on n samples says nothing about events rarer than one in n + 1, so this share of the probability follows the
frequencies alone. Without it, a few samples that a probe reads confidently and wrongly would decide its bits. A probe
that reads nothing falls back on the frequencies, not on a uniform guess, so its information is exactly zero.
"""

from dataclasses import dataclass
from math import log

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.linear import check_features, check_problem, check_variation, log_frequency
from kvprobe.probing.ridge import VARIANCE_FLOOR, RidgeEvidence, ridge_evidence

COLDEST, HOTTEST = 1e-3, 1e3
"""Bounds of the search for the best temperature; at the hottest, nothing is left of the evidence."""

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
        base_bits: surprisal of the true class, given the class frequencies only.
        inner_accuracy: accuracy on the inner fold, by outer fold: all that may be used to choose between probes.
        penalty: the chosen penalty, by outer fold.
        temperature: the divisor of the evidence, by outer fold.
    """

    predicted: Int[Tensor, "probes targets samples"]
    confidence: Float[Tensor, "probes targets samples"]
    bits: Float[Tensor, "probes targets samples"]
    base_bits: Float[Tensor, "targets samples"]
    inner_accuracy: Float[Tensor, "probes folds"]
    penalty: Float[Tensor, "probes folds"]
    temperature: Float[Tensor, "probes targets folds"]

    @property
    def information(self) -> Float[Tensor, "probes targets samples"]:
        """Bits that the features give about each sample's class; the mean is V-information (Xu et al. 2020, arXiv
        2002.10689).

        It is H(Y) − CE on test folds, where H(Y) uses the frequencies of the training folds. It is below zero where a
        probe misleads.
        """
        return self.base_bits - self.bits


def calibrated_probes(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    *,
    contexts: Int[np.ndarray, "samples"] | None = None,
    size: Float[Tensor, "probes"] | None = None,
    may_be_constant: bool = False,
) -> CalibratedResult:
    """Cross-validated probes of every target, with calibrated probabilities, a few probes at a time.

    Args:
        features: the work is done on their device.
        labels: class number of each sample, per target.
        folds: outer test fold of each sample; fold f takes fold f + 1 as its inner fold.
        contexts: number of each sample's context, where no context may be in two folds.
        size: root mean square of what the probes read before any centring, by which constant features are recognised;
            that of `features` by default.
        may_be_constant: for a floor or control, whose features may rightly be constant.

    Raises:
        UserError: fewer than three folds or an empty one, a context in two folds, labels out of range or of one
            class, fewer samples than classes, features that are constant or not finite.
    """
    check_problem(labels, folds, classes, contexts)
    count, targets = int(folds.max()) + 1, len(labels)
    out = CalibratedResult(
        torch.empty(len(features), *labels.shape, dtype=torch.long, device=features.device),
        features.new_empty(len(features), *labels.shape),
        features.new_empty(len(features), *labels.shape),
        _base_bits(labels, folds, classes).to(features.dtype),
        features.new_empty(len(features), count),
        features.new_empty(len(features), count),
        features.new_empty(len(features), targets, count),
    )
    chunk = _chunk(features, targets * classes)
    for first in range(0, len(features), chunk):
        here = slice(first, first + chunk)
        seen = features[here]
        check_features(seen)
        rms = seen.square().mean((1, 2)).sqrt() if size is None else size[here]
        if not may_be_constant:
            check_variation(seen, VARIANCE_FLOOR * rms, first)
        result = ridge_evidence(seen, labels, folds, classes, size=rms)
        temperature, log_probability = calibrated(result, labels, folds, classes)
        out.predicted[here] = result.predicted
        out.confidence[here] = log_probability.gather(-1, result.predicted[..., None])[..., 0].exp()
        out.bits[here] = -log_probability.gather(-1, _true_classes(log_probability, labels))[..., 0] / log(2)
        out.inner_accuracy[here] = result.inner_accuracy
        out.penalty[here] = result.penalty
        out.temperature[here] = temperature
    return out


def calibrated(
    result: RidgeEvidence, labels: Int[Tensor, "targets samples"], folds: Int[Tensor, "samples"], classes: int
) -> tuple[Float[Tensor, "probes targets folds"], Float[Tensor, "probes targets samples classes"]]:
    """Temperature by outer fold, and the log probabilities of every sample's classes, on its test fold."""
    count = int(folds.max()) + 1
    temperatures, out = [], torch.empty_like(result.evidence)
    for fold in range(count):
        inner, test = folds == (fold + 1) % count, folds == fold
        prior = log_frequency(labels[:, ~inner & ~test], classes)[:, None].to(out.dtype)
        temperature = fit_temperature(result.inner_evidence[:, :, inner], prior, labels[:, inner])
        prior = log_frequency(labels[:, ~test], classes)[:, None].to(out.dtype)
        posterior = (prior + result.evidence[:, :, test] / temperature[..., None, None]).log_softmax(-1)
        rare = 1 / (int(inner.sum()) + 1)
        out[:, :, test] = torch.logaddexp(posterior + log(1 - rare), prior + log(rare))
        temperatures.append(temperature)
    return torch.stack(temperatures, -1), out


def fit_temperature(
    evidence: Float[Tensor, "probes targets samples classes"],
    prior: Float[Tensor, "targets 1 classes"],
    labels: Int[Tensor, "targets samples"],
) -> Float[Tensor, "probes targets"]:
    """The temperature of least cross-entropy of softmax(prior + evidence / temperature), by bisection.

    Cross-entropy is convex in the inverse temperature, so the sign of its slope says on which side the minimum is.
    """
    truth = evidence.gather(-1, _true_classes(evidence, labels))[..., 0].mean(-1)
    low = torch.full_like(truth, log(COLDEST))
    high = torch.full_like(truth, log(HOTTEST))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        probability = (prior + evidence * (-middle).exp()[..., None, None]).softmax(-1)
        hotter = (probability * evidence).sum(-1).mean(-1) >= truth
        low, high = torch.where(hotter, middle, low), torch.where(hotter, high, middle)
    return high.exp()


def _true_classes(
    scores: Float[Tensor, "probes targets samples classes"], labels: Int[Tensor, "targets samples"]
) -> Int[Tensor, "probes targets samples 1"]:
    return labels.expand(len(scores), -1, -1)[..., None]


def _base_bits(
    labels: Int[Tensor, "targets samples"], folds: Int[Tensor, "samples"], classes: int
) -> Float[Tensor, "targets samples"]:
    """Surprisal of each label, given the class frequencies of the other folds."""
    out = torch.empty(labels.shape, device=labels.device)
    for fold in range(int(folds.max()) + 1):
        test = folds == fold
        out[:, test] = -log_frequency(labels[:, ~test], classes).gather(1, labels[:, test]) / log(2)
    return out


def _chunk(features: Float[Tensor, "probes samples dim"], outputs: int) -> int:
    """How many probes to solve at once."""
    _, samples, dim = features.shape
    per_probe = features.element_size() * (samples * (2 * dim + 6 * outputs) + 4 * dim * dim + 20 * dim * outputs)
    room = _CHUNK_BYTES
    if features.device.type == "cuda":
        room = int(_DEVICE_SHARE * torch.cuda.mem_get_info(features.device)[0])
    return max(1, room // per_probe)
