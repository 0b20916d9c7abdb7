"""Probabilities of probes are calibrated, worth the bits that theory allows, and never NaN."""

from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.probing.calibration import CalibratedResult, calibrated_tasks, fit_temperature
from kvprobe.probing.linear import log_frequency
from kvprobe.probing.ridge import ridge_probes
from tests.probing.planted import bayes_accuracy, bayes_bits, planted
from tests.refusals import refused

CLASSES = 5


def calibrated_probes(features: torch.Tensor, labels: torch.Tensor, *args: Any, **named: Any) -> CalibratedResult:
    return calibrated_tasks(features, [labels], *args, **named)[0]


@pytest.mark.parametrize("signal", [0.0, 1.0, 2.5])
def test_a_planted_signal_is_recovered_at_the_accuracy_and_the_bits_that_theory_gives(signal: float):
    samples = 4000
    features, labels, folds = planted(samples, CLASSES, signal)
    result = calibrated_probes(features, labels, folds, CLASSES)
    expected = bayes_accuracy(CLASSES, signal)
    accuracy = float(result.predicted.eq(labels).float().mean())
    assert abs(accuracy - expected) < 2.58 * np.sqrt(expected * (1 - expected) / samples)
    bits = result.information[0, 0]
    # Theory is for weights known exactly; those learned from 3,200 samples cost up to 0.02 bits.
    error = 2.58 * float(bits.std()) / np.sqrt(samples) + 0.02
    assert abs(float(bits.mean()) - bayes_bits(CLASSES, signal)) < error


def test_the_share_of_right_predictions_equals_their_confidence():
    features, labels, folds = planted(2000, CLASSES, 1.5, probes=2, targets=2, seed=4)
    result = calibrated_probes(features, labels, folds, CLASSES)
    right = result.predicted.eq(labels).float().flatten()
    confidence = result.confidence.flatten()
    for chosen in confidence.argsort().chunk(8):
        # Probes read the same labels, so a bin has at worst a quarter of its samples' worth.
        error = np.sqrt(0.25 / (len(chosen) / 2))
        assert abs(float(right[chosen].mean() - confidence[chosen].mean())) < 3 * error


def test_a_probe_of_noise_has_no_information_even_with_unequal_classes():
    generator = torch.Generator().manual_seed(2)
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 1500, replacement=True, generator=generator)[None]
    features = torch.randn(2, 1500, 20, generator=generator)
    result = calibrated_probes(features, labels, torch.arange(1500) % 5, 3)
    assert abs(float(result.information.mean())) < 0.01


def test_the_bits_of_a_sample_are_bounded_by_the_size_of_the_inner_fold():
    """Fitted on eight samples, a temperature says nothing about events rarer than one in nine."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (1, 40), generator=generator)
    features = torch.randn(30, 40, 12, generator=generator)
    result = calibrated_probes(features, labels, torch.arange(40) % 5, 4)
    assert float(result.information.min()) >= -np.log2(9) - 1e-4
    assert float(result.information.mean()) > -0.2


def test_a_class_absent_from_training_costs_bits_and_gives_no_nan():
    features, labels, folds = planted(150, 3, 4.0, probes=2)
    # Class 3 lives in fold 2 alone, class 4 nowhere.
    labels[:, torch.nonzero(folds == 2)[:5, 0]] = 3
    result = calibrated_probes(features, labels, folds, 5)
    for tensor in (result.bits, result.base_bits, result.confidence, result.temperature, result.information):
        assert bool(torch.isfinite(tensor).all())
    assert float(result.bits[:, labels == 3].min()) > float(result.bits.median())


def test_constant_features_have_no_information():
    features, labels, folds = planted(150, CLASSES, 2.0, probes=2)
    features[1] = features[1, 0]
    result = calibrated_probes(features, labels, folds, CLASSES)
    assert abs(float(result.information[1].mean())) < 0.02
    torch.testing.assert_close(result.bits[1], result.base_bits, atol=1e-2, rtol=1e-2)


def test_predictions_equal_those_of_ridge_without_probabilities():
    features, labels, folds = planted(200, CLASSES, 1.5, probes=3, targets=2)
    result = calibrated_probes(features, labels, folds, CLASSES)
    expected = ridge_probes(features, labels, folds, CLASSES)
    assert torch.equal(result.predicted, expected.predicted)
    assert torch.equal(result.inner_accuracy, expected.inner_accuracy)
    assert torch.equal(result.penalty, expected.penalty)


def test_results_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch):
    features, labels, folds = planted(150, CLASSES, 1.5, probes=3)
    whole = calibrated_probes(features, labels, folds, CLASSES)
    monkeypatch.setattr("kvprobe.probing.calibration._CHUNK_BYTES", 1)
    single = calibrated_probes(features, labels, folds, CLASSES)
    torch.testing.assert_close(single.bits, whole.bits, atol=0.01, rtol=0.01)
    assert torch.equal(single.penalty, whole.penalty)


def test_planted_temperatures_are_recovered_in_each_group_of_samples():
    generator, planted_at = torch.Generator().manual_seed(0), torch.tensor([0.05, 1.0, 20.0])
    known, groups = torch.tensor([[[0.5, 0.3, 0.2]]]).log(), torch.arange(60_000) % 3
    evidence = planted_at[groups, None] * torch.randn(1, 1, 60_000, 3, generator=generator)
    posterior = (known + evidence / planted_at[groups, None]).softmax(-1)
    labels = torch.multinomial(posterior[0, 0], 1, generator=generator).T
    fitted = fit_temperature(evidence, known, labels, groups)
    torch.testing.assert_close(fitted[0, 0], planted_at, rtol=0.05, atol=0)


def test_log_frequencies_of_absent_classes_are_finite():
    shares = log_frequency(torch.tensor([[0, 0, 0, 1], [2, 2, 2, 2]]), 3).exp()
    torch.testing.assert_close(shares, torch.tensor([[6, 2, 1], [1, 1, 8]]) / torch.tensor([[9.0], [10.0]]))


def test_bad_input_is_refused():
    features, labels, folds = planted(100, CLASSES, 1.0)

    def input_refused(words: str, **changed: Any) -> None:
        arguments = {"features": features, "labels": labels, "folds": folds, "classes": CLASSES, **changed}
        refused(lambda: calibrated_probes(**arguments), words)

    input_refused("Target 0 has the one class 3 in all 100 samples", labels=torch.full_like(labels, 3))
    input_refused("needs at least 120 samples; there are 100", classes=120)
    input_refused("0 to 3", classes=4)
    input_refused("at least 3 folds", folds=folds % 2)
    input_refused("No sample is in fold 1", folds=torch.where(folds == 1, 0, folds))
    input_refused(
        "Context 7 is in more than one fold", contexts=np.where(np.isin(np.arange(100), [3, 5, 8]), 7, folds + 10)
    )
    input_refused("finite", features=torch.where(features == features[0, 5, 2], torch.nan, features))
    ours = calibrated_probes(features, labels, folds, CLASSES, contexts=folds.numpy())
    assert torch.equal(ours.predicted, calibrated_probes(features, labels, folds, CLASSES).predicted)
