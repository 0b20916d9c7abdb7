"""Ridge at a fixed penalty for many labelings: the same predictions as one ridge fit for each."""

import pytest
import torch

from kvprobe.probing.fixed import PENALTY, fixed_ridge
from kvprobe.probing.ridge import ridge_probes
from tests.probing.planted import planted
from tests.refusals import refused


@pytest.mark.parametrize("spare", [2, 90])
@pytest.mark.parametrize("size", [None, 100.0])
def test_predictions_are_those_of_ridge_with_one_penalty(spare: int, size: float | None):
    features, labels, folds = planted(60, 4, signal=2.0, probes=3, targets=2, spare=spare)
    features[1, :, 0] = 7.0
    sizes = None if size is None else torch.full((3,), size)
    predicted = fixed_ridge(features, labels, folds, 4, size=sizes)
    expected = ridge_probes(features, labels, folds, 4, penalties=(PENALTY,), size=sizes).predicted
    assert predicted.equal(expected)
    assert predicted[0].eq(labels).double().mean() > 0.4


def test_each_labeling_is_fitted_by_itself(monkeypatch: pytest.MonkeyPatch):
    features, labels, folds = planted(80, 3, signal=2.0, probes=4, targets=3)
    together = fixed_ridge(features, labels, folds, 3)
    monkeypatch.setattr("kvprobe.probing.fixed._CHUNK_BYTES", 1)
    for target in range(3):
        alone = fixed_ridge(features, labels[target : target + 1], folds, 3)
        assert alone[:, 0].equal(together[:, target])


def test_features_that_are_not_finite_are_refused():
    features, labels, folds = planted(30, 3, signal=1.0)
    features[0, 3, 1] = torch.nan
    refused(lambda: fixed_ridge(features, labels, folds, 3), "NaN")
