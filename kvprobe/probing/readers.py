"""A ladder of readers, from a ridge on averages to a transformer: each learns from some samples, and says for others
how much speaks for each class of each label.

A quarter or so of the training samples, its inner fold, chooses a reader's site, stops its training, and calibrates it;
tested samples are touched once. All are calibrated alike, so that their bits can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvprobe.probing.calibration import fit_temperature
from kvprobe.probing.linear import log_frequency
from kvprobe.probing.networks import AttentionPooled, Descent, Hidden, Transformer, trained, whitening
from kvprobe.probing.ridge import FittedFold, fitted_by_fold
from kvprobe.threads import one_thread

Rung = Literal["pooled", "slot", "attention", "hidden", "transformer"]
BEST = 4
"""Layers that the reader with a hidden layer sees: those whose ridge probes read most on the inner fold."""
_NETWORK = Descent()
Labels = Int[Tensor, "targets samples"]


@dataclass(frozen=True)
class Known:
    """What a reader is given: features and labels of samples. Fold 0 is tested, fold 1 is the inner fold, and fold 2 is
    trained on.

    Attributes:
        seed: of random weights and batches.
        classes: that each label can be of.
    """

    features: Shaped[Tensor, "samples *shape"]
    labels: Labels
    folds: Int[Tensor, "samples"]
    seed: int
    classes: int = 10

    @property
    def inner(self) -> Tensor:
        return self.folds == 1

    @property
    def tested(self) -> Tensor:
        return self.folds == 0


@dataclass(frozen=True)
class Evidence:
    """What a reader says about the inner fold and the tested samples, beyond how frequent classes are."""

    inner: Float[Tensor, "targets inner classes"]
    tested: Float[Tensor, "targets tested classes"]


def read(rung: Rung, known: Known) -> Evidence:
    """What a reader makes of it: of averages (`samples layers width`), or of slots (`samples layers slots width`)."""
    return _READERS[rung](known)


def scored(known: Known, evidence: Evidence) -> tuple[Float[Tensor, "targets tested"], Float[Tensor, "targets tested"]]:
    """Whether each label of the tested samples is read, and how many bits are gained about it: those of an even draw
    from its classes, less its surprisal given the evidence. Where labels are drawn so, nothing is gained by chance."""
    said, truth = calibrated(known, evidence), known.labels[:, known.tested]
    gained = said.gather(-1, truth[..., None])[..., 0] + log(known.classes)
    return said.argmax(-1).eq(truth).double(), gained / log(2)


@one_thread()
def calibrated(known: Known, evidence: Evidence) -> Float[Tensor, "targets tested classes"]:
    """The log-probability of each class of each label of the tested samples.

    The temperature is that of least cross-entropy on the inner fold; as there, a share of 1 / (n + 1) follows the
    frequencies (see `kvprobe.probing.calibration`).
    """
    labels = known.labels
    base = log_frequency(labels[:, ~known.tested], known.classes)[:, None].double()
    inner, tested = evidence.inner.double(), evidence.tested.double()
    count = int(known.inner.sum())
    everywhere = torch.zeros(count, dtype=torch.long, device=labels.device)
    prior = base.expand(-1, count, -1)
    temperature = fit_temperature(inner[None], prior, labels[:, known.inner], everywhere)[0]
    posterior = (base + tested / temperature[..., None]).log_softmax(-1)
    rare = torch.tensor(1 / (count + 1), dtype=torch.float64, device=labels.device)
    return torch.logaddexp(posterior + torch.log1p(-rare), base + rare.log())


@one_thread()
def ridge(sites: Float[Tensor, "sites samples dim"], known: Known) -> FittedFold:
    """Ridge probes of every site; see `kvprobe.probing.ridge`."""
    (fitted,) = next(fitted_by_fold(sites, [known.labels], known.folds, known.classes, only=[0]))
    return fitted


def _of_site(fitted: FittedFold, site: int) -> Evidence:
    return Evidence(fitted.inner_evidence[site], fitted.evidence[site])


def _pooled(known: Known) -> Evidence:
    """Ridge on K and V, averaged over the segment, of the layer that reads most on the inner fold, or of all."""
    layers = known.features.float().transpose(0, 1).contiguous()
    fits = [ridge(layers, known), ridge(known.features.float().flatten(1)[None], known)]
    best = [float(fitted.inner_accuracy.max()) for fitted in fits]
    chosen = fits[best[1] > best[0]]
    return _of_site(chosen, int(chosen.inner_accuracy.argmax()))


def _slot(known: Known) -> Evidence:
    """Ridge on one slot, counted from the segment's end, at one layer."""
    best, evidence = -1.0, None
    for layer in known.features.unbind(1):
        fitted = ridge(layer.float().transpose(0, 1).contiguous(), known)
        accuracy = float(fitted.inner_accuracy.max())
        if accuracy > best:
            best, evidence = accuracy, _of_site(fitted, int(fitted.inner_accuracy.argmax()))
    assert evidence is not None
    return evidence


def _hidden(known: Known) -> Evidence:
    """A network with one hidden layer on the averages of the best layers."""
    layers = known.features.float()
    fitted = ridge(layers.transpose(0, 1).contiguous(), known)
    seen = layers[:, fitted.inner_accuracy.topk(min(BEST, layers.shape[1])).indices].flatten(1)
    white = whitening(seen[:, None], known.folds == 2)[:, 0]
    return learned(known, white, lambda width: Hidden(width, len(known.labels), known.classes))


def _attention(known: Known) -> Evidence:
    """Attention over slots and layers, from which labels are read linearly."""
    layers, slots = known.features.shape[1:3]
    return _of_slots(known, lambda width: AttentionPooled(layers, slots, width, len(known.labels), known.classes))


def _transformer(known: Known) -> Evidence:
    """A transformer of two layers over slots and layers."""
    layers, slots = known.features.shape[1:3]
    return _of_slots(known, lambda width: Transformer(layers, slots, width, len(known.labels), known.classes))


def _of_slots(known: Known, network: Callable[[int], torch.nn.Module]) -> Evidence:
    samples, layers, slots, width = known.features.shape
    by_layer = known.features.transpose(1, 2).reshape(samples * slots, layers, width)
    rows = (known.folds == 2).repeat_interleave(slots)
    white = whitening(by_layer, rows).view(samples, slots, layers, width).transpose(1, 2).to(known.features.dtype)
    return learned(known, white, network)


def learned(known: Known, seen: Tensor, network: Callable[[int], torch.nn.Module], how: Descent = _NETWORK) -> Evidence:
    """What a network says once it was trained on what it sees of the training samples."""
    inner, tested = trained(network, seen, known.labels, known.folds, known.seed, how)
    frequency = log_frequency(known.labels[:, known.folds == 2], known.classes)[:, None]
    return Evidence(inner - frequency, tested - frequency)


_READERS: dict[Rung, Callable[[Known], Evidence]] = {
    "pooled": _pooled,
    "slot": _slot,
    "attention": _attention,
    "hidden": _hidden,
    "transformer": _transformer,
}
