"""Ridge probes against scikit-learn, and against what a probe must not do."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from kvprobe.probing.ridge import PENALTIES, ridge_probes
from tests.refusals import refused

SAMPLES, CLASSES = 150, 4


def problem(seed: int = 0, signal: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three probes of which each reads the two targets with some noise; features with large means."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (2, SAMPLES), generator=generator)
    folds = torch.arange(SAMPLES) % 5
    codes = torch.randn(2, CLASSES, 12, generator=generator)
    clean = codes[0][labels[0]] + codes[1][labels[1]]
    noise = torch.randn(3, SAMPLES, 12, generator=generator)
    scale = torch.logspace(-1, 2, 12)
    return (signal * clean + noise) * scale + 50, labels, folds


@pytest.mark.parametrize("spare", [0, 200])
def test_predictions_equal_scikit_learns(spare: int):
    """With fewer dimensions than samples, and with more."""
    features, labels, folds = problem()
    noise = torch.randn(3, SAMPLES, spare, generator=torch.Generator().manual_seed(1))
    features = torch.cat([features, 3 * noise + 7], 2)
    result = ridge_probes(features, labels, folds, CLASSES)
    for probe in range(3):
        for fold in range(5):
            train, test = (folds != fold).numpy(), (folds == fold).numpy()
            scaler = StandardScaler().fit(features[probe][train])
            alpha = float(result.penalty[probe, fold]) * train.sum()
            for target in range(2):
                onehot = np.eye(CLASSES)[labels[target]]
                oracle = Ridge(alpha=alpha).fit(scaler.transform(features[probe][train]), onehot[train])
                expected = oracle.predict(scaler.transform(features[probe][test])).argmax(1)
                np.testing.assert_array_equal(result.predicted[probe, target][test], expected)


def test_the_penalty_is_the_best_on_the_inner_fold_and_the_largest_of_equals():
    features, labels, folds = problem()
    result = ridge_probes(features, labels, folds, CLASSES)
    for fold in range(5):
        inner = (fold + 1) % 5
        train, held = ((folds != fold) & (folds != inner)).numpy(), (folds == inner).numpy()
        scaler = StandardScaler().fit(features[1][train])
        scores = []
        for penalty in PENALTIES:
            hits = []
            for target in range(2):
                oracle = Ridge(alpha=penalty * train.sum())
                oracle.fit(scaler.transform(features[1][train]), np.eye(CLASSES)[labels[target]][train])
                predicted = oracle.predict(scaler.transform(features[1][held])).argmax(1)
                hits.append((predicted == labels[target][held].numpy()).mean())
            scores.append(np.mean(hits))
        best = max(penalty for penalty, score in zip(PENALTIES, scores, strict=True) if score >= max(scores) - 1e-9)
        assert float(result.penalty[1, fold]) == pytest.approx(best)
        assert float(result.inner_accuracy[1, fold]) == pytest.approx(max(scores))


def test_predictions_of_a_fold_do_not_depend_on_its_labels():
    features, labels, folds = problem()
    shuffled = labels.clone()
    shuffled[:, folds == 2] = (labels[:, folds == 2] + 1) % CLASSES
    one, other = (ridge_probes(features, y, folds, CLASSES) for y in (labels, shuffled))
    torch.testing.assert_close(one.predicted[:, :, folds == 2], other.predicted[:, :, folds == 2])
    torch.testing.assert_close(one.penalty[:, 2], other.penalty[:, 2])
    torch.testing.assert_close(one.inner_accuracy[:, 2], other.inner_accuracy[:, 2])


def test_a_probe_does_not_depend_on_the_probes_beside_it():
    features, labels, folds = problem()
    together = ridge_probes(features, labels, folds, CLASSES)
    alone = ridge_probes(features[1:2].contiguous(), labels, folds, CLASSES)
    torch.testing.assert_close(together.predicted[1:2], alone.predicted)


def test_scale_and_shift_of_features_do_not_matter():
    features, labels, folds = problem()
    moved = ridge_probes(features * 1000 - 300, labels, folds, CLASSES)
    torch.testing.assert_close(moved.predicted, ridge_probes(features, labels, folds, CLASSES).predicted)


def test_a_planted_signal_is_read_and_noise_is_not():
    accuracy = {}
    for signal in (0.0, 3.0):
        features, labels, folds = problem(seed=5, signal=signal)
        accuracy[signal] = ridge_probes(features, labels, folds, CLASSES).predicted.eq(labels).float().mean()
    # Six probe-target pairs of 150 samples, pairs not independent: 4 standard deviations of one pair.
    assert abs(accuracy[0.0] - 1 / CLASSES) < 4 * np.sqrt(0.25 * 0.75 / SAMPLES)
    assert accuracy[3.0] > 0.8


def test_round_off_is_not_information():
    _, labels, folds = problem()
    base = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(1)).expand(1, SAMPLES, 12)
    telling = torch.nn.functional.one_hot(labels[0], 12).float()
    hidden = base + 1e-7 * telling
    centred = hidden - hidden.mean(1, keepdim=True)
    size = base.square().mean((1, 2)).sqrt()
    read = ridge_probes(centred, labels, folds, CLASSES, size=size)
    assert len(read.predicted[0, 0][folds == 0].unique()) == 1
    loud = ridge_probes(base + 1e-2 * telling, labels, folds, CLASSES)
    assert loud.predicted[0, 0].eq(labels[0]).float().mean() > 0.9


def test_bad_input_is_refused():
    features, labels, folds = problem()
    refused(lambda: ridge_probes(features, labels, folds, 3), "0 to 2")
    refused(lambda: ridge_probes(features, labels, folds % 2, CLASSES), "at least 3 folds")
    features[0, 0, 0] = torch.nan
    refused(lambda: ridge_probes(features, labels, folds, CLASSES), "finite")


def test_features_of_far_lower_rank_than_dimension_are_solved():
    """What the restart floor looks like: a few contexts, each repeated for all of its codes."""
    generator = torch.Generator().manual_seed(0)
    contexts = torch.randn(2, 6, 800, generator=generator) * torch.logspace(-2, 3, 800) + 1000
    labels = torch.randint(0, CLASSES, (2, 120), generator=generator)
    folds = torch.arange(6).repeat_interleave(20) % 3
    result = ridge_probes(contexts.repeat_interleave(20, 1), labels, folds, CLASSES)
    for fold in range(3):
        for row in result.predicted[0, 0][folds == fold].reshape(-1, 20):
            assert len(row.unique()) == 1
