"""All probes of a model's cache at once, beside a loop over scikit-learn's logistic regression: time a probe, accuracy,
memory.

The sizes are SmolLM2-135M's: 30 layers × K and V × 3 heads × 8 positions of 64 numbers, 2,000 samples, 10 classes, 5
targets, with planted features. Both sides do the same: five outer folds, five penalties chosen on an inner fold, the
probe then trained again with the inner fold. kvprobe solves every probe; scikit-learn a sample of them, on which both
must agree to a point of accuracy. One thread for both.

    python benchmarks/probes.py
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attention import Peak
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from timing import Row, clock, main

from kvprobe.probing.ridge import ridge_probes, streamed_ridge

LAYERS, PER_LAYER, DIM = 30, 2 * 3 * 8, 64
SAMPLES, CLASSES, TARGETS, FOLDS = 2_000, 10, 5, 5
PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Of scikit-learn's probes, on squared weights, beside the mean cross-entropy in nats, on features of unit variance."""
SIGNAL = 0.35
BATCH = 100
LEAST_RATIO, MOST_APART = 30, 0.01


def measure(asked: Namespace) -> Iterator[Row]:
    layers, samples = (2, SAMPLES // 8) if asked.quick else (LAYERS, SAMPLES)
    # Before anything else is held, so that these peaks are their own.
    few_samples, many = (streamed(count) for count in (samples, 5 * samples))
    labels, folds = drawn_labels(samples)
    few = next(drawn_batches(0, labels, samples))[:1].contiguous()
    theirs, accuracy = timed(lambda: beside(few, labels, folds))
    ours, watched, ridge = list[float](), Peak(), 0.0
    with watched:
        for layer in range(layers):
            features = next(drawn_batches(layer, labels, samples))
            seconds, result = timed(lambda features=features: ridge_probes(features, labels, folds, CLASSES))
            ours.append(seconds / PER_LAYER)
            if not layer:
                ridge = float(result.predicted[: len(few)].eq(labels).float().mean())
    assert asked.quick or abs(ridge - accuracy) < MOST_APART
    what, note = f"a probe of {DIM} numbers, {samples} samples", f"accuracy {ridge:.3f}, theirs {accuracy:.3f}"
    yield Row.of(what, "scikit-learn, a loop", ours, [theirs] * layers, most=1 / LEAST_RATIO, note=note)
    what, note = f"features of {BATCH} samples at a time", f"peak beside that of a fifth of {5 * samples} samples"
    yield Row.of(what, "fewer samples", [many], [few_samples], unit="B", note=note)


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
    start = clock()
    result = run()
    return clock() - start, result


if __name__ == "__main__":
    main(measure, __doc__, threads=1)
