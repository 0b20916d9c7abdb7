"""Transfer between places on planted data: the table gives the known answer."""

import numpy as np
import pytest
import torch

from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.transfer import transfer, transferred
from tests.probing.planted import bayes_accuracy
from tests.refusals import refused

CLASSES, CONTEXTS, EACH, SIGNAL = 5, 50, 40, 3.0
SAMPLES = CONTEXTS * EACH


def places(*frames: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Features of one place per frame, labels, contexts and folds: each class pushes its own row of the frame, with
    fresh noise at every place and an offset of the place's own. A frame may differ between contexts."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (1, SAMPLES), generator=generator)
    contexts = np.repeat(np.arange(CONTEXTS), EACH)
    features = []
    for number, frame in enumerate(frames):
        frames_of_samples = frame.expand(CONTEXTS, -1, -1)[torch.from_numpy(contexts)]
        pushed = SIGNAL * frames_of_samples[torch.arange(SAMPLES), labels[0]]
        features.append(pushed + torch.randn(pushed.shape, generator=generator) + 7 * number)
    return torch.stack(features), labels, contexts, contexts % 5


def frame(seed: int, contexts: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation, triangle = torch.linalg.qr(torch.randn(contexts, 12, 12, generator=generator))
    # Without the signs, rotations would have a direction in common.
    return (rotation * triangle.diagonal(dim1=1, dim2=2).sign()[:, None])[:, :CLASSES]


def test_probes_transfer_only_between_places_that_share_their_directions():
    shared, other = frame(1), frame(2)
    # A place that holds each class where the shared one holds the next: what is read there is always another class.
    table = transfer(*places(shared, shared, other, shared.roll(1, 1)), CLASSES, places=["a", "b", "c", "d"])
    accuracy = table.pivot(index="train", columns="test", values="accuracy")
    best = bayes_accuracy(CLASSES, SIGNAL)
    for train, test in ("aa", "ab", "ba", "bb", "cc", "dd"):
        assert accuracy.loc[train, test] == pytest.approx(best, abs=0.02)
    for train, test in ("ac", "ca", "bc", "cb"):
        assert accuracy.loc[train, test] < best - 0.3
    assert accuracy.loc["a", "d"] < 0.05
    assert ((table["low"] <= table["accuracy"]) & (table["accuracy"] <= table["high"])).all()
    assert (table["high"] - table["low"]).between(0.001, 0.1).all()


def test_directions_that_differ_between_contexts_do_not_transfer_to_new_contexts():
    features, labels, contexts, folds = places(frame(3, CONTEXTS), frame(3, CONTEXTS))
    assert transfer(features, labels, contexts, folds, CLASSES)["accuracy"].max() < 0.3
    mixed = torch.arange(SAMPLES) % 5
    assert transferred(features, labels, mixed, CLASSES)[0, 0].eq(labels).float().mean() < 0.4


def test_the_diagonal_holds_the_predictions_of_ridge():
    features, labels, _, folds = places(frame(1), frame(2))
    predicted = transferred(features, labels, torch.from_numpy(folds), CLASSES)
    expected = ridge_probes(features, labels, torch.from_numpy(folds), CLASSES).predicted
    assert torch.equal(predicted.diagonal(dim1=0, dim2=1).permute(2, 0, 1), expected)


@pytest.mark.parametrize("fading", [0.001, 1000.0])
def test_neither_an_offset_nor_a_fading_of_the_signal_is_an_obstacle(fading: float):
    features, labels, contexts, folds = places(frame(1), frame(1))
    features[1] *= fading
    table = transfer(features, labels, contexts, folds, CLASSES)
    assert table["accuracy"].min() > bayes_accuracy(CLASSES, SIGNAL) - 0.03


def test_bad_input_is_refused():
    features, labels, contexts, folds = places(frame(1), frame(2))
    refused(
        lambda: transfer(features, labels, contexts, np.where(np.arange(SAMPLES) == 3 * EACH, 4, folds), CLASSES),
        "Context 3 is in more than one fold",
    )
    refused(
        lambda: transfer(features, labels, contexts, folds, CLASSES, places=["a", "b", "c"]),
        "There are 3 names for 2 places",
    )
    features[1, 5, 2] = torch.nan
    refused(lambda: transfer(features, labels, contexts, folds, CLASSES), "finite")
