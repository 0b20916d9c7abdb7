"""Batched logistic probes against scikit-learn, and what a batch must not change."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from kvprobe.probing.lbfgs import SoftmaxLoss, minimised
from kvprobe.probing.linear import LinearProbes, log_frequency
from kvprobe.probing.logistic import LOGISTIC_PENALTIES, logistic_evidence, logistic_path
from tests.probing.planted import planted

CLASSES = 4


def oracle(features: torch.Tensor, labels: torch.Tensor, penalty: float) -> tuple[StandardScaler, LogisticRegression]:
    """scikit-learn's solution of one probe and target, to the end."""
    scaler = StandardScaler().fit(features.double().numpy())
    model = LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-8, max_iter=5000)
    return scaler, model.fit(scaler.transform(features.double().numpy()), labels.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_and_probabilities_equal_scikit_learns_along_the_path(dtype: torch.dtype):
    features, labels, _ = planted(300, CLASSES, 1.5, probes=3, targets=2)
    path = logistic_path(features.to(dtype), labels, CLASSES, LOGISTIC_PENALTIES, tolerance=1e-5)
    for penalty, probes in zip(LOGISTIC_PENALTIES, path, strict=True):
        probability = probes.scores(features.to(dtype)).softmax(-1)
        weights = probes.weights.unflatten(-1, (-1, CLASSES))
        for probe in range(3):
            for target in range(2):
                scaler, model = oracle(features[probe], labels[target], penalty)
                expected = model.predict_proba(scaler.transform(features[probe].double().numpy()))
                np.testing.assert_allclose(probability[probe, target], expected, atol=1e-3)
                slopes = model.coef_.T / scaler.scale_[:, None]
                # The least penalised direction is the flattest: weights are held to 1e-3 of the largest.
                apart = np.abs(weights[probe, :, target].numpy() - slopes).max() / np.abs(slopes).max()
                assert apart < (1e-3 if penalty > 1e-4 else 5e-3)


def test_predictions_out_of_fold_and_penalties_equal_scikit_learns():
    features, labels, folds = planted(200, CLASSES, 1.5, probes=2, targets=2, seed=3)
    # Classes of unequal size.
    labels[:, :60] = 1
    found = logistic_evidence(features, labels, folds, CLASSES, tolerance=1e-5)
    fold, inner = 1, 2
    train, held, test = (folds != fold) & (folds != inner), folds == inner, folds == fold
    for probe in range(2):
        for target in range(2):
            losses, guesses = {}, {}
            for penalty in LOGISTIC_PENALTIES:
                scaler, model = oracle(features[probe, train], labels[target, train], penalty)
                guesses[penalty] = model.predict_log_proba(scaler.transform(features[probe, held].double().numpy()))
                losses[penalty] = -guesses[penalty][np.arange(int(held.sum())), labels[target, held]].mean()
            best = min(losses, key=lambda penalty: losses[penalty])
            assert float(found.penalty[probe, target, fold]) == pytest.approx(best)
            said = found.inner_evidence[probe, target, held] + log_frequency(labels[[target]][:, train], CLASSES)
            np.testing.assert_allclose(said.softmax(1), np.exp(guesses[best]), atol=1e-3)
            both = folds != fold
            scaler, model = oracle(features[probe, both], labels[target, both], best)
            expected = model.predict_proba(scaler.transform(features[probe, test].double().numpy()))
            np.testing.assert_array_equal(found.predicted[probe, target, test], expected.argmax(1))
            said = found.evidence[probe, target, test] + log_frequency(labels[[target]][:, both], CLASSES)
            np.testing.assert_allclose(said.softmax(1), expected, atol=1e-3)


def gradient(probes: LinearProbes, features: torch.Tensor, labels: torch.Tensor, penalty: float) -> torch.Tensor:
    """Largest entry of the objective's gradient on standardised features, by autograd, for each probe and target."""
    mean, deviation = features.mean(1, keepdim=True), features.std(1, correction=0, keepdim=True)
    deviation = torch.where(deviation > 1e-4, deviation, torch.inf)
    points = (features - mean) / deviation
    flat = torch.where(deviation.isfinite(), deviation, 0.0).mT * probes.weights
    weights = flat.unflatten(-1, (len(labels), -1)).requires_grad_()
    intercept = (probes.intercept[:, None] + (mean - probes.mean[:, None]) @ probes.weights)[:, 0]
    intercept = intercept.unflatten(-1, (len(labels), -1)).detach().requires_grad_()
    scores = torch.einsum("pnd,pdtc->ptnc", points, weights) + intercept[:, :, None]
    answers = labels.expand(len(features), -1, -1)[..., None]
    loss = -scores.log_softmax(-1).gather(-1, answers).mean(2).sum() + penalty / 2 * weights.square().sum()
    of_weights, of_intercept = torch.autograd.grad(loss, [weights, intercept])
    return torch.maximum(of_weights.abs().amax((1, 3)), of_intercept.abs().amax(2))


def test_easy_and_hard_probes_of_one_batch_all_reach_their_minimum():
    easy, labels, _ = planted(200, CLASSES, 0.0, probes=3, targets=2, seed=1)
    told = torch.nn.functional.one_hot(labels[0], CLASSES).double()
    separable = torch.cat([told * 4, torch.zeros(200, easy.shape[2] - CLASSES).double()], 1)
    twins = easy[:1].double()
    twins = torch.cat([twins[:, :, :5], twins[:, :, :5] + 1e-2 * twins[:, :, 5:]], 2)
    features = torch.cat([easy.double(), separable[None], twins])
    for penalty, probes in zip(
        (1e-2, 1e-4), logistic_path(features, labels, CLASSES, (1e-2, 1e-4), tolerance=1e-5), strict=True
    ):
        # The tolerance holds for entries along the axes, a rotation of these.
        assert gradient(probes, features, labels, penalty).max() < 1e-5 * np.sqrt(features.shape[2])


def test_what_has_converged_is_left_as_it_is_while_others_go_on():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 6, 100, generator=generator)
    points[:, -1] = 1
    told = torch.nn.functional.one_hot(torch.randint(0, CLASSES, (2, 100), generator=generator), CLASSES).float()
    sums = torch.einsum("pds,tsc->pdtc", points, told) / 100
    loss = SoftmaxLoss(points, sums, points.square().mean(2))
    start, penalty = torch.zeros(3, 6, 2, CLASSES), torch.full((3, 2), 1e-2)
    done = minimised(loss, start, penalty, 1e-4)
    # One of two targets of one probe has converged already, to less than what is asked of all now.
    start[0, :, 1] = done[0, :, 1]
    found = minimised(loss, start, penalty, 1e-3)
    assert torch.equal(found[0, :, 1], start[0, :, 1])
    assert not torch.equal(found[0, :, 0], start[0, :, 0])
    torch.testing.assert_close(found, done, atol=0.03, rtol=0.03)


def test_a_probe_does_not_depend_on_the_probes_beside_it():
    features, labels, folds = planted(200, CLASSES, 2.0, probes=4)
    features[0] = features[0, 0]
    features[1] = torch.randn(features[1].shape, generator=torch.Generator().manual_seed(0))
    together = logistic_evidence(features, labels, folds, CLASSES, penalties=[1e-2], tolerance=1e-5)
    alone = logistic_evidence(features[2:3], labels, folds, CLASSES, penalties=[1e-2], tolerance=1e-5)
    torch.testing.assert_close(together.evidence[2:3], alone.evidence, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(together.inner_evidence[2:3], alone.inner_evidence, atol=1e-2, rtol=1e-3)


def test_labels_of_the_test_fold_change_nothing_in_it():
    features, labels, folds = planted(150, CLASSES, 1.5, probes=2)
    shuffled = labels.clone()
    shuffled[:, folds == 2] = (labels[:, folds == 2] + 1) % CLASSES
    one, other = (logistic_evidence(features, y, folds, CLASSES) for y in (labels, shuffled))
    torch.testing.assert_close(one.evidence[:, :, folds == 2], other.evidence[:, :, folds == 2])
    torch.testing.assert_close(one.penalty[:, :, 2], other.penalty[:, :, 2])
    torch.testing.assert_close(one.inner_accuracy[:, 2], other.inner_accuracy[:, 2])


def test_scale_and_shift_of_features_do_not_matter():
    features, labels, folds = planted(150, CLASSES, 2.0)
    one, other = (logistic_evidence(each, labels, folds, CLASSES) for each in (features, features * 1000 - 300))
    torch.testing.assert_close(one.evidence, other.evidence, atol=0.05, rtol=0.02)


def test_more_dimensions_than_samples_are_solved():
    features, labels, _ = planted(60, CLASSES, 4.0, spare=140)
    (probes,) = logistic_path(features, labels, CLASSES, [1e-2], tolerance=1e-5)
    scaler, model = oracle(features[0], labels[0], 1e-2)
    expected = model.predict_proba(scaler.transform(features[0].double().numpy()))
    np.testing.assert_allclose(probes.scores(features)[0, 0].softmax(-1), expected, atol=1e-3)


def test_probes_that_have_not_converged_are_reported(monkeypatch: pytest.MonkeyPatch):
    features, labels, _ = planted(100, CLASSES, 2.0, probes=2, targets=2)
    monkeypatch.setattr("kvprobe.probing.lbfgs._STEPS", 1)
    with pytest.warns(UserWarning, match="4 of 4 logistic probes have not converged in 1 steps"):
        next(logistic_path(features, labels, CLASSES, [1e-3]))
