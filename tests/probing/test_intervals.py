"""Intervals of what probes read: they hold what the same procedure reads of other contexts."""

import dataclasses

import numpy as np
import pytest
import torch

from kvprobe.probing.claims import FLOOR, Probing
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import fit_sites
from kvprobe.probing.intervals import INFORMATION, held_out, held_out_means
from kvprobe.probing.probe_features import probe_features
from kvprobe.probing.splits import Split, fold_numbers
from kvprobe.stats import SHARE, means
from kvprobe.tasks.designs import Target

CONTEXTS, EACH, CLASSES, DIM = 8, 16, 2, 4
HOMES = np.repeat(np.arange(CONTEXTS), EACH)


def drawn(signal: float, sites: int, seed: int, contexts: int = CONTEXTS) -> Features:
    """Independent sites that hold the same labels with this signal, or none, and offsets of contexts."""
    generator = torch.Generator().manual_seed(seed)
    homes = np.repeat(np.arange(contexts), EACH)
    labels = torch.randint(0, CLASSES, (1, len(homes)), generator=generator)
    vectors = torch.randn(contexts, sites, DIM, generator=generator)[homes]
    vectors = vectors + torch.randn(len(homes), sites, DIM, generator=generator)
    vectors += signal * torch.eye(CLASSES, DIM)[labels[0]][:, None]
    where = tuple(Site(layer, None, "mean") for layer in range(sites))
    return Features({"v": vectors}, {"v": where}, np.arange(len(homes)), labels, homes, Target("bit", ("no", "yes")))


@pytest.mark.parametrize("signal", [0.0, 1.0])
@pytest.mark.parametrize("split", ["leave-context-out", "paired"])
def test_intervals_hold_what_is_read_on_average_and_would_not_with_the_fits_held_fixed(split: Split, signal: float):
    held, fixed = [], []
    for seed in range(4):
        features = drawn(signal, 60, seed)
        fold = fold_numbers(split, HOMES, 8, np.random.default_rng(seed))
        hits = fit_sites(features, split, fold).predicted.eq(features.labels).double().mean(1).numpy()
        truth = hits.mean() if signal else 1 / CLASSES
        for covered, of in ((held, held_out_means), (fixed, means)):
            _, low, high = of(hits, HOMES, SHARE)
            covered += list((low <= truth) & (truth <= high))
    # The percentile bootstrap of these hits holds 84 to 96 %.
    assert np.mean(held) >= 0.94
    assert np.mean(fixed) < np.mean(held)


def test_a_mean_is_that_of_the_samples_and_its_interval_stays_a_share():
    hits = np.repeat([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0], EACH)
    estimate = held_out(hits, HOMES, SHARE)
    assert estimate.mean == pytest.approx(0.875)
    assert 0 <= estimate.low < estimate.mean < estimate.high <= 1
    assert (estimate.smallest, estimate.largest) == (0, 1)


def test_information_below_zero_counts_as_zero_with_an_interval_of_the_same_width_above():
    bits = np.repeat([-0.3, -0.1, -0.2, -0.1, -0.3, -0.2, -0.1, -0.3], EACH)
    estimate, raw = held_out(bits, HOMES, INFORMATION), held_out(bits, HOMES)
    assert raw.high < 0
    assert (estimate.mean, estimate.low) == (0, 0)
    assert estimate.high == pytest.approx(raw.high - raw.mean)


@pytest.fixture(scope="module")
def read() -> Probing:
    return probe_features(
        drawn(4.0, 1, 0), {FLOOR: drawn(0.0, 1, 0)}, folds=4, permutations=19, rng=np.random.default_rng(0)
    )


def test_a_claim_takes_the_interval_and_the_permutations(read: Probing):
    said = str(read).splitlines()
    assert all(": decodable above the restart;" in line for line in said)
    unsure = dataclasses.replace(read, table=read.table.assign(p_family=0.2))
    assert all(
        ": not confirmed (permuted labels are not read significantly worse) above" in line
        for line in str(unsure).splitlines()
    )
    assert not any(unsure.confirmed(split) for split in unsure.picks)
    blind = {key: np.zeros_like(hits) if key[1] == "retained" else hits for key, hits in read.right.items()}
    assert all(": not detected above" in line for line in str(dataclasses.replace(read, right=blind)).splitlines())


def test_intervals_of_a_claim_are_those_of_all_splits_together(read: Probing):
    for split in read.picks:
        alone, together = read.reading(split, FLOOR, "lead"), read.lead(split, FLOOR, len(read.picks))
        assert alone.mean == pytest.approx(together.mean)
        assert together.low < alone.low < alone.high <= together.high


def test_few_contexts_give_a_range_and_no_claim():
    features = drawn(4.0, 1, 0, contexts=5)
    warning, *said = str(probe_features(features, {}, folds=5, permutations=0, rng=np.random.default_rng(0))).split(
        "\n"
    )
    assert "5 contexts are too few to tell" in warning
    assert all(": too few contexts to tell; a probe reads" in line for line in said)
    assert "(range " in said[0]


def test_at_most_a_few_of_40_probings_of_noise_claim_anything():
    claims = 0
    for seed in range(40):
        features = drawn(0.0, 1, 100 + seed)
        probing = probe_features(features, {}, folds=4, permutations=0, rng=np.random.default_rng(seed))
        claims += ": decodable" in str(probing)
    assert claims <= 5
