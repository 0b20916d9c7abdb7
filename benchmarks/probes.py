"""All probes of a model's cache at once, beside a loop over scikit-learn's logistic regression: time a probe, accuracy,
memory.

The sizes are SmolLM2-135M's: 30 layers × K and V × 3 heads × 8 positions of 64 numbers, 2,000 samples, 10 classes, 5
targets, with planted features. Both sides do the same: five outer folds, five penalties chosen on an inner fold, the
probe then trained again with the inner fold. kvprobe solves every probe; scikit-learn a sample of them, on which both
must agree to a point of accuracy. One thread for both.

    OMP_NUM_THREADS=1 python benchmarks/probes.py --beside 2
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attention import Peak
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from kvprobe.probing.ridge import ridge_probes, streamed_ridge

LAYERS, PER_LAYER, DIM = 30, 2 * 3 * 8, 64
SAMPLES, CLASSES, TARGETS, FOLDS = 2_000, 10, 5, 5
PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Of scikit-learn's probes, on squared weights, beside the mean cross-entropy in nats, on features of unit variance."""
SIGNAL = 0.35
BATCH = 100
LEAST_RATIO, MOST_APART = 30, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=int, default=1, help="probes that scikit-learn solves too")
    parser.add_argument("--layers", type=int, default=LAYERS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

    # Before anything else is held, so that these peaks are their own.
    peaks = {samples: streamed(samples) for samples in (SAMPLES, 5 * SAMPLES)}
    labels, folds = drawn_labels(SAMPLES)
    few = next(drawn_batches(0, labels, SAMPLES))[: arguments.beside].contiguous()
    theirs, accuracy = timed(lambda: beside(few, labels, folds))
    theirs /= len(few)

    ours, watched, ridge = 0.0, Peak(), 0.0
    with watched:
        for layer in range(arguments.layers):
            features = next(drawn_batches(layer, labels, SAMPLES))
            seconds, result = timed(lambda features=features: ridge_probes(features, labels, folds, CLASSES))
            ours += seconds
            if not layer:
                ridge = float(result.predicted[: len(few)].eq(labels).float().mean())
    probes = arguments.layers * PER_LAYER
    print(f"{probes} probes of {DIM} numbers, {SAMPLES} samples, {TARGETS} targets of {CLASSES} classes, one thread\n")
    print(f"{'solver':34}{'probes':>8}{'ms a probe':>12}{'ratio':>8}{'accuracy':>10}")
    print(f"{'scikit-learn, logistic loop':34}{len(few):8}{1e3 * theirs:12.1f}{1:8}{accuracy:10.3f}")
    ours /= probes
    print(f"{'kvprobe, ridge':34}{probes:8}{1e3 * ours:12.1f}{theirs / ours:8.1f}{ridge:10.3f}")
    print(f"\nridge, features of a layer at a time: {watched.bytes / 1e6:.0f} MB at the peak")
    for samples, peak in peaks.items():
        print(f"ridge, {BATCH} samples of a layer at a time, {samples} samples: {peak / 1e6:.0f} MB at the peak")
    assert abs(ridge - accuracy) < MOST_APART
    assert theirs / ours > LEAST_RATIO


def drawn_labels(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, CLASSES, (TARGETS, samples), generator=generator), torch.arange(samples) % FOLDS


def drawn_batches(layer: int, labels: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
    """Features of a layer's probes, some samples at a time: a code for each class of each target, and noise."""
    generator = torch.Generator().manual_seed(layer)
    codes = SIGNAL * torch.randn(PER_LAYER, TARGETS, CLASSES, DIM, generator=generator)
    for batch_labels in labels.split(batch, 1):
        features = torch.randn(PER_LAYER, batch_labels.shape[1], DIM, generator=generator)
        for target, row in enumerate(batch_labels):
            features += codes[:, target, row]
        yield features


def streamed(samples: int) -> int:
    """The most memory that probes of one layer need when features come in batches, their answers left out."""
    labels, folds = drawn_labels(samples)
    with Peak() as watched:
        result = streamed_ridge(lambda: drawn_batches(0, labels, BATCH), labels, folds, CLASSES)
    return watched.bytes - result.predicted.nbytes


def beside(features: torch.Tensor, labels: torch.Tensor, folds: torch.Tensor) -> float:
    """Accuracy of scikit-learn's logistic regression, one probe, target, fold and penalty after the other."""
    right = []
    for seen in features.numpy():
        for row in labels.numpy():
            for fold in range(FOLDS):
                inner = (folds == (fold + 1) % FOLDS).numpy()
                test = (folds == fold).numpy()
                train = ~inner & ~test
                scores = [fitted(seen, row, train, penalty)(inner) for penalty in PENALTIES]
                right.append(fitted(seen, row, ~test, PENALTIES[int(np.argmax(scores))])(test))
    return float(np.mean(right))


def fitted(seen: np.ndarray, labels: np.ndarray, rows: np.ndarray, penalty: float) -> Callable[[np.ndarray], float]:
    """Trains on some rows; what comes back gives the accuracy on others."""
    scaler = StandardScaler().fit(seen[rows])
    model = LogisticRegression(C=1 / (penalty * rows.sum()), max_iter=1000)
    model.fit(scaler.transform(seen[rows]), labels[rows])
    return lambda others: float(model.score(scaler.transform(seen[others]), labels[others]))


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
