"""The detection study: a whole run on a tiny model, thresholds and verdicts, and what the numbers decide."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvprobe.detection.clean import CleanRecipe
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.studies.detection import COARSE, ROUNDING, Config, collect
from kvprobe.studies.detection.collect import LOUD
from kvprobe.studies.detection.conclude import DETECTORS, PAIRS, concluded, threshold, verdicts
from kvprobe.studies.detection.study import STUDY
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.studies.runs import every

BUGS = ("vllm-45357", "flash-attention-1745", "llama-cpp-3825")
SMALL = Config(samples=2, benign=1, alarms=15.0, bugs=BUGS, sizes=("spot",), tokens=4)
MODEL, HOLD = "wordy", [True]


@pytest.fixture(scope="module", autouse=True)
def short_audit() -> Iterator[None]:
    """Learns from a few short texts."""
    few = CleanRecipe(fitted=4, tailed=2, calibrated=2, longest=48, rate=0.34)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "recipe", lambda texts: few)
        yield


def test_a_run_holds_every_cache_and_sound_ones_read_the_same(finished: Run):
    rows = finished.df()
    sound_ones = len(ROUNDING) + len(COARSE)
    sound, wrong = rows[rows["size"] == ""], rows[rows["size"] != ""]
    assert sound.groupby("sample").size().tolist() == [sound_ones] * 3
    assert set(wrong["sample"]) == {0, 1}
    assert set(wrong["bug"]) == set(BUGS)
    assert float(chosen(sound, {"bug": ("chunks", "batch", "eager")})["logprob"].to_numpy().max()) < 1e-3
    assert set(wrong["hash"]) == {1.0}
    assert set(wrong["layers"]) == {1}
    assert set(wrong["blocks"]) <= {1, 2}  # the last block goes on to the last slot
    for column in ("layer", "block", "kind"):
        assert wrong[f"diff_{column}"].tolist() == wrong[column].tolist()
    assert np.asarray(wrong["diff"]).min() > 2
    assert np.asarray(wrong["canary"]).min() > np.median(sound["canary"])
    assert chosen(sound, {"bug": ("chunks", "batch", "eager", "bf16", "fp16")})["diff"].to_numpy().max() < 1
    loud = chosen(wrong, {"bug": "flash-attention-1745"})
    assert set(loud[["text", "surprise", "logprob"]].to_numpy().flat) == {LOUD}
    assert not loud["right"].any()
    finite = chosen(wrong, {"bug": ("vllm-45357", "llama-cpp-3825")})
    assert finite["logprob"].min() > 1e-5
    assert (finite["logprob"] - finite["surprise"]).min() >= 0


@pytest.mark.parametrize(("alarms", "above"), [(10.0, 0), (20.0, 1), (50.0, 4)])
def test_a_threshold_leaves_at_most_so_many_sound_caches_above_it(alarms: float, above: int):
    scores = pd.Series(np.arange(9.0))
    assert int((scores > threshold(scores, alarms)).sum()) == above


def made_up(seen: float = 0.5, alarmed: float = 0.0) -> pd.DataFrame:
    """Twenty prompts with bugs and forty others; log-probabilities see every wrong cache, and texts a share of them."""
    sound = every(sample=range(60), bug=[*ROUNDING, *COARSE], size=[""])
    wrong = every(sample=range(20), bug=["vllm-45357", "llama-cpp-3825"], size=["spot", "reported"])
    table = pd.concat([sound, wrong], ignore_index=True)
    planted = table["size"] != ""
    place = (table["sample"] % 10 + 0.5) / 10
    wave = 1e-4 * table["sample"]
    return table.assign(
        base="same",
        kind=np.where(planted, "stale", ""),
        layer=1,
        layers=1,
        block=2,
        blocks=planted * 1,
        slots=100,
        was_right=True,
        right=(~planted | (table["sample"] % 2 != 1)).astype(float),
        text=np.where(planted, place < seen, (place < alarmed) & (table["sample"] % 2 == 1)).astype(float),
        surprise=np.where(planted, place < seen, 0.0),
        logprob=np.where(planted, 1.0 + wave, 0.001),
        kl=0.1,
        hash=1.0,
        canary=np.where(planted, place < 0.2, 0.0),
        canary_right=np.where(planted, 1.0, np.nan),
        audit=np.where(planted, place > 0.8, 0.0),
        audit_layer=np.where(place > 0.9, 1, 0),
        audit_block=2,
        diff=np.where(planted, 100.0, np.where(table["bug"].isin(COARSE), 1000.0, 0.1)),
        diff_alarm=planted.astype(float),
        diff_kind=np.where(
            planted,
            np.where(place < 0.8, "stale", "foreign prefix"),
            np.where(table["bug"].isin(COARSE), "quantisation", "numerics"),
        ),
        diff_layer=1,
        diff_block=np.where(place < 0.7, 2, 3),
    )


CONFIG = Config(samples=20, benign=40, sizes=("spot", "reported"))


def example() -> tuple[Config, Conclusion]:
    return CONFIG, concluded(made_up(), CONFIG)


def noise(rng: np.random.Generator) -> Conclusion:
    """No detector sees more than another."""
    table = made_up()
    wrong = table["size"] != ""
    for detector in DETECTORS:
        table[detector] = np.where(wrong, rng.integers(2, size=len(table)), 0.0)
    return concluded(table, CONFIG)


def test_planted_numbers_are_found(tmp_path: Path):
    config, conclusion = example()
    findings = conclusion.findings
    for size in ("spot", "reported"):
        assert findings.at("seen", detector="text", pairs="rounding", size=size).mean == pytest.approx(0.5)
        assert findings.at("seen", detector="logprob", pairs="rounding", size=size).mean == 1
        assert findings.at("seen", detector="hash", pairs="rounding", size=size).mean == 0
        assert findings.at("silent", size=size).mean == pytest.approx(0.5)
        assert findings.at("ahead", detector="logprob", size=size).mean == pytest.approx(0.5)
        assert findings.at("accuracy", size=size).mean == pytest.approx(0.5)
        assert findings.at("seen_by_score", size=size, items=100).mean == 1
        assert findings.at("seen", detector="canary", pairs="rounding", size=size).mean == pytest.approx(0.2)
        assert findings.at("alone", detector="diff", size=size).mean == 0
        for pairs in PAIRS:
            assert findings.at("seen", detector="diff", pairs=pairs, size=size).mean == 1
        assert findings.at("nobody", size=size).mean == 0
        assert findings.at("kind_right", size=size).mean == pytest.approx(0.8)
        assert findings.at("layer_right", detector="audit", pairs="rounding", size=size).mean == pytest.approx(0.5)
        assert findings.at("block_right", detector="diff", pairs="rounding", size=size).mean == pytest.approx(0.7)
        assert findings.at("block_right", detector="canary", pairs="rounding", size=size).mean == 1
    assert findings.at("called", kind="stale", called="foreign prefix").mean == 16
    assert findings.at("seen_in_silence", detector="audit", pairs="rounding").mean == pytest.approx(0.4)
    assert findings.at("moves", moved="> 1").mean == 76 + 4
    assert findings.at("planted").mean == 20 * 2 * 2
    said = answer_of(STUDY, config, conclusion, tmp_path)
    assert "A monitor of log-probabilities sees more of the bugs than a comparison of texts" in said


def test_false_alarms_are_those_of_prompts_that_set_no_threshold():
    findings = concluded(made_up(alarmed=0.3), CONFIG).findings
    assert findings.at("alarms", detector="text", pairs="rounding").mean == pytest.approx(0.1)
    judged = verdicts(made_up(alarmed=0.3), CONFIG)
    assert set(judged["sample"]) == set(range(60))
    text = chosen(judged, {"detector": "text", "pairs": "rounding"})
    assert text.groupby(text["sample"] % 2)["limit"].max().tolist() == [1.0, 0.0]  # from the other prompts
    for pairs, ways in PAIRS.items():
        assert set(chosen(judged, {"pairs": pairs, "size": ""})["bug"]) == set(ways)


def test_a_score_of_few_items_does_not_see_what_one_of_many_does():
    """Of 20 prompts one or two are answered wrongly under either bug."""
    for lost, seen in (([1], (0, 1)), ([1, 3], (1, 1)), ([], (0, 0))):
        table = made_up()
        table["was_right"] = ~table["sample"].isin([0, 10])
        struck = (table["size"] != "") & table["sample"].isin(lost)
        table["right"] = (table["was_right"] & ~struck).astype(float)
        findings = concluded(table, CONFIG).findings
        assert findings.at("needed", items=100).mean > 0.05 > findings.at("needed", items=1319).mean
        assert tuple(findings.at("seen_by_score", size="spot", items=items).mean for items in (100, 1319)) == seen


def test_the_control_fails_where_a_bug_changed_no_byte():
    table = made_up()
    table.loc[table["bug"] == "llama-cpp-3825", "hash"] = 0.0
    (control,) = concluded(table, CONFIG).controls
    assert not control.holds
