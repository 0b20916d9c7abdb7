"""Features with a known signal: what the best of all probes would get right, and how many bits it would be worth."""

import numpy as np
import torch


def planted(
    samples: int, classes: int, signal: float, probes: int = 1, targets: int = 1, spare: int = 2, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, labels and five folds: each class of each target pushes an axis of its own by `signal` standard
    deviations.

    The axes are then mixed by a rotation of the probe's own, scaled each by another factor, and moved far from zero.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (targets, samples), generator=generator)
    dim = targets * classes + spare
    pushed = torch.zeros(samples, dim)
    for target, each in enumerate(labels):
        pushed[torch.arange(samples), target * classes + each] = signal
    features = pushed + torch.randn(probes, samples, dim, generator=generator)
    mixing = torch.linalg.qr(torch.randn(probes, dim, dim, generator=generator)).Q * torch.logspace(-1, 1, dim)
    folds = torch.randperm(samples, generator=generator) % 5
    return features @ mixing + 30, labels, folds


def bayes_accuracy(classes: int, signal: float) -> float:
    """How often the pushed axis is the largest: ∫ φ(x - signal) Φ(x)^(classes - 1) dx."""
    grid = torch.linspace(-8, 8 + signal, 20_001, dtype=torch.float64)
    density = torch.exp(-((grid - signal) ** 2) / 2) / np.sqrt(2 * np.pi)
    return float(torch.trapezoid(density * torch.special.ndtr(grid) ** (classes - 1), grid))


def bayes_bits(classes: int, signal: float, draws: int = 200_000) -> float:
    """Mutual information of class and features, from draws of the true posterior."""
    generator = torch.Generator().manual_seed(1)
    axes = torch.randn(draws, classes, generator=generator, dtype=torch.float64)
    axes[:, 0] += signal
    posterior = (signal * axes).log_softmax(1)[:, 0]
    return float((posterior + np.log(classes)).mean() / np.log(2))
