"""Erasers against the theorem that they rest on, an independent implementation, and probes trained anew."""

from dataclasses import replace

import concept_erasure
import numpy as np
import pytest
import torch

from kvprobe.erasing import Eraser, inlp, leace, leace_of, random_eraser
from kvprobe.erasing.leace import leace_beyond_chance
from kvprobe.probing.gram import Moments, one_hot_answers
from kvprobe.probing.ridge import ridge_probes
from tests.probing.planted import planted
from tests.refusals import refused

CLASSES = 4


def data(targets: int = 2, probes: int = 1, samples: int = 900) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return planted(samples, CLASSES, 2.0, probes=probes, targets=targets, spare=6)


def covariance_with_labels(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    answers = one_hot_answers(torch.atleast_2d(labels), CLASSES, torch.float64)
    centred = features.double() - features.double().mean(-2, keepdim=True)
    return centred.mT @ (answers - answers.mean(0)) / len(answers)


def moments(features: torch.Tensor, labels: torch.Tensor) -> Moments:
    return Moments.of(features.double(), one_hot_answers(labels, CLASSES, torch.float64))


def test_after_leace_all_classes_have_the_overall_mean():
    features, labels, _ = data(targets=1)
    erased = leace(features[0], labels[0], CLASSES).erased(features[0])
    mean = features[0].mean(0)
    for label in range(CLASSES):
        members = labels[0] == label
        assert (features[0, members].mean(0) - mean).abs().max() > 1
        torch.testing.assert_close(erased[members].mean(0), mean, atol=2e-3, rtol=0)


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 1.0])
def test_after_leace_nothing_covaries_with_the_labels_at_any_shrinkage(shrinkage: float):
    features, labels, _ = data()
    eraser = leace_of(moments(features, labels), shrinkage)
    before, after = (
        covariance_with_labels(vectors, labels).abs().max() for vectors in (features, eraser.erased(features))
    )
    assert before > 0.1
    assert after < 1e-4 * before
    assert eraser.rank.tolist() == [2 * (CLASSES - 1)]


def test_after_leace_a_newly_trained_probe_is_at_chance():
    features, labels, folds = data()
    erased = leace(features, labels, CLASSES).erased(features)
    right = [
        ridge_probes(vectors, labels, folds, CLASSES).predicted.eq(labels).double().mean()
        for vectors in (features, erased)
    ]
    commonest = labels.mode(1).values[:, None].eq(labels).double().mean()
    assert right[0] > 0.8
    assert right[1] < commonest + 0.03


def test_leace_changes_least_of_all_maps_that_erase_as_much():
    """Any other such map projects along the same directions but reads them in another metric."""
    features, labels, _ = data()
    statistics = moments(features, labels)
    least = leace_of(statistics)
    change = (least.erased(features) - features).square().sum(-1).mean()
    assert change / features.var(1, correction=0).sum() == pytest.approx(float(least.share), rel=1e-3)
    for seed in range(5):
        half = torch.randn(statistics.gram.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        half = statistics.gram.diagonal(dim1=1, dim2=2).sqrt()[:, :, None] * half
        other = leace_of(replace(statistics, gram=statistics.gram + half @ half.mT))
        assert covariance_with_labels(other.erased(features), labels).abs().max() < 1e-4
        moved = (
            (other.read @ other.write).mT @ (statistics.gram / statistics.count).float() @ (other.read @ other.write)
        )
        assert float(moved.diagonal(dim1=1, dim2=2).sum()) > 1.01 * float(change)


def test_leace_equals_the_concept_erasure_package():
    features, labels, _ = data()
    answers = one_hot_answers(labels, CLASSES, torch.float64)
    fitter = concept_erasure.LeaceFitter.fit(
        features[0].double(), answers, shrinkage=False, constrain_cov_trace=False, svd_tol=1e-6
    )
    expected = fitter.eraser(features[0].double())
    torch.testing.assert_close(
        leace(features[0], labels, CLASSES).erased(features[0]).double(), expected, atol=2e-3, rtol=1e-4
    )


def test_sites_of_a_batch_are_erased_independently():
    features, labels, _ = data(probes=3)
    together = leace(features, labels, CLASSES)
    for site in range(3):
        alone = leace(features[site], labels, CLASSES)
        torch.testing.assert_close(
            together.at(site).erased(features[site]), alone.erased(features[site]), atol=1e-3, rtol=0
        )


def test_erasure_is_linear_in_strength_and_idempotent():
    features, labels, _ = data()
    eraser = leace(features, labels, CLASSES)
    torch.testing.assert_close(eraser.erased(features, 0.0), features)
    whole = eraser.erased(features)
    torch.testing.assert_close(eraser.erased(whole), whole, atol=1e-2, rtol=0)
    torch.testing.assert_close(eraser.erased(features, 2.0), 2 * whole - features, atol=1e-2, rtol=0)


def test_a_site_without_information_on_the_labels_is_unchanged():
    features, labels, _ = data(targets=1, probes=2)
    features[1] = 5.0
    eraser = leace(features, labels, CLASSES)
    assert eraser.rank.tolist() == [CLASSES - 1, 0]
    torch.testing.assert_close(eraser.erased(features)[1], features[1])


def test_directions_that_covary_no_more_than_with_shuffled_answers_are_left():
    features, labels, _ = data(targets=1)
    generator = torch.Generator().manual_seed(0)
    samples = labels.shape[1]
    orders = [torch.randperm(samples, generator=generator) for _ in range(20)]
    answers = one_hot_answers(labels, CLASSES, torch.float64)
    assert leace_beyond_chance(features, answers[orders[0]], orders[1:]).rank.tolist() == [0]
    kept, all_of_them = leace_beyond_chance(features, answers, orders), leace_of(moments(features, labels))
    assert 0 < int(kept.rank[0]) <= int(all_of_them.rank[0])
    before, after, whole = (
        covariance_with_labels(some[0], labels).norm()
        for some in (features, kept.erased(features), all_of_them.erased(features))
    )
    assert whole < 1e-5 * before
    assert after < 0.3 * before


def test_a_random_eraser_has_the_rank_and_whitened_variance_of_its_model_and_leaves_the_concept():
    features, labels, folds = data(probes=2)
    features[1] = features[1, :, :1] + torch.randn(features[1].shape, generator=torch.Generator().manual_seed(1))
    # Two dimensions of the first site do not vary, and take no direction.
    features[0, :, :2] = 3.0
    like = leace(features, labels, CLASSES)
    drawn = random_eraser(like, np.random.default_rng(0))
    assert drawn.rank.tolist() == like.rank.tolist()
    for eraser in (like, drawn):
        for site in range(2):
            change = (features[site] - eraser.at(site).erased(features[site])).double()
            whitened = change.mT @ change / len(change) @ torch.linalg.pinv(like.covariance[site].double(), rtol=1e-7)
            assert float(whitened.trace()) == pytest.approx(float(like.rank[site]), rel=0.02)
    moved = drawn.erased(features)
    torch.testing.assert_close(moved[0, :, :2], features[0, :, :2], atol=1e-4, rtol=0)
    right = ridge_probes(moved[:1], labels, folds, CLASSES).predicted.eq(labels).double().mean()
    assert right > 0.5
    again = random_eraser(like, np.random.default_rng(0))
    assert torch.equal(again.read, drawn.read)


def test_inlp_stops_at_chance():
    features, labels, folds = planted(900, CLASSES, 2.0, probes=2, spare=40)
    features[1] = torch.randn(features[1].shape, generator=torch.Generator().manual_seed(2))
    eraser = inlp(features, labels, CLASSES, folds == 0, rounds=6)
    assert CLASSES - 1 <= int(eraser.rank[0]) < features.shape[2]
    assert eraser.rank[1] == 0
    projection = eraser.read @ eraser.write
    torch.testing.assert_close(projection @ projection, projection, atol=1e-3, rtol=0)
    erased = eraser.erased(features[:1].expand(2, -1, -1))[:1]
    right = ridge_probes(erased, labels, folds, CLASSES).predicted.eq(labels).double().mean()
    assert right < 1 / CLASSES + 0.08


@pytest.mark.usefixtures("unchecked")
def test_impossible_erasures_are_refused():
    features, labels, folds = data()
    refused(lambda: leace(features, labels[:, :10], CLASSES), "900 samples with 10 labels")
    refused(lambda: leace(features, labels, 3), "Labels must lie in 0 to 2")
    features[0, 3, 1] = torch.nan
    refused(lambda: leace(features, labels, CLASSES), "NaN or infinity")
    features[0, 3, 1] = 0.0
    refused(
        lambda: inlp(features, labels, CLASSES, torch.zeros_like(folds, dtype=torch.bool)),
        "0 of 900 samples are held out",
    )
    refused(lambda: inlp(features, torch.zeros_like(labels), CLASSES, folds == 0), "the one class")


def test_the_eraser_of_one_site_is_that_of_the_batch():
    features, labels, _ = data(probes=2)
    eraser = leace(features, labels, CLASSES)
    assert isinstance(eraser.at(1), Eraser)
    torch.testing.assert_close(eraser.at(1).share, eraser.share[1])
