"""Arms with a planted code: what each shows, what probes read of it, and between which of them probes transfer."""

from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.probing.arms import Arms, arm_read_outs
from kvprobe.probing.by_split import BySplit, fit_by_split, folds_by_split
from kvprobe.probing.features import READS, read_outs
from kvprobe.probing.fits import chosen, fit_sites
from kvprobe.probing.probe_features import probe_features
from kvprobe.probing.splits import SPLITS, Split
from kvprobe.probing.transfer import transfer_where_chosen
from kvprobe.studies.leakage.probe_arms import probe_arm, probe_change
from kvprobe.tasks.designs import Target
from tests.random_caches import random_tokens

CONTEXTS = np.repeat(np.arange(12), 10)
FOLDS = folds_by_split(CONTEXTS, 3, np.random.default_rng(0))
TEXTS = [tuple(range(1 + context % 3, 6)) for context in range(12)]


@pytest.fixture(scope="module")
def arms() -> Arms:
    """Layer 1 of `near` and `far` holds two digits in one frame, that of `other` in another one, and layer 0 of all
    nothing. Every context adds an offset of its own; `restart` holds nothing but that, one row for each context."""
    rng = np.random.default_rng(5)
    labels, frames = rng.integers(0, 4, (120, 2)), rng.normal(size=(2, 2, 4, 24))
    offsets = rng.normal(size=(12, 2, 2, 24)) * 3
    tensors: dict[str, Any] = {"restart.v": offsets}
    for number, arm in enumerate(("near", "far", "other")):
        held = frames[number // 2][np.arange(2), labels].sum(1)[:, None, None] * np.array([0, 1])[:, None, None]
        tensors[f"{arm}.v"] = offsets[CONTEXTS] + held + rng.normal(size=(120, 2, 2, 24)) * 0.3
    tensors |= {name: rng.normal(size=(120, 2, 3)) for name in ("logprob", "margin")}
    tensors |= {"correct": rng.integers(0, 2, (120, 2, 3)), "kl": rng.random((120, 2))}
    read = {name: torch.from_numpy(np.asarray(tensor, np.float32)) for name, tensor in tensors.items()}
    target = Target("digits", tuple("0123"), ("first", "second"))
    return Arms(read.__getitem__, ("v",), torch.from_numpy(labels).T.contiguous(), CONTEXTS, target, {"near": TEXTS})


@pytest.fixture(scope="module")
def fits(arms: Arms) -> dict[str, BySplit]:
    return {arm: fit_by_split(arms.features(arm), FOLDS) for arm in ("near", "far", "other")}


def test_what_is_captured_is_named_by_arm_and_family(tiny_llama: Model):
    captured = tiny_llama.capture(random_tokens(1, {"T1": 6}), ["v", "resid_post"])
    named = arm_read_outs("masked", captured, slice(2, 5))
    assert set(named) == {"masked.v", "masked.resid_post"}
    assert named["masked.v"].equal(read_outs(captured.stack("v")[..., 2:5, :]))


def test_an_arm_that_no_sample_can_reach_is_shared_by_those_of_a_context(arms: Arms):
    assert arms.features("near").rows.tolist() == list(range(120))
    assert arms.features("restart").rows.tolist() == CONTEXTS.tolist()
    assert arms.features("restart").texts is None
    assert arms.features("near").texts == tuple(TEXTS[context] for context in CONTEXTS)
    assert arms.named("-")[7] == "-".join(map(str, arms.labels[:, 7].tolist()))


def test_slots_vary_within_contexts_where_the_labels_reach():
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(12, 2, 2, 4, generator=rng)[torch.from_numpy(CONTEXTS)]
    vectors[:, 1, 0] += torch.randn(120, 4, generator=rng) * 0.1
    arms = Arms(
        {"a.v": vectors}.__getitem__, ("v",), torch.zeros(1, 120, dtype=torch.long), CONTEXTS, Target("a", ("b", "c"))
    )
    by_read = arms.variation("a", ["v"], by_read=True).set_index(["layer", "read"])["variation"]
    assert by_read.drop((1, "mean")).max() < 1e-6
    assert by_read[1, "mean"] > 1e-2
    by_layer = arms.variation("a", ["v"])
    assert by_layer["layer"].tolist() == [0, 1]
    expected = by_read[1, "mean"] * float(vectors[:, 1, 0].abs().max() / vectors[:, 1].abs().max())
    assert by_layer["variation"][1] == pytest.approx(expected)


def test_use_is_that_of_the_whole_answer(arms: Arms):
    table = arms.use(["full", "masked"])
    row = table[(table["sample"] == 31) & (table["condition"] == "masked")].iloc[0]
    assert row["context"] == 3
    assert row["logprob"] == pytest.approx(float(arms.read("logprob")[31, 1].sum()))
    assert row["token_accuracy"] == pytest.approx(float(arms.read("correct")[31, 1].mean()))
    assert row["kl_from_full"] == pytest.approx(float(arms.read("kl")[31, 1]))


@pytest.mark.parametrize("split", SPLITS)
def test_each_split_reads_the_site_that_inner_folds_chose(arms: Arms, fits: dict[str, BySplit], split: Split):
    features = arms.features("near")
    sites = fit_sites(features, split, FOLDS[split])
    best = chosen(sites, FOLDS[split])
    samples, picks, probes = (
        table[table["split"] == split] for table in (fits["near"].samples, fits["near"].picks, fits["near"].probes)
    )
    assert samples["accuracy"].tolist() == best.predicted.eq(arms.labels).double().mean(0).tolist()
    assert samples["bits"].to_numpy() == pytest.approx(best.information.numpy())
    assert [(row.family, row.layer, row.read) for row in picks.itertuples()] == [
        (family, site.layer, site.read) for family, site in best.picks
    ]
    assert probes["accuracy"].to_numpy() == pytest.approx(sites.hits(arms.labels).mean(1))
    assert len(probes) == 2 * len(READS)


@pytest.mark.parametrize("split", ["leave-context-out", "paired"])
def test_probes_transfer_between_arms_that_share_their_directions_at_one_site(
    arms: Arms, fits: dict[str, BySplit], split: Split
):
    found = transfer_where_chosen(arms, fits, split, FOLDS)
    assert {site.layer for _, site in found.picks} == {1}
    table = found.hits.mean(2)
    shared, apart = [table[0, 1], table[1, 0], *table.diagonal()], [table[0, 2], table[2, 1]]
    assert min(shared) > (0.9 if split == "paired" else 0.4)
    assert max(apart) < min(shared) - 0.1
    if split == "paired":
        # The diagonal is what a probe of the arm itself reads, at the same site.
        inner = fits["near"].inner[split].argmax(0).tolist()
        own = fits["near"].samples.query("split == 'paired'")["accuracy"].mean()
        same = [fits["near"].sites[best] for best in inner] == list(found.picks)
        assert not same or table[0, 0] == pytest.approx(own)


def test_an_arm_is_probed_with_all_its_floors(arms: Arms, tiny_llama: Model):
    known = {"folds": 3, "permutations": 2}
    probing = probe_arm(
        tiny_llama, arms, "near", "restart", others=("far",), untrained=arms, rng=np.random.default_rng(1), **known
    )
    assert {"restart", "embedding", "untrained", "far"} < set(probing.readings("random"))
    floors = {"restart": arms.features("restart"), "far": arms.features("far")}
    expected = probe_features(arms.features("near"), floors, rng=np.random.default_rng(1), **known)
    for reading in ("retained", "restart", "far"):
        assert probing.reading("paired", reading).mean == expected.reading("paired", reading).mean
    assert probing.reading("paired", "untrained").mean == probing.reading("paired", "retained").mean
    changed = probe_change(arms, "near", "restart", rng=np.random.default_rng(1), **known)
    assert changed.reading("leave-context-out", "retained").mean > 0.9 > 0.5 > changed.reading("random", "restart").mean


def test_hits_are_those_of_the_readings_sample_by_sample(arms: Arms, tiny_llama: Model):
    probing = probe_arm(tiny_llama, arms, "near", "restart", folds=3, permutations=0, rng=np.random.default_rng(1))
    hits = probing.hits().query("split == 'paired'")
    assert hits.groupby("place")["sample"].nunique().to_dict() == {"first": 120, "second": 120}
    assert hits["right"].mean() == pytest.approx(probing.reading("paired", "retained").mean)
    assert hits["floor"].mean() == pytest.approx(probing.reading("paired", "restart").mean)
    assert probing.hits("restart")["right"].equals(probing.hits()["floor"])
    alone = probe_arm(tiny_llama, arms, "near", folds=3, permutations=0, rng=np.random.default_rng(1))
    assert alone.hits()["floor"].isna().all()
