"""The probe that gets published: as good as theory allows where there is a rule, and no more confident than the class
frequencies where it only knows its own contexts."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvprobe.probes.fitted import FittedProbe, distance, fitted_probe
from tests.probing.planted import bayes_accuracy, bayes_bits, planted
from tests.refusals import refused

CLASSES = 5


def fitted(features: torch.Tensor, labels: torch.Tensor, contexts: np.ndarray, **settings: object) -> FittedProbe:
    return fitted_probe(features, labels, contexts, CLASSES, rng=np.random.default_rng(0), **settings)


def log_probabilities(probe: FittedProbe, features: torch.Tensor) -> torch.Tensor:
    """Log probabilities, [targets, samples, classes]."""
    return probe.probes.scores(features[None])[0].log_softmax(-1)


def bits(probe: FittedProbe, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Bits by which the probe favours each label over its base rate."""
    likelihood = log_probabilities(probe, features).gather(-1, labels[..., None])[..., 0]
    base = probe.probes.intercept[0].unflatten(0, (-1, CLASSES)).log_softmax(-1).gather(1, labels)
    return (likelihood - base) / np.log(2)


@pytest.mark.parametrize("signal", [1.0, 2.5])
def test_accuracy_and_bits_on_new_samples_are_what_theory_allows(signal: float):
    samples = 6000
    features, labels, _ = planted(samples, CLASSES, signal, targets=2)
    old, new = slice(0, samples // 2), slice(samples // 2, samples)
    probe = fitted(features[0, old], labels[:, old], np.arange(samples // 2) % 60)
    right = log_probabilities(probe, features[0, new]).argmax(-1).eq(labels[:, new]).double().mean()
    assert float(right) == pytest.approx(bayes_accuracy(CLASSES, signal), abs=0.03)
    assert float(bits(probe, features[0, new], labels[:, new]).mean()) == pytest.approx(
        bayes_bits(CLASSES, signal), abs=0.05
    )


def of_one_context_only(contexts: int, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """A strong signal whose direction is another in each context."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (1, contexts * samples), generator=generator)
    number = np.repeat(np.arange(contexts), samples)
    directions = 3 * torch.randn(contexts, CLASSES, 40, generator=generator)
    features = directions[torch.from_numpy(number), labels[0]]
    return features + torch.randn(features.shape, generator=generator), labels, number


def test_a_probe_that_only_knows_its_own_contexts_stays_near_the_base_rates_in_new_ones():
    features, labels, contexts = of_one_context_only(30, 20, seed=0)
    probe = fitted(features, labels, contexts)
    assert float(log_probabilities(probe, features).argmax(-1).eq(labels).double().mean()) > 0.3, (
        "on its own contexts it does better"
    )
    others, answers, _ = of_one_context_only(200, 10, seed=1)
    base = probe.probes.intercept[0].softmax(-1)
    assert float((log_probabilities(probe, others)[0].exp() - base).abs().mean()) < 0.03
    assert float(bits(probe, others, answers).mean()) > -0.03


def test_its_weights_are_those_of_ridge_regression_over_the_temperature():
    features, labels, _ = planted(300, CLASSES, 2.0)
    probe = fitted(features[0], labels, np.arange(300) % 30, penalties=(0.1,))
    spread = features[0].std(0, correction=0)
    answers = torch.nn.functional.one_hot(labels[0], CLASSES).double()
    oracle = Ridge(alpha=0.1 * 300).fit(
        ((features[0] - features[0].mean(0)) / spread).double().numpy(), answers.numpy()
    )
    expected = torch.from_numpy(oracle.coef_.T.copy()) / spread[:, None].double() / probe.temperature
    torch.testing.assert_close(probe.probes.weights[0].double(), expected, rtol=1e-3, atol=1e-6)


def test_gains_over_the_restart_come_from_what_the_restart_lacks():
    features, labels, _ = planted(1500, CLASSES, 2.0)
    contexts = np.arange(1500) % 50
    other, _, _ = planted(1500, CLASSES, 0.0)  # the same samples without their signal
    probe = fitted(features[0], labels, contexts, restart=other[0])
    assert probe.gains is not None
    assert float(probe.gains[probe.right].mean()) > 0.5
    assert float(probe.gains[probe.right].mean()) > float(probe.gains[~probe.right].mean()) + 0.2
    same = fitted(features[0], labels, contexts, restart=features[0])
    assert same.gains is not None
    assert float(same.gains.abs().max()) == 0
    assert torch.equal(same.probes.weights, probe.probes.weights)
    assert fitted(features[0], labels, contexts).gains is None


def test_through_the_origin_zero_gives_the_base_rates_and_the_rest_is_read_nearly_as_well():
    features, labels, _ = planted(3000, CLASSES, 2.5)
    contexts = np.arange(3000) % 50
    # Differences: their mean is not zero, as hidden text of any class changes something.
    changed = features[0] - 30 + 0.5 * features[0].std(0)
    old, new = slice(0, 1500), slice(1500, 3000)
    usual, origin = (
        fitted(
            changed[old], labels[:, old], contexts[old], through_origin=through, restart=torch.zeros_like(changed[old])
        )
        for through in (False, True)
    )
    nothing = torch.zeros_like(changed[:1])
    base = origin.probes.intercept[0].softmax(-1)
    torch.testing.assert_close(log_probabilities(origin, nothing)[0, 0].exp(), base)
    assert float((log_probabilities(usual, nothing)[0, 0].exp() - base).abs().max()) > 0.01
    right = [
        log_probabilities(probe, changed[new]).argmax(-1).eq(labels[:, new]).double().mean()
        for probe in (usual, origin)
    ]
    assert float(right[1]) > float(right[0]) - 0.04


def test_training_like_samples_lie_at_distance_one_and_shifted_ones_beyond():
    features, labels, _ = planted(600, CLASSES, 1.0)
    probe = fitted(features[0], labels, np.arange(600) % 60)
    assert float(probe.distances.median()) == pytest.approx(1, abs=0.1)
    mean = probe.probes.mean[0]
    assert float(distance(mean + 3 * probe.deviation, mean, probe.deviation)) == pytest.approx(3, rel=1e-4)
    assert float(distance(mean + 3 * probe.deviation, mean, probe.deviation)) > float(probe.distances.max())


def test_a_feature_that_was_constant_in_training_is_ignored():
    features, labels, contexts = of_one_context_only(20, 10, seed=3)
    features = torch.cat([features, torch.full((len(features), 1), 0.7)], 1)
    probe = fitted(features, labels, contexts)
    changed = features.clone()
    changed[:, -1] = 100
    assert torch.equal(log_probabilities(probe, features), log_probabilities(probe, changed))
    mean = probe.probes.mean[0]
    assert torch.equal(distance(features, mean, probe.deviation), distance(changed, mean, probe.deviation))


def test_bad_input_is_refused():
    features, labels, contexts = of_one_context_only(20, 10, seed=3)
    for match, arguments in {
        "at least 5 contexts": (features, labels, contexts % 4),
        "one class": (features, torch.zeros_like(labels), contexts),
        "finite": (features.masked_fill(features > 8, torch.inf), labels, contexts),
        "constant": (torch.ones_like(features), labels, contexts),
        "0 to 4": (features, labels + 1, contexts),
    }.items():
        refused(lambda arguments=arguments: fitted(*arguments), match)
