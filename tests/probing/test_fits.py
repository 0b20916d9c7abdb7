"""Fits at every site, and the choice between sites."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvprobe.probing.calibration import calibrated_tasks
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import Fits, chosen, fit_sites, fit_tasks
from kvprobe.probing.splits import SPLITS, Split, centred_within, fold_numbers
from kvprobe.tasks.designs import Target


def test_the_choice_between_sites_uses_the_inner_fold_alone():
    folds = np.array([0, 0, 1, 1, 2, 2])
    inner = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.8, 0.1]])
    predicted = torch.stack([torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 6, dtype=torch.long)])
    sites = (("k", Site(4, None, "mean")), ("k", Site(7, None, "last")))
    best = chosen(Fits(sites, predicted, torch.zeros(2, 6), inner), folds)
    assert best.predicted[0].tolist() == [0, 0, 1, 1, 0, 0]
    assert [site.layer for _, site in best.picks] == [4, 7, 4]


@pytest.mark.parametrize("split", SPLITS)
def test_each_site_is_fitted_by_itself(split: Split, monkeypatch: pytest.MonkeyPatch):
    """Against one probe at a time, whatever the size of the batches."""
    generator = torch.Generator().manual_seed(0)
    contexts, rows = np.repeat(np.arange(6), 8), np.arange(48)
    labels = torch.randint(0, 3, (2, 48), generator=generator)
    tensors = {family: torch.randn(48, 2, 2, 5, generator=generator) for family in ("k", "v")}
    features = Features.of_read_outs(tensors, rows, labels, contexts, Target("letter", tuple("abc")))
    folds = fold_numbers(split, contexts, 3, np.random.default_rng(0))
    fits = fit_sites(features, split, folds)
    monkeypatch.setattr("kvprobe.probing.features._CHUNK_BYTES", 1)
    assert fit_sites(features, split, folds).predicted.equal(fits.predicted)
    assert fits.hits(labels).shape == (8, 48)
    for index, (family, site) in enumerate(fits.sites):
        seen = tensors[family][:, site.layer, ("mean", "last").index(site.read)]
        size = seen.square().mean().sqrt()[None]
        seen = centred_within(seen, contexts) if split == "paired" else seen
        (alone,) = calibrated_tasks(seen[None], [labels], torch.from_numpy(folds), 3, size=size)
        assert alone.predicted[0].equal(fits.predicted[index])
        torch.testing.assert_close(alone.information[0].mean(0), fits.information[index])
    other = labels.flip(1)
    together = fit_tasks(features, split, folds, [labels, other])
    for task, apart in zip(together, (fits, fit_sites(replace(features, labels=other), split, folds)), strict=True):
        assert task.predicted.equal(apart.predicted)
        assert task.inner_accuracy.equal(apart.inner_accuracy)
        torch.testing.assert_close(task.information, apart.information)
