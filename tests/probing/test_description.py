"""Online codelength on planted data whose entropy is known."""

from math import log, log2

import numpy as np
import pytest
import torch

from kvprobe.probing.description import BLOCKS, block_ends, description, ridge_log_probs
from tests.refusals import refused

CLASSES, CONTEXTS, EACH = 4, 60, 10
HOMES = np.repeat(np.arange(CONTEXTS), EACH)
SAMPLES = CONTEXTS * EACH


def drawn(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CLASSES, (2, SAMPLES), generator=torch.Generator().manual_seed(seed))


def test_noise_costs_slightly_more_than_the_uniform_code():
    features = torch.randn(3, SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    table = description(features, drawn(), HOMES, CLASSES)
    assert len(table) == 6
    # The uniform guess is one of 31 candidates.
    assert (table.bits <= 2 + log2(31) / SAMPLES).all()
    assert (table.bits > 1.97).all()
    assert (table.low < 1.02).all()


def test_noisy_symbols_cost_little_more_than_their_entropy():
    rate, labels = 0.8, drawn()
    generator = torch.Generator().manual_seed(2)
    noise = torch.randint(1, CLASSES, labels.shape, generator=generator)
    noise[torch.rand(labels.shape, generator=generator) < rate] = 0
    shown = torch.nn.functional.one_hot((labels + noise) % CLASSES, CLASSES).float()
    table = description(shown, labels, HOMES, CLASSES)
    entropy = -rate * log2(rate) - (1 - rate) * log2((1 - rate) / (CLASSES - 1))
    one_target = table[table.probe == table.target]
    error = (noise > 0).double().mean(1).numpy()
    empirical = -(1 - error) * log2(rate) - error * log2((1 - rate) / (CLASSES - 1))
    assert abs(empirical - entropy).max() < 0.15
    assert (one_target.bits > empirical).all()
    assert (one_target.bits < empirical + 0.25).all()
    assert (one_target.low > 1.3).all()
    other = table[table.probe != table.target]
    assert (other.bits > 1.97).all()


def test_a_clear_signal_needs_few_bits_and_a_weaker_one_more():
    labels = drawn()[:1]
    generator = torch.Generator().manual_seed(3)
    codes, noise = torch.randn(CLASSES, 32, generator=generator), torch.randn(SAMPLES, 32, generator=generator)
    features = torch.stack([noise + signal * codes[labels[0]] for signal in (0.0, 0.3, 0.6, 3.0)])
    table = description(features, labels, HOMES, CLASSES)
    assert (np.diff(table.compression) > 0).all()
    assert table.compression[3] > 8
    assert table.saved_low[3] > 1


def test_what_the_context_gives_away_is_in_the_context_code_and_not_saved_by_a_probe():
    generator = torch.Generator().manual_seed(4)
    liked = torch.randint(0, CLASSES, (CONTEXTS,), generator=generator)[HOMES]
    labels = torch.where(torch.rand(SAMPLES, generator=generator) < 0.8, liked, drawn()[0])[None]
    known = 3 * torch.randn(CONTEXTS, 32, generator=generator)[HOMES]
    features = (known + torch.randn(SAMPLES, 32, generator=generator))[None]
    seen = description(features, labels, HOMES, CLASSES, split="random")
    assert seen.low[0] > 1.05
    assert seen.context_bits[0] < 1.6
    assert seen.saved_low[0] < 0.1
    held_out = description(features, labels, HOMES, CLASSES)
    assert held_out.compression[0] < 1.02
    # Whole contexts are sent at once, so that their counts cannot help either.
    assert held_out.context_bits[0] > 1.95


def test_the_code_is_the_bayesian_mixture_of_its_candidates_and_sees_no_label_early(monkeypatch: pytest.MonkeyPatch):
    """Against the definition, candidate by candidate, with a predictor that checks what it is given."""
    labels = drawn()[:1, :40]
    features = torch.arange(40.0)[None, :, None]
    asked: list[tuple[int, int]] = []

    def predict(train, answers, test, classes):
        rows = train[0, :, 0].long()
        assert answers[0].equal(labels[0, rows])
        assert not set(rows.tolist()) & set(test[0, :, 0].long().tolist())
        asked.append((len(rows), test.shape[1]))
        sharp = torch.tensor([0.0, 1.0, 4.0])[:, None, None, None, None]
        # Right every second time, by the number that the feature is.
        guess = (labels[0, test[0, :, 0].long()] + test[0, :, 0].long() % 2) % classes
        return (sharp * torch.nn.functional.one_hot(guess, classes)).log_softmax(-1)[:, None, None][:, :, :, 0, 0]

    monkeypatch.setattr("kvprobe.probing.description.ridge_log_probs", predict)
    result = description(features, labels, np.arange(40), CLASSES, split="random", blocks=(0.1, 0.25, 1.0))
    assert asked == [(4, 6), (10, 30)]
    order = np.argsort(np.random.default_rng(0).permutation(40), kind="stable")[4:]
    evidence = []
    for sharp in (0.0, 1.0, 4.0, 0.0):
        right = sharp - log(np.exp(sharp) + CLASSES - 1)
        evidence.append(sum(right if sample % 2 == 0 else right - sharp for sample in order))
    expected = 4 * 2 - log2(np.mean(np.exp(evidence)))
    assert result.bits[0] * 40 == pytest.approx(expected, rel=1e-6)


def test_blocks_keep_contexts_whole():
    ends = block_ends(HOMES, BLOCKS)
    assert all(end % EACH == 0 for end in ends)
    assert ends[-1] == SAMPLES
    assert ends == sorted(set(ends))


def test_a_probe_does_not_depend_on_the_probes_beside_it():
    features = torch.randn(5, SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    together = description(features, drawn(), HOMES, CLASSES)
    alone = description(features[2:3], drawn(), HOMES, CLASSES)
    np.testing.assert_allclose(together[together.probe == 2].bits, alone.bits, rtol=1e-4)


def test_ridge_scores_equal_scikit_learns():
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    from kvprobe.probing.ridge import PENALTIES

    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 90, 6, generator=generator) * torch.logspace(-1, 2, 6) + 5
    labels = torch.randint(0, CLASSES, (1, 90), generator=generator)
    log_probs = ridge_log_probs(features[:, :60], labels[:, :60], features[:, 60:], CLASSES)
    scaler = StandardScaler().fit(features[0, :60])
    for number, penalty in enumerate(PENALTIES):
        oracle = Ridge(alpha=60 * penalty).fit(scaler.transform(features[0, :60]), np.eye(CLASSES)[labels[0, :60]])
        scores = torch.from_numpy(oracle.predict(scaler.transform(features[0, 60:])))
        # Sharpness 1 comes first, then six to a penalty or five penalties to a sharpness.
        torch.testing.assert_close(log_probs[number, 0, 0].double(), scores.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_bad_input_is_refused():
    features = torch.randn(1, SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    for blocks in ((), (0.5,), (0.5, 0.2, 1.0), (0.0, 1.0)):
        refused(
            lambda blocks=blocks: description(features, drawn(), HOMES, CLASSES, blocks=blocks),
            "rise from above 0 to 1",
        )
    refused(lambda: description(features, drawn(), HOMES, 3), "0 to 2")
    refused(lambda: description(features, drawn() * torch.tensor([[1], [0]]), HOMES, CLASSES), "Target 1 has one class")
    features[0, 0, 0] = torch.inf
    refused(lambda: description(features, drawn(), HOMES, CLASSES), "finite")
