"""The compose study: a whole run of a tiny model, its documents, and what made-up tables decide."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.studies.compose import Config
from kvprobe.studies.compose.collect import ALONE, DEVIATING, FIRST, JOINT, RANDOM, WAYS, deviating, text_tokens
from kvprobe.studies.compose.conclude import concluded
from kvprobe.studies.compose.documents import (
    ACROSS,
    COLOURS,
    IN_FIRST,
    JUDGED,
    KINDS,
    REFERENCE,
    pairs,
    second_is_right,
)
from kvprobe.studies.compose.study import STUDY
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.studies.runs import every

MODEL, SMALL, HOLD = "wordy", Config(samples=2, shares=(15,)), [True, False]


def test_read_again_as_a_whole_it_is_one_prefill_and_with_less_it_is_not(finished: Run, wordy: Model):
    rows = finished.df()
    assert set(rows["kind"]) == set(KINDS)
    assert chosen(rows, {"share": 100})["kl"].max() < 1e-6
    assert chosen(rows, {"way": FIRST, "share": 0})["kl"].min() > 1e-5
    alike = chosen(rows, {"way": WAYS, "share": 0}).groupby(["sample", "kind"])["kl"].nunique()
    assert set(alike) == {1}
    house = pairs(0, 2, 0)[0]
    (asked,) = (one for one in house.asked if one.kind == ACROSS)
    whole = model_says(wordy, house.first + house.second + asked.text)
    options = [text_tokens(wordy, f" {word}")[0] for word in asked.options]
    row = chosen(rows, {"sample": 0, "kind": ACROSS, "way": JOINT}).iloc[0]
    assert row["margin"] == pytest.approx(float(whole[options[0]] - whole[options[1:]].max()), abs=1e-4)


def model_says(model: Model, text: str) -> torch.Tensor:
    return model.extend(None, Tokens.of(text_tokens(model, text)))[1][0, -1].log_softmax(-1)


def test_slots_that_deviate_most_come_first(wordy: Model):
    joint = wordy.prefill(Tokens.of([5, 6, 7, 8, 9]))
    moved = {"K": [key.clone() for key in joint.keys], "V": list(joint.values)}
    moved["K"][1][:, :, 3] += 1.0
    moved["K"][1][:, :, 4] += 0.5
    assert deviating(joint.with_parts(moved), joint, 2) == [1, 2, 0]


def test_answers_are_in_the_documents_that_their_kinds_name():
    for sample in range(40):
        house, judged = pairs(sample, 2, 0)
        asked = {one.kind: one for one in (*house.asked, *judged.asked)}
        assert asked[IN_FIRST].text.split("Answer: ")[1] + f" {asked[IN_FIRST].options[0]}." in house.first
        assert not any(f" {colour}." in house.second for colour in COLOURS)
        room = house.second.split("in the colour of the ")[1].split(".")[0]
        assert f"The {room} is painted {asked[REFERENCE].options[0]}." in house.first
        sleeper = asked[ACROSS].text.split("in which ")[1].split(" sleeps")[0]
        room = house.second.split(f"{sleeper} sleeps in the ")[1].split(".")[0]
        assert f"The {room} is painted {asked[ACROSS].options[0]}." in house.first
        assert asked[JUDGED].options in (("A", "B"), ("B", "A"))
    rights = [pairs(sample, 2, 0)[1].asked[0].options[0] for sample in range(48)]
    assert rights.count("A") == 24
    assert len({pairs(sample, 2, 0)[1].first for sample in range(48)}) == 48


CONFIG = Config()


def made_up(lost: float = 0.4, better: float = 0.05, known: float = 0.9, samples: int = 40) -> Any:
    """Pairs of documents. Joining loses a share of right answers, and first slots are nearer than random ones."""
    shares = (0, *CONFIG.shares, 100)
    rows: Any = pd.concat(
        [
            every(sample=range(samples), kind=list(KINDS), way=list(WAYS), share=list(shares)),
            every(sample=range(samples), kind=list(KINDS), way=[JOINT], share=[100]),
            every(sample=range(samples), kind=list(KINDS), way=[ALONE], share=[0]),
        ],
        ignore_index=True,
    )
    place = (rows["sample"] * 7 % samples + 0.5) / samples
    less = np.where(rows["way"] == ALONE, known - 0.1, np.where(rows["share"] == 100, 0, lost))
    whole, wave = rows["share"] == 100, (rows["sample"] % 5 - 2) * 1e-3
    apart = np.where(whole, 1e-9, 0.2 - better * ((rows["way"] == FIRST) & (rows["share"] > 0)) + wave)
    right = (place < known - less).astype(float)
    return rows.assign(right=right, flipped=(less > place).astype(float), margin=right - 0.5, kl=apart)


def example() -> tuple[Config, Conclusion]:
    return CONFIG, concluded(made_up(), CONFIG)


def noise(rng: np.random.Generator) -> Conclusion:
    """Joining loses nothing, and all ways are alike but for chance."""
    rows = made_up(0.0, 0.0)
    rows["right"] = (rng.random(len(rows)) < 0.6).astype(float)
    rows["kl"] += 0.02 * rng.standard_normal(len(rows))
    return concluded(rows, CONFIG)


def test_planted_numbers_are_found(tmp_path: Path):
    config, conclusion = example()
    findings = conclusion.findings
    assert findings.at("lost", kind=ACROSS).mean == pytest.approx(-0.4)
    assert findings.at("beside_random", way=FIRST, share=15).mean == pytest.approx(-0.05)
    assert findings.at("beside_random", way=DEVIATING, share=15).mean == pytest.approx(0.0)
    assert findings.at("right", kind=ACROSS, way=RANDOM, share=100).mean == pytest.approx(0.9)
    said = answer_of(STUDY, config, conclusion, tmp_path)
    assert "right less often than after one prefill" in said
    assert "nearer to one prefill than with as many random slots" in said
    nothing = answer_of(STUDY, config, concluded(made_up(0.0, 0.0), config), tmp_path / "nothing")
    assert "not shown to be right more or less often" in nothing


def test_a_judge_that_names_the_second_answer_whichever_is_true_is_seen():
    rows = made_up()
    stubborn = (rows["kind"] == JUDGED) & (rows["way"] == FIRST) & (rows["share"] == 0)
    rows.loc[stubborn, "right"] = rows.loc[stubborn, "sample"].map(second_is_right).astype(float)
    findings = concluded(rows, CONFIG).findings
    assert findings.at("second", way=FIRST, share=0).mean == 1
    assert findings.at("right", kind=JUDGED, way=FIRST, share=0).mean == pytest.approx(0.5, abs=0.1)
    assert findings.at("second", way=JOINT, share=100).mean == pytest.approx(0.5, abs=0.1)


def test_a_judge_that_finds_the_truth_in_both_orders_is_told_from_one_that_goes_by_the_place(tmp_path: Path):
    config = Config(samples=48)
    rows = made_up(samples=48)
    true, sure, judged = rows["sample"].map(second_is_right), rows["sample"] % 24 < 12, rows["kind"] == JUDGED
    joined = judged & (rows["way"] == FIRST) & (rows["share"] == 0)
    rows["right"] = np.where(joined, true, np.where(judged, sure | true, rows["right"] == 1)).astype(float)
    rows["margin"] = np.where(true, 1.0, -1.0) + np.where(joined, 0.0, np.where(sure, 2.0, 0.5))
    conclusion = concluded(rows, config)
    findings = conclusion.findings
    assert findings.at("both_orders", way=JOINT, share=100).mean == 0.5
    assert findings.at("both_orders", way=FIRST, share=0).mean == 0
    assert findings.at("judgement").mean == -0.5
    assert findings.at("truth", way=JOINT, share=100).mean == pytest.approx(1.25)
    assert findings.at("truth", way=FIRST, share=0).mean == pytest.approx(0.0)
    assert "in fewer of them than after one prefill" in answer_of(STUDY, config, conclusion, tmp_path)
    once = Config(samples=24)
    assert "both times" not in answer_of(STUDY, once, concluded(made_up(samples=24), once), tmp_path / "once")


def test_controls_fail_where_reading_again_is_not_one_prefill_or_nothing_is_known():
    assert [control.holds for control in concluded(made_up(), CONFIG).controls] == [True, True]
    rows = made_up(known=0.1)
    rows.loc[(rows["way"] == FIRST) & (rows["share"] == 100), "kl"] = 0.1
    assert [control.holds for control in concluded(rows, CONFIG).controls] == [False, False]
