"""Moments from batches equal moments of everything, and ridge from a stream equals ridge from memory."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.probing.gram import FoldMoments, Moments
from kvprobe.probing.ridge import ridge_probes, streamed_ridge
from tests.probing.planted import planted
from tests.refusals import refused

CLASSES = 4


def whole(features: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Moments by their definitions, in fp64."""
    seen = features[:, rows].double()
    answers = torch.cat([torch.nn.functional.one_hot(row[rows], CLASSES) for row in labels], 1).double()
    centred = seen - seen.mean(1, keepdim=True)
    return {
        "features": seen.mean(1),
        "answers": answers.mean(0),
        "gram": centred.mT @ centred,
        "cross": centred.mT @ (answers - answers.mean(0)),
    }


def assert_same(moments: Moments, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        measured = getattr(moments, name)
        assert (measured - tensor).abs().max() <= 2e-6 * tensor.abs().max(), name


@settings(max_examples=25)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 100))
def test_any_batches_in_any_order_give_the_moments_of_all_samples(sizes: list[int], seed: int):
    features, labels, folds = planted(120, CLASSES, 1.0, probes=2, targets=2, seed=seed)
    gathered = FoldMoments(5, CLASSES)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
    for rows in _cut(order, sizes):
        gathered.update(features[:, rows], labels[:, rows], folds[rows])
    for kept in ([0], [1, 3], [0, 1, 2, 3, 4]):
        rows = torch.isin(folds, torch.tensor(kept))
        moments = gathered.of(kept)
        assert moments.count == int(rows.sum())
        assert_same(moments, whole(features, labels, rows))


def _cut(order: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Pieces of these sizes in turn until nothing is left."""
    pieces, first, turn = [], 0, 0
    while first < len(order):
        pieces.append(order[first : first + sizes[turn % len(sizes)]])
        first, turn = first + len(pieces[-1]), turn + 1
    return pieces


def test_means_a_thousand_times_the_deviation_do_not_cancel():
    features, labels, folds = planted(300, CLASSES, 1.0)
    features = features * torch.logspace(-2, 2, features.shape[2]) + 3000 * torch.logspace(-2, 2, features.shape[2])
    gathered = FoldMoments(5, CLASSES)
    for row in range(300):
        gathered.update(features[:, [row]], labels[:, [row]], folds[[row]])
    measured, expected = gathered.of(range(5)), whole(features, labels, torch.ones(300, dtype=torch.bool))
    deviation = (expected["gram"].diagonal(dim1=1, dim2=2)).sqrt()
    apart = (measured.gram - expected["gram"]) / deviation[:, :, None] / deviation[:, None]
    assert apart.abs().max() < 1e-6


def test_shards_merge_to_the_whole():
    features, labels, folds = planted(200, CLASSES, 1.0)
    shards = [FoldMoments(5, CLASSES) for _ in range(2)]
    # The second shard has no sample of fold 0.
    first = (torch.arange(200) < 90) | (folds == 0)
    for shard, rows in zip(shards, (first, ~first), strict=True):
        shard.update(features[:, rows], labels[:, rows], folds[rows])
    shards[1].merge(shards[0])
    assert_same(shards[1].of(range(5)), whole(features, labels, torch.ones(200, dtype=torch.bool)))


def test_size_is_the_root_mean_square_of_what_is_read():
    features, labels, folds = planted(200, CLASSES, 1.0, probes=3)
    gathered = FoldMoments(5, CLASSES)
    gathered.update(features, labels, folds)
    torch.testing.assert_close(gathered.of(range(5)).size.float(), features.square().mean((1, 2)).sqrt())


@pytest.mark.parametrize("batch", [7, 37, 400])
def test_streamed_ridge_equals_ridge_in_memory(batch: int):
    features, labels, folds = planted(300, CLASSES, 1.5, probes=3, targets=2)
    # Folds of unequal size.
    folds[:80] = 3
    streamed = streamed_ridge(lambda: iter(features.split(batch, 1)), labels, folds, CLASSES)
    expected = ridge_probes(features, labels, folds, CLASSES)
    assert torch.equal(streamed.predicted, expected.predicted)
    torch.testing.assert_close(streamed.penalty, expected.penalty)
    torch.testing.assert_close(streamed.inner_accuracy, expected.inner_accuracy)


def test_a_stream_is_let_go_of_batch_by_batch():
    features, labels, folds = planted(200, CLASSES, 1.0)
    passed: list[weakref.ref[torch.Tensor]] = []

    def batches() -> Iterator[torch.Tensor]:
        for first in range(0, 200, 20):
            batch = features[:, first : first + 20].clone()
            assert sum(reference() is not None for reference in passed) <= 1
            passed.append(weakref.ref(batch))
            yield batch

    streamed_ridge(batches, labels, folds, CLASSES)
    assert len(passed) == 30


def test_bad_streams_are_refused():
    features, labels, folds = planted(100, CLASSES, 1.0)
    refused(
        lambda: streamed_ridge(lambda: iter([features[:, :90]]), labels, folds, CLASSES),
        "gave 90 samples for 100 labels",
    )
    refused(
        lambda: streamed_ridge(lambda: iter([features[:, :50], features[:, 50:]]), labels[:, :90], folds[:90], CLASSES),
        "gave 100 samples for 90 labels",
    )
    gathered = FoldMoments(5, CLASSES)
    refused(lambda: gathered.of([1]), "No sample is in folds")
    refused(lambda: gathered.update(features, labels + 1, folds), "Labels must lie in 0 to 3")
    refused(lambda: gathered.update(features, labels, folds + 1), "Folds must lie in 0 to 4")
    features[0, 3, 3] = torch.inf
    refused(lambda: gathered.update(features, labels, folds), "finite")
