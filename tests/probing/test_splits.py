"""Splits: contexts stay together, and centring takes nothing but the context's mean."""

import numpy as np
import pytest
import torch

from kvprobe.probing.splits import SPLITS, Split, centred_within, fold_numbers
from tests.refusals import refused

CONTEXTS = np.repeat(np.arange(11), 7)


@pytest.mark.parametrize("split", ["leave-context-out", "paired"])
def test_no_context_is_in_two_folds(split: Split):
    folds = fold_numbers(split, CONTEXTS, 5, np.random.default_rng(0))
    for context in range(11):
        assert len(set(folds[context == CONTEXTS])) == 1


@pytest.mark.parametrize("split", SPLITS)
def test_folds_are_as_equal_as_they_can_be(split: Split):
    folds = fold_numbers(split, CONTEXTS, 5, np.random.default_rng(0))
    sizes = np.bincount(folds, minlength=5)
    assert sizes.sum() == len(CONTEXTS)
    assert sizes.max() - sizes.min() <= (1 if split == "random" else 7)


def test_the_random_split_spreads_each_context_over_folds():
    folds = fold_numbers("random", CONTEXTS, 5, np.random.default_rng(0))
    assert all(len(set(folds[context == CONTEXTS])) > 1 for context in range(11))


def test_too_few_contexts_are_refused():
    refused(lambda: fold_numbers("leave-context-out", CONTEXTS, 12, np.random.default_rng(0)), "at least 12 contexts")


def test_centring_leaves_each_context_with_mean_zero_and_its_differences():
    features = torch.randn(77, 3, 4, generator=torch.Generator().manual_seed(0))
    centred = centred_within(features, CONTEXTS)
    for context in range(11):
        rows = torch.from_numpy(np.flatnonzero(context == CONTEXTS))
        torch.testing.assert_close(centred[rows].mean(0), torch.zeros(3, 4), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            centred[rows] - centred[rows[0]], features[rows] - features[rows[0]], atol=1e-6, rtol=0
        )
