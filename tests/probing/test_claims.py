"""Claims on planted features: each split and each control behaves as its design says."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.probing.claims import CONTROL, FLOOR, Probing, doubts
from kvprobe.probing.features import Features
from kvprobe.probing.probe_features import probe_features
from kvprobe.tasks.designs import Target
from kvprobe.wording import percent
from tests.probing.planted import bayes_accuracy
from tests.refusals import refused

CLASSES, CONTEXTS, EACH, DIM = 4, 20, 16, 12
HOMES = np.repeat(np.arange(CONTEXTS), EACH)
TARGET = Target("letter", tuple("abcd"))


def labels(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CLASSES, (1, len(HOMES)), generator=torch.Generator().manual_seed(seed))


def features_of(
    vectors: torch.Tensor, answers: torch.Tensor, rows: np.ndarray | None = None, **more: object
) -> Features:
    """Vectors `[rows, layers, dim]` as values whose mean and last read-outs are the same."""
    tensor = vectors[:, :, None].expand(-1, -1, 2, -1).contiguous()
    rows = np.arange(len(HOMES)) if rows is None else rows
    return Features.of_read_outs({"v": tensor}, rows, answers, HOMES, TARGET, **more)


def planted(kind: str, signal: float, context: float = 1.0, seed: int = 0) -> tuple[Features, torch.Tensor]:
    """Two layers: the first knows the context alone; the second also the label, along axes that are the same for all
    contexts (`shared`), each context's own (`own`), or none (`none`)."""
    generator = torch.Generator().manual_seed(seed)
    answers = labels(seed)
    noise = torch.randn(2, len(HOMES), DIM, generator=generator)
    noise += context * torch.randn(2, CONTEXTS, DIM, generator=generator)[:, HOMES]
    if kind != "none":
        axes = torch.eye(CLASSES, DIM).expand(CONTEXTS, -1, -1)
        if kind == "own":
            axes = torch.linalg.qr(torch.randn(CONTEXTS, DIM, DIM, generator=generator)).Q[:, :CLASSES]
        noise[1] += signal * axes[HOMES, answers[0]]
    return features_of(noise.transpose(0, 1), answers), answers


def floor_of(features: Features) -> Features:
    """What no label can reach: one vector per context."""
    tensor = features.tensors["v"][::EACH]
    return Features(
        {"v": tensor}, features.sites, HOMES, features.labels, features.contexts, features.target, features.texts
    )


def accuracy(probing: Probing, split: str, reading: str = "retained") -> float:
    rows = probing.summary
    return float(rows[(rows["split"] == split) & (rows["reading"] == reading)]["accuracy"].iloc[0])


def lead(probing: Probing, split: str, reading: str) -> tuple[float, float]:
    rows = probing.summary
    row = rows[(rows["split"] == split) & (rows["reading"] == reading)].iloc[0]
    return float(row["lead_low"]), float(row["lead_high"])


@pytest.fixture(scope="module")
def probings() -> dict[str, Probing]:
    results = {}
    for kind in ("shared", "own", "none"):
        features, _ = planted(kind, 3.0)
        results[kind] = probe_features(
            features, {FLOOR: floor_of(features)}, permutations=39, rng=np.random.default_rng(0)
        )
    return results


def test_a_shared_signal_is_read_in_unseen_contexts_at_the_accuracy_of_theory(probings: dict[str, Probing]):
    assert accuracy(probings["shared"], "paired") == pytest.approx(bayes_accuracy(CLASSES, 3.0), abs=0.07)
    # Where it is not centred, the contexts' variance adds to that of the noise, which it equals.
    best = bayes_accuracy(CLASSES, 3.0 / np.sqrt(2))
    assert accuracy(probings["shared"], "leave-context-out") == pytest.approx(best, abs=0.08)
    for split in ("random", "leave-context-out", "paired"):
        assert lead(probings["shared"], split, FLOOR)[0] > 0.2
        assert lead(probings["shared"], split, CONTROL)[0] > 0.2


def test_a_signal_that_differs_between_contexts_is_not_read_in_others(probings: dict[str, Probing]):
    low, high = lead(probings["own"], "leave-context-out", FLOOR)
    assert low <= 0 <= high
    assert accuracy(probings["own"], "leave-context-out") < 0.35


def test_without_a_signal_nothing_leads(probings: dict[str, Probing]):
    for split in ("random", "leave-context-out", "paired"):
        assert lead(probings["none"], split, FLOOR)[0] <= 0
        assert accuracy(probings["none"], split) < 0.35
        table = probings["none"].table
        assert table[table["split"] == split]["p_family"].min() > 0.05


def test_only_the_layer_with_the_signal_is_detected(probings: dict[str, Probing]):
    table = probings["shared"].table
    for _, rows in table.groupby("split"):
        assert (rows[rows["layer"] == 1]["p_family"] == 1 / 40).all()
        assert (rows[rows["layer"] == 0]["p_family"] > 0.05).all()
        assert (rows["q"] >= rows["p"]).all()
        assert rows[rows["layer"] == 1]["leak_low"].min() > 0
        assert rows[rows["layer"] == 1]["bits_low"].min() > 0.2
        assert rows[rows["layer"] == 0]["bits"].max() < 0.05
        assert rows[rows["layer"] == 1]["eta_squared"].min() > rows[rows["layer"] == 0]["eta_squared"].max()


def test_bits_codelength_and_sparse_curves_agree_on_a_signal(probings: dict[str, Probing]):
    codes = probings["shared"].codelength.set_index("split")
    assert codes.loc["paired", "saved_low"] > 0.5
    assert probings["none"].codelength.set_index("split").loc["leave-context-out", "saved_high"] < 0.2
    curve = probings["shared"].sparse.query("split == 'paired'").set_index("k")["accuracy"]
    assert curve[4] > curve[1] + 0.1
    assert curve[8] > 0.7


def test_memorised_labels_are_not_selective():
    """Features that name (context, label) let a probe learn any labelling of them, if it has seen them all."""
    answers = torch.arange(len(HOMES))[None] % CLASSES
    named = torch.nn.functional.one_hot(torch.from_numpy(HOMES) * CLASSES + answers[0], CONTEXTS * CLASSES).float()
    features = features_of(named[:, None], answers)
    probing = probe_features(features, {}, permutations=0, rng=np.random.default_rng(0))
    assert accuracy(probing, "random") == 1
    assert lead(probing, "random", CONTROL)[1] < 0.2
    assert accuracy(probing, "leave-context-out") < 0.4
    assert "p" not in probing.table


def test_a_text_that_gives_the_label_away_is_its_own_control():
    features, answers = planted("none", 0.0)
    texts = tuple((int(label), 7) for label in answers[0])
    telling = features_of(features.tensors["v"][:, ::2], answers, texts=texts)
    probing = probe_features(telling, {}, permutations=0, rng=np.random.default_rng(0))
    assert accuracy(probing, "leave-context-out", "text") == 1
    assert lead(probing, "leave-context-out", "text")[1] < -0.5


def test_labels_that_follow_the_context_are_read_from_it():
    features, _ = planted("none", 0.0, context=3.0)
    generator = torch.Generator().manual_seed(2)
    liked = torch.randint(0, CLASSES, (CONTEXTS,), generator=generator)[HOMES]
    free = torch.rand(len(HOMES), generator=generator) < 0.3
    answers = torch.where(free, labels(3)[0], liked)[None]
    features = features_of(features.tensors["v"][:, ::2], answers)
    # One null of this kind; how often one is called, test_permutation.py counts.
    probing = probe_features(features, {}, permutations=39, rng=np.random.default_rng(1))
    assert accuracy(probing, "random") > 0.45
    assert accuracy(probing, "random", "context") > 0.6
    assert lead(probing, "random", "context")[0] <= 0
    random = probing.table[probing.table["split"] == "random"]
    assert random["p_family"].min() > 0.05
    assert random["permuted"].max() > 0.45


def test_with_one_context_there_is_only_the_random_split_and_no_hash_control():
    """There a control task would only give the labels other names, or all of them one."""
    features, answers = planted("shared", 3.0)
    one = Features(
        features.tensors, features.sites, np.arange(len(HOMES)), answers, np.zeros(len(HOMES), dtype=int), TARGET
    )
    probing = probe_features(one, {}, permutations=0, rng=np.random.default_rng(0))
    assert list(probing.picks) == ["random"]
    assert CONTROL not in set(probing.summary["reading"])
    assert "selectivity" not in str(probing)


def test_a_control_task_of_two_classes_and_few_contexts_never_has_one_class_alone():
    homes = np.repeat(np.arange(3), 20)
    answers = torch.arange(60)[None] % 2
    vectors = torch.randn(60, 1, 4, generator=torch.Generator().manual_seed(0))
    tensor = vectors[:, :, None].expand(-1, -1, 2, -1).contiguous()
    features = Features.of_read_outs({"v": tensor}, np.arange(60), answers, homes, Target("bit", ("no", "yes")))
    for seed in range(6):
        probe_features(features, {}, folds=3, permutations=0, rng=np.random.default_rng(seed))


def test_sparse_curves_of_chosen_sites_stay_at_chance_for_noise():
    """Sites are chosen per fold: one chosen on all samples, and scored on them, would be inflated."""
    read = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(len(HOMES), 40, 2, 8, generator=generator)
        features = Features.of_read_outs({"v": tensor}, np.arange(len(HOMES)), labels(seed), HOMES, TARGET)
        probing = probe_features(features, {}, folds=3, permutations=0, rng=np.random.default_rng(seed))
        read += probing.sparse["accuracy"].tolist()
    assert np.mean(read) == pytest.approx(1 / CLASSES, abs=0.025)


def test_without_a_floor_a_claim_is_compared_with_the_strongest_reading_without_slots():
    features, _ = planted("none", 0.0, context=3.0)
    generator = torch.Generator().manual_seed(1)
    liked = torch.randint(0, CLASSES, (CONTEXTS,), generator=generator)[HOMES]
    answers = torch.where(torch.rand(len(HOMES), generator=generator) < 0.2, labels(3)[0], liked)[None]
    features = features_of(features.tensors["v"][:, ::2], answers)
    probing = probe_features(features, {}, permutations=0, rng=np.random.default_rng(1))
    first = str(probing).splitlines()[0]
    assert first.startswith("random: not detected above the context")
    assert f"(context alone {percent(probing.reading('random', 'context'))}, chance 25%)" in first


def test_the_same_generator_gives_the_same_claim(probings: dict[str, Probing]):
    features, _ = planted("shared", 3.0)
    again = probe_features(features, {FLOOR: floor_of(features)}, permutations=39, rng=np.random.default_rng(0))
    assert again.table.equals(probings["shared"].table)
    assert again.summary.equals(probings["shared"].summary)


def test_folds_do_not_depend_on_which_sites_were_chosen():
    """Where sites tie, rounding chooses, and no machine may have other folds for that."""
    read = []
    for seed in range(4):  # of noise, so that each chooses its own sites
        tensor = torch.randn(len(HOMES), 9, 2, 8, generator=torch.Generator().manual_seed(seed))
        features = Features.of_read_outs({"v": tensor}, np.arange(len(HOMES)), labels(), HOMES, TARGET)
        read.append(probe_features(features, {}, folds=3, permutations=0, rng=np.random.default_rng(0)))
    for split in read[0].picks:
        assert all((other.right[split, "majority"] == read[0].right[split, "majority"]).all() for other in read)
    assert len({len(set(probing.picks["random"])) for probing in read}) > 1


def test_a_claim_names_what_was_read_and_above_which_floor(probings: dict[str, Probing]):
    said = str(probings["shared"]).splitlines()
    assert [line.split(":")[0] for line in said] == ["random", "leave-context-out", "paired"]
    assert all("decodable above the restart" in line and "not" not in line for line in said)
    assert all("chance 25%" in line and "selectivity" in line for line in said)
    assert "not detected" in str(probings["none"]).splitlines()[1]


def test_a_design_that_misleads_is_warned_of(probings: dict[str, Probing]):
    assert not any(probing.warnings for probing in probings.values())
    features, _ = planted("none", 0.0)
    places = torch.from_numpy(np.arange(len(HOMES)) % CLASSES)
    balanced = features_of(features.tensors["v"][:, ::2], places[None])
    probing = probe_features(balanced, {}, permutations=0, rng=np.random.default_rng(0))
    (warning,) = probing.warnings
    assert "equally often" in warning
    assert str(probing).startswith(f"Warning: {warning}")
    # What the warning says: within contexts, the other labels are read as what a sample's label is not.
    assert accuracy(probing, "random", "context") < 1 / CLASSES


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.7, 0.2, 0.1)])
def test_of_unbalanced_labels_that_nothing_gives_away_nothing_is_selective(shares: tuple[float, ...]):
    target, leads = Target("letter", tuple("abcd"[: len(shares)])), []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        answers = torch.multinomial(torch.tensor(shares), len(HOMES), True, generator=generator)[None]
        vectors = torch.randn(len(HOMES), 2, 4, generator=generator)
        features = replace(features_of(vectors, answers), target=target)
        probing = probe_features(features, {FLOOR: floor_of(features)}, permutations=0, rng=np.random.default_rng(seed))
        assert probing.chance == pytest.approx(shares[0], abs=0.06)
        for split in probing.picks:
            assert not probing.lead(split, FLOOR).above()
            leads.append(probing.lead(split, CONTROL))
    assert np.mean([lead.mean for lead in leads]) == pytest.approx(0, abs=0.04)
    assert np.mean([lead.differs() for lead in leads]) <= 0.1


def test_few_contexts_and_intervals_without_width_are_warned_of():
    answers, clusters = np.array([[0, 1, 1] * 5]), np.repeat(np.arange(5), 3)
    summary = pd.DataFrame(
        [
            {"split": "random", "reading": "retained", "accuracy": 0.5, "accuracy_low": 0.5, "accuracy_high": 0.5},
            {"split": "random", "reading": "text", "accuracy": 0.5, "accuracy_low": 0.5, "accuracy_high": 0.5},
            {
                "split": "paired",
                "reading": "retained",
                "accuracy": 0.5,
                "accuracy_low": np.nan,
                "accuracy_high": np.nan,
            },
        ]
    )
    few, still = doubts(answers, clusters, Target("colour", ("red", "blue")), summary, 0)
    assert few.startswith("5 contexts are too few to tell")
    assert still.startswith("random: every context has the same accuracy of 50%")
    vain, *_ = doubts(answers, clusters, Target("colour", ("red", "blue")), summary, 18)
    assert vain == "18 permutations give no p below 0.053, so nothing is confirmed; give 19 or more."


def test_impossible_probings_are_refused_in_a_sentence():
    features, answers = planted("shared", 1.0)
    rng = np.random.default_rng(0)
    still = features_of(torch.ones(len(HOMES), 2, DIM), answers)
    refused(lambda: probe_features(still, {}, rng=rng), "constant over the samples")
    uncrossed = features_of(features.tensors["v"][:, ::2], torch.from_numpy(HOMES % CLASSES)[None])
    refused(lambda: probe_features(uncrossed, {}, rng=rng), "cross contexts with labels")
    alike = features_of(features.tensors["v"][:, ::2], torch.zeros_like(answers))
    refused(lambda: probe_features(alike, {}, permutations=0, rng=rng), "one class")
    refused(
        lambda: probe_features(features, {}, folds=2, rng=rng), "folds=2, an int; give a whole number of at least 3"
    )
    refused(lambda: probe_features(features, {}, permutations=-1, rng=rng), "permutations=-1")
    refused(lambda: probe_features(features, {}, folds=30, rng=rng), "needs at least 30 contexts")
