"""Sparse probes: the dimensions that carry a planted label are found, and the choice flatters nobody."""

import numpy as np
import pytest
import torch
from sklearn.feature_selection import f_classif

from kvprobe.probing.intervals import held_out_means
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.sparse import eta_squared, hits_by_count, sparse_hits
from kvprobe.probing.splits import fold_numbers
from kvprobe.stats import SHARE
from tests.refusals import refused

CLASSES, DIM, EACH = 3, 32, 8


def planted(signal: float, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """One probe of which dimensions 5 and 20 each tell one of two targets, the others nothing; folds by context."""
    generator = torch.Generator().manual_seed(0)
    homes = np.repeat(np.arange(30), EACH)
    labels = torch.randint(0, classes, (2, len(homes)), generator=generator)
    features = torch.randn(1, len(homes), DIM, generator=generator)
    for target, carrier in enumerate((5, 20)):
        features[0, :, carrier] += signal * labels[target]
    return features, labels, homes, fold_numbers("leave-context-out", homes, 5, np.random.default_rng(0))


def test_eta_squared_agrees_with_scikit_learns_f():
    features, labels, *_ = planted(0.7)
    eta = eta_squared(features, labels, CLASSES)
    for target in range(2):
        f, _ = f_classif(features[0].double().numpy(), labels[target].numpy())
        samples = labels.shape[1]
        expected = f * (CLASSES - 1) / (f * (CLASSES - 1) + samples - CLASSES)
        np.testing.assert_allclose(eta[0, target].numpy(), expected, rtol=1e-5)


def test_eta_squared_of_noise_is_what_its_docstring_says():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 60, 4000, generator=generator)
    labels = torch.randint(0, CLASSES, (1, 60), generator=generator)
    eta = eta_squared(features, labels, CLASSES)
    expected = (CLASSES - 1) / 59
    assert float(eta.mean()) == pytest.approx(expected, abs=5 * float(eta.std()) / 4000**0.5)


def test_variance_between_contexts_hides_a_signal_only_from_the_total():
    features, labels, homes, _ = planted(1.0)
    shifted = features + 100 * torch.randn(30, DIM, generator=torch.Generator().manual_seed(1))[homes]
    assert float(eta_squared(shifted, labels, CLASSES)[0, 0, 5]) < 0.05
    within, plain = (eta_squared(x, labels, CLASSES, contexts=homes) for x in (shifted, features))
    torch.testing.assert_close(within, plain, rtol=1e-3, atol=1e-4)
    assert int(within[0, 0].argmax()) == 5
    assert float(within[0, 0, 5]) > 0.2


def test_labels_that_follow_the_context_have_no_eta_squared_within_contexts():
    homes = np.repeat(np.arange(30), EACH)
    labels = torch.from_numpy(homes % CLASSES)[None]
    features = torch.randn(1, 240, 4, generator=torch.Generator().manual_seed(0))
    features[0, :, 2] += 3 * labels[0]
    assert float(eta_squared(features, labels, CLASSES)[0, 0, 2]) > 0.8
    assert float(eta_squared(features, labels, CLASSES, contexts=homes)[0, 0, 2]) < 1e-9


def test_a_dimension_that_is_constant_but_for_round_off_has_no_eta_squared():
    features, labels, *_ = planted(1.0)
    features[0, :, 3] = 7.0
    features[0, :, 4] = 7.0 + 1e-6 * labels[0]
    assert eta_squared(features, labels, CLASSES)[0, :, 3:5].abs().max() == 0


def test_the_carrier_of_each_target_is_chosen_first_and_alone_suffices():
    features, labels, homes, folds = planted(2.0, classes=2)
    chosen, hits = sparse_hits(features, labels, folds, 2)
    assert (chosen[0, :, 0, 0] == 5).all()
    assert (chosen[0, :, 1, 0] == 20).all()
    best, random = ({k: hit[kind].mean() for k, hit in hits.items()} for kind in (0, 1))
    # The best threshold lies one standard deviation from either class.
    (_,), (low,), (high,) = held_out_means(hits[1][0], homes, SHARE)
    assert low <= 0.8413 <= high
    assert best[1] > random[1] + 0.2
    assert list(best) == [1, 2, 4, 8, 16, 32]
    assert best[32] == random[32]


def test_choosing_among_many_dimensions_of_noise_stays_at_chance():
    """Chosen on all samples, the best of many dimensions of noise would look far better than chance."""
    generator = torch.Generator().manual_seed(1)
    homes = np.repeat(np.arange(15), EACH)
    labels = torch.randint(0, CLASSES, (1, 120), generator=generator)
    features = torch.randn(8, 120, 1000, generator=generator)
    folds = fold_numbers("leave-context-out", homes, 5, np.random.default_rng(0))
    hits, _ = sparse_hits(features, labels, folds, CLASSES, ks=[4])[1][4]
    # Eight probes of 120 samples each, on the same labels: four standard deviations of one.
    assert abs(hits.mean() - 1 / CLASSES) < 4 * np.sqrt(2 / 9 / 120)
    best = eta_squared(features, labels, CLASSES).topk(4).indices[:, 0]
    peeked = features.gather(2, best[:, None].expand(-1, 120, -1))
    flattered, _ = sparse_hits(peeked, labels, folds, CLASSES, ks=[4])[1][4]
    assert flattered.mean() > 1 / CLASSES + 4 * np.sqrt(2 / 9 / 120)


def test_each_fold_is_answered_by_probes_on_the_dimensions_that_it_chose():
    features, labels, _, folds = planted(0.3)
    chosen, by_k = sparse_hits(features, labels, folds, CLASSES, ks=[2])
    hits = 0
    for fold in range(5):
        test = torch.from_numpy(folds == fold)
        for target in range(2):
            seen = features[:, :, chosen[0, fold, target]].contiguous()
            asked = labels[target : target + 1]
            predicted = ridge_probes(seen, asked, torch.from_numpy(folds), CLASSES).predicted[0]
            hits += int(predicted.eq(asked)[:, test].sum())
    assert chosen.unique(dim=1).shape[1] > 1
    assert by_k[2][0].mean() == pytest.approx(hits / labels.numel())


def test_some_folds_alone_are_read_as_among_all():
    features, labels, _, folds = planted(0.3)
    _, whole = sparse_hits(features, labels, folds, CLASSES, ks=[2, 8])
    _, partial = sparse_hits(features, labels, folds, CLASSES, ks=[2, 8], only=[1, 3])
    inside = np.isin(folds, [1, 3])
    for k in (2, 8):
        for hits, among_all in zip(partial[k], whole[k], strict=True):
            assert (hits[:, inside] == among_all[:, inside]).all()
            assert not hits[:, ~inside].any()


def test_a_fold_chooses_dimensions_without_its_own_labels():
    features, labels, _, folds = planted(1.0)
    changed = labels.clone()
    changed[:, folds == 2] = (changed[:, folds == 2] + 1) % CLASSES
    one, other = (sparse_hits(features, y, folds, CLASSES, ks=[4])[0] for y in (labels, changed))
    assert one[:, 2].equal(other[:, 2])
    assert not one.equal(other)


def test_a_k_beyond_the_dimensions_is_refused():
    features, labels, _, folds = planted(1.0)
    for ks in ([0, 1], [33], []):
        refused(lambda ks=ks: sparse_hits(features, labels, folds, CLASSES, ks=ks), "k must lie in 1 to 32")


def test_hits_by_count_are_those_of_the_curves_and_of_a_ridge_probe_on_all():
    features, labels, contexts, folds = planted(2.0)
    rows = hits_by_count(features[0], labels, contexts, folds, CLASSES, split="random", ks=[1, 4], seed=5)
    curves = sparse_hits(features, labels, folds, CLASSES, ks=[1, 4], rng=np.random.default_rng([5, 6]))[1]
    for k, (best, random) in curves.items():
        chosen = rows[(rows["k"] == k) & ~rows["every"]]
        np.testing.assert_array_equal(chosen["right"], best[0])
        np.testing.assert_array_equal(chosen["random"], random[0])
        assert chosen["context"].tolist() == contexts.tolist()
    whole = ridge_probes(features, labels, torch.from_numpy(folds), CLASSES).predicted[0].eq(labels).double().mean(0)
    np.testing.assert_array_equal(rows[rows["every"]]["right"], whole)
