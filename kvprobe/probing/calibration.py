"""Calibrated probabilities of ridge probes, and how many bits they are worth.

A probe's probabilities are softmax(log frequency of the class + evidence / temperature). The frequency is that of the
training set, and the temperature is fitted on the inner fold (Guo et al. 2017, arXiv 1706.04599). A temperature that
was fitted on n samples says nothing about events rarer than one in n + 1, so this share of the probability follows the
frequencies alone. Without it, a few samples that a probe reads confidently and wrongly would decide its bits. A probe
that reads nothing falls back on the frequencies, not on a uniform guess, so its information is exactly zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.linear import check_problem, log_frequency
from kvprobe.probing.ridge import RidgeEvidence, ridge_evidence
from kvprobe.threads import one_thread

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


@one_thread()
def calibrated_tasks(
    features: Float[Tensor, "probes samples dim"],
    tasks: Sequence[Int[Tensor, "_ samples"]],
    folds: Int[Tensor, "samples"],
    classes: int,
    *,
    contexts: Int[np.ndarray, "samples"] | None = None,
    size: Float[Tensor, "probes"] | None = None,
) -> list[CalibratedResult]:
    """Cross-validated probes with calibrated probabilities: of several tasks (the labels of each) from the same
    features, a few probes at a time.

    Args:
        features: the work is done on their device.
        tasks: of each, the class number of each sample, per target.
        folds: outer test fold of each sample; fold f takes fold f + 1 as its inner fold.
        contexts: number of each sample's context, where no context may be in two folds.
        size: root mean square of what the probes read before any centring, by which constant features are recognised
            (they carry no information); that of `features` by default.

    Raises:
        UserError: fewer than three folds or an empty one, a context in two folds, labels out of range or of one
            class, fewer samples than classes, or features that are not finite.
    """
    for labels in tasks:
        check_problem(labels, folds, classes, contexts)
    chunk, results = _chunk(features, classes * sum(map(len, tasks))), []
    for first in range(0, len(features), chunk):
        here = slice(first, first + chunk)
        fitted = ridge_evidence(features[here], tasks, folds, classes, size=None if size is None else size[here])
        results.append([_calibrated(*pair, folds, classes) for pair in zip(fitted, tasks, strict=True)])
    return [joined(parts) for parts in zip(*results, strict=True)]


def joined(parts: Sequence[CalibratedResult]) -> CalibratedResult:
    """The results of several batches of probes of one task."""
    names = ("predicted", "confidence", "bits", "inner_accuracy", "penalty", "temperature")
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _calibrated(
    result: RidgeEvidence, labels: Int[Tensor, "targets samples"], folds: Int[Tensor, "samples"], classes: int
) -> CalibratedResult:
    """Probabilities of every sample's classes, by the temperature of its test fold."""
    count = int(folds.max()) + 1
    before, base = result.evidence.new_empty(2, *labels.shape, classes)  # the fold before a sample's chose by it
    for fold in range(count):
        test, inner = folds == fold, folds == (fold + 1) % count
        base[:, test] = log_frequency(labels[:, ~test], classes)[:, None].to(base.dtype)
        before[:, inner] = log_frequency(labels[:, ~inner & ~test], classes)[:, None].to(base.dtype)
    chosen_by = (folds - 1) % count
    temperature = fit_temperature(result.inner_evidence, before, labels, chosen_by)
    posterior = (base + result.evidence / temperature[..., folds, None]).log_softmax(-1)
    rare = (1 / (torch.bincount(chosen_by, minlength=count) + 1)).to(base.dtype)[folds, None]
    log_probability = torch.logaddexp(posterior + torch.log1p(-rare), base + rare.log())
    return CalibratedResult(
        predicted=result.predicted,
        confidence=log_probability.gather(-1, result.predicted[..., None])[..., 0].exp(),
        bits=-_of_truth(log_probability, labels) / log(2),
        base_bits=-base.gather(-1, labels[..., None])[..., 0] / log(2),
        inner_accuracy=result.inner_accuracy,
        penalty=result.penalty,
        temperature=temperature,
    )


def fit_temperature(
    evidence: Float[Tensor, "probes targets samples classes"],
    prior: Float[Tensor, "targets _ classes"],
    labels: Int[Tensor, "targets samples"],
    groups: Int[Tensor, "samples"],
) -> Float[Tensor, "probes targets groups"]:
    """The temperature of least cross-entropy of softmax(prior + evidence / temperature) in each group of samples, by
    bisection.

    Cross-entropy is convex in the inverse temperature, so the sign of its slope says on which side the minimum is.
    """
    members = torch.nn.functional.one_hot(groups).to(evidence.dtype)
    truth = _of_truth(evidence, labels) @ members
    # A softmax over any but the last axis is several times faster.
    evidence, prior = evidence.mT.contiguous(), prior.mT.contiguous()
    low = torch.full_like(truth, log(COLDEST))
    high = torch.full_like(truth, log(HOTTEST))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        sharpness = (-middle).exp()[..., None, groups]
        probability = (prior + evidence * sharpness).softmax(-2)
        hotter = (probability * evidence).sum(-2) @ members >= truth
        low, high = torch.where(hotter, middle, low), torch.where(hotter, high, middle)
    return high.exp()


def _of_truth(
    scores: Float[Tensor, "probes targets samples classes"], labels: Int[Tensor, "targets samples"]
) -> Float[Tensor, "probes targets samples"]:
    """Each sample's score of its true class."""
    return scores.gather(-1, labels.expand(len(scores), -1, -1)[..., None])[..., 0]


def _chunk(features: Float[Tensor, "probes samples dim"], outputs: int) -> int:
    """How many probes to solve at once."""
    _, samples, dim = features.shape
    per_probe = features.element_size() * (samples * (2 * dim + 9 * outputs) + 4 * dim * dim + 4 * dim * outputs)
    room = _CHUNK_BYTES
    if features.device.type == "cuda":
        room = int(_DEVICE_SHARE * torch.cuda.mem_get_info(features.device)[0])
    return max(1, room // per_probe)
