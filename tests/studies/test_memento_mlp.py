"""The probe with a hidden layer: it reads what no linear probe can, and nothing where there is nothing."""

import numpy as np
import pytest
import torch

from kvprobe.probing.ridge import fitted_by_fold
from kvprobe.studies.memento_toy.mlp import mlp_predictions
from tests.refusals import refused

SAMPLES = 2000
FOLDS = torch.arange(SAMPLES) % 4


def planted(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two targets: one is the parity of two signs, the other a sign; among twenty numbers, some of them large."""
    numbers = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(seed))
    labels = torch.stack([(numbers[:, 0] * numbers[:, 1] > 0).long(), (numbers[:, 2] > 0).long()])
    return numbers * torch.logspace(-2, 2, 20) + 5, labels


def accuracy(features: torch.Tensor, labels: torch.Tensor, seed: int = 0) -> list[float]:
    predicted = mlp_predictions(features, labels, FOLDS, 2, np.random.default_rng(seed))
    return predicted.eq(labels[:, FOLDS == 0]).double().mean(1).tolist()


def test_it_reads_what_no_linear_probe_reads():
    features, labels = planted()
    parity, sign = accuracy(features, labels)
    (linear,) = next(fitted_by_fold(features[None], [labels], FOLDS, 2, only=[0]))
    by_ridge = linear.predicted[0].eq(labels[:, FOLDS == 0]).double().mean(1)
    assert by_ridge[0] < 0.6
    assert parity > 0.8
    assert sign > 0.9


@pytest.mark.parametrize("seed", [0, 1])
def test_labels_of_other_samples_are_read_by_chance(seed: int):
    features, labels = planted(seed)
    shuffled = labels[:, torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))]
    for share in accuracy(features, shuffled):
        assert share == pytest.approx(0.5, abs=0.1)


def test_directions_of_little_variance_are_read_as_well():
    """As hidden channels have them: all numbers are dominated by one that says nothing."""
    numbers, loud = (torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(9)) for width in (20, 1))
    labels = (numbers[:, 2:3] > 0).long().T
    assert accuracy(numbers + 10 * loud, labels)[0] > 0.85


def test_the_same_generator_gives_the_same_classes():
    features, labels = planted()
    before = torch.random.get_rng_state()
    one, other = (mlp_predictions(features, labels, FOLDS, 2, np.random.default_rng(3)) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_tested_samples_do_not_teach():
    features, labels = planted()
    other = labels.clone()
    other[:, FOLDS == 0] = 1 - other[:, FOLDS == 0]
    one, two = (mlp_predictions(features, some, FOLDS, 2, np.random.default_rng(3)) for some in (labels, other))
    assert torch.equal(one, two)


def test_what_cannot_be_read_is_refused():
    features, labels = planted()
    rng = np.random.default_rng(0)
    refused(lambda: mlp_predictions(features / 0, labels, FOLDS, 2, rng), "finite")
    refused(lambda: mlp_predictions(features, labels + 1, FOLDS, 2, rng), "0 to 1")
    refused(lambda: mlp_predictions(features, labels, FOLDS % 2, 2, rng), "3 folds")
