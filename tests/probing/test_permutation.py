"""P-values over many probes: error rates on simulated nulls, and detection of a planted signal."""

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.probing.controls import permuted_within
from kvprobe.probing.fixed import PENALTY
from kvprobe.probing.permutation import p_values, permuted_hits, sign_flipped, step_down
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.splits import fold_numbers, paired_features
from kvprobe.stats import binomial

CLASSES, PROBES, CONTEXTS, EACH, DIM = 3, 6, 12, 6, 4
HOMES = np.repeat(np.arange(CONTEXTS), EACH)


def p_value_table(
    features: torch.Tensor, labels: torch.Tensor, folds: np.ndarray, permutations: int, rng: np.random.Generator
) -> pd.DataFrame:
    """One row per probe."""
    orders = permuted_within(HOMES, permutations, rng)
    scores = permuted_hits(features, labels, torch.from_numpy(folds), CLASSES, orders)
    p = p_values(scores)
    return pd.DataFrame(
        {
            "accuracy": scores[0] / labels.numel(),
            "floor": scores[1:].mean(0) / labels.numel(),
            "p": p,
            "p_family": step_down(scores),
        }
    )


def null(rng: np.random.Generator, context_signal: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probes of which half know the context, and labels that depend on nothing but the context."""
    features = rng.standard_normal((PROBES, CONTEXTS * EACH, DIM))
    features[: PROBES // 2] += 2 * rng.standard_normal((PROBES // 2, CONTEXTS, DIM))[:, HOMES]
    liked = rng.integers(0, CLASSES, CONTEXTS)[HOMES]
    free = rng.integers(0, CLASSES, len(HOMES))
    labels = np.where(rng.random(len(HOMES)) < context_signal, liked, free)
    return torch.from_numpy(features).float(), torch.from_numpy(labels)[None]


@pytest.mark.parametrize(("split", "context_signal"), [("leave-context-out", 0.0), ("random", 0.7)])
def test_5_percent_of_200_nulls_are_significant(split, context_signal: float):
    """Family-wise over probes, and of a single probe, also where labels follow the context and probes know it."""
    rng = np.random.default_rng(1)
    family, single = 0, 0
    for _ in range(200):
        features, labels = null(rng, context_signal)
        folds = fold_numbers(split, HOMES, 3, rng)
        table = p_value_table(features, labels, folds, 39, rng)
        family += int(table.p_family.min() <= 0.05)
        single += int(table.p[0] <= 0.05)
    # 0.05 lies in the 95 % interval of the rate, up to what ties take away.
    assert binomial(family, 200).low <= 0.05 <= binomial(family, 200).high
    assert binomial(single, 200).low <= 0.05
    assert single > 0


def test_a_comparison_with_chance_would_call_what_only_the_context_gives_away():
    """The control of the test above: its data do fool a comparison with chance."""
    rng = np.random.default_rng(1)
    features, labels = null(rng, 0.9)
    table = p_value_table(features, labels, fold_numbers("random", HOMES, 3, rng), 99, rng)
    assert table.accuracy[:3].min() > 1 / CLASSES + 0.1
    assert table.floor[:3].min() > 0.45
    assert table.p_family.min() > 0.05


def test_the_one_probe_with_a_signal_is_detected():
    rng = np.random.default_rng(2)
    features, labels = null(rng, 0.5)
    codes = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    features[4] += 2 * codes[labels[0]]
    table = p_value_table(features, labels, fold_numbers("leave-context-out", HOMES, 3, rng), 99, rng)
    assert table.p_family[4] == table.p[4] == 1 / 100
    assert table.accuracy[4] > table.floor[4] + 0.3
    assert table.drop(index=4).p_family.min() > 0.05


def test_p_values_equal_their_definition_probes_fitted_again_for_each_permutation():
    features, labels = null(np.random.default_rng(4), 0.5)
    labels = torch.cat([labels, labels.roll(1, 1)])
    folds = fold_numbers("leave-context-out", HOMES, 3, np.random.default_rng(0))
    table = p_value_table(features, labels, folds, 19, np.random.default_rng(7))
    orders = [np.arange(len(HOMES)), *permuted_within(HOMES, 19, np.random.default_rng(7))]
    scores = []
    for order in orders:
        answers = labels[:, order]
        predicted = ridge_probes(features, answers, torch.from_numpy(folds), CLASSES, penalties=(PENALTY,)).predicted
        scores.append(predicted.eq(answers).sum((1, 2)))
    counts = torch.stack(scores).numpy()
    np.testing.assert_allclose(table.p, (counts >= counts[0]).mean(0))
    np.testing.assert_allclose(table.floor, counts[1:].mean(0) / labels.numel())
    np.testing.assert_allclose(table.accuracy, counts[0] / labels.numel())


def test_round_off_around_a_context_mean_is_not_significant():
    """What the restart floor looks like under the paired split."""
    rng = np.random.default_rng(6)
    _, labels = null(rng, 0.0)
    same = 50 + torch.from_numpy(rng.standard_normal((2, CONTEXTS, DIM))[:, HOMES]).float()
    same[:, :, 0] += 1e-5 * labels[0]
    same[1, :, 1] += labels[0]
    assert same[0, :, 0].std() > 0
    features = paired_features(same, HOMES)
    folds = fold_numbers("paired", HOMES, 3, rng)
    table = p_value_table(features, labels, folds, 39, rng)
    assert features[0].abs().max() == 0
    assert table.p_family[0] > 0.05
    assert table.p_family[1] == 1 / 40


def test_step_down_equals_its_definition():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((50, 5)) * [1, 2, 3, 4, 5] + [0, 10, 0, -3, 7]
    scores[0] += [3, 4, 0, 1, 9]
    standard = (scores - scores.mean(0)) / scores.std(0)
    remaining, last = list(range(5)), 0.0
    expected = np.empty(5)
    while remaining:
        top = max(remaining, key=lambda probe: standard[0, probe])
        last = max(last, np.mean(standard[:, remaining].max(1) >= standard[0, top]))
        expected[top] = last
        remaining.remove(top)
    np.testing.assert_allclose(step_down(scores), expected)


def test_copies_of_a_probe_cost_no_power():
    """What sets the maximum apart from a Bonferroni correction."""
    scores = np.random.default_rng(0).standard_normal((100, 1))
    scores[0] = 2.0
    assert (step_down(np.repeat(scores, 50, 1)) == step_down(scores)).all()


def test_a_probe_with_constant_scores_is_not_significant():
    scores = np.random.default_rng(0).standard_normal((40, 3))
    scores[:, 1] = 5.0
    assert step_down(scores)[1] > 0.3


def test_a_planted_difference_is_found_and_noise_is_not():
    change = np.random.default_rng(0).normal(0, 0.1, (40, 60))
    change[:, 7] += 0.2
    change[:, 9] -= 0.2
    change[:, 11] = 0
    p = sign_flipped(change, 1999, np.random.default_rng([0, 3]))
    assert np.flatnonzero(p <= 0.05).tolist() == [7, 9]
    assert p[11] == 1


def test_under_the_null_the_family_is_wrong_one_time_in_twenty():
    wrong = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        # Columns that go together, as latents do, of very different sizes.
        change = rng.normal(size=(20, 3)) @ rng.normal(size=(3, 12)) + rng.normal(size=(20, 12))
        change *= np.exp(rng.normal(size=12))
        wrong += bool((sign_flipped(change, 1999, np.random.default_rng([seed, 3])) <= 0.05).any())
    assert wrong <= 13
