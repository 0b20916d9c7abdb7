"""The memory study on real weights, at short contexts, and its sentences on numbers that were made up."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvprobe.studies.memory.study as study
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.studies.memory import collect as collecting
from kvprobe.studies.memory.analyse import analyse, slope
from kvprobe.studies.memory.config import Config
from kvprobe.studies.memory.narrative import answer_growth, answer_peak, answer_time
from tests.studies.runs import assert_figures, give, interrupted, run_on

SMALL = Config(contexts=(48, 160), prompt=24, new=4, timed=(8, 32, 96), repeats=2)


@pytest.fixture(scope="module")
def finished(smol: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, smol)
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


def times(cached: Callable[[int], float], anew: Callable[[int], float]) -> pd.DataFrame:
    """Timings that follow two laws exactly."""
    rows = [
        {"length": length, "repeat": repeat, "cached": cached(length), "anew": anew(length), "difference": 0.0}
        for length in (64, 128, 256, 512)
        for repeat in range(3)
    ]
    return pd.DataFrame(rows)


def peaks(off: float) -> pd.DataFrame:
    whats = ("weights", "cache", "reading", "generating", "peak")
    return pd.DataFrame(
        [{"context": 64, "what": what, "predicted": round(1e6 * (1 + off)), "measured": 1_000_000} for what in whats]
    )


GROWTH = pd.DataFrame(
    {"new": [0, 1], "measured": [10, 20], "transformers": [10, 20], "logical": [1, 2], "vLLM": [3, 4]}
)


def test_the_budget_of_real_weights_is_right_and_its_cache_equal_to_the_byte(finished: Run):
    metrics = finished.metrics
    assert metrics["growth_equal"] == metrics["growth_tokens"] == SMALL.new + 1
    assert metrics["off"]["cache"]["error"] == metrics["off"]["weights"]["error"] == 0
    assert all(abs(worst["error"]) < 0.02 for worst in metrics["off"].values())
    assert "was right" in finished.report["answer"]


def test_with_and_without_the_cache_the_token_is_the_same(finished: Run):
    assert 0 < finished.metrics["difference"] < 1e-3
    assert not finished.report["warnings"]
    assert set(finished.metrics["faster"]) == {"8", "32", "96"}


def test_the_figures_are_drawn_and_the_tables_kept(finished: Run):
    assert_figures(finished, "stack", "generating", "growth", "times")
    assert len(finished.df("growth")) == SMALL.new + 1
    assert set(finished.df("times")["length"]) == {8, 32, 96}


def test_an_interrupted_run_goes_on_where_it_stopped(smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = partial(run_on, smol, study, SMALL, tmp_path)
    resumed, calls = interrupted(run, monkeypatch, collecting, "measure", at=2)
    assert resumed.finished
    assert len(calls) == len(SMALL.contexts) + 1


def test_the_slope_is_the_power_of_the_length():
    found = times(lambda length: 1.0, lambda length: 1e-3 * length**2)
    assert slope(found, "anew")["mean"] == pytest.approx(2.0)
    assert slope(found, "cached")["mean"] == pytest.approx(0.0, abs=1e-9)


def test_the_answer_is_decided_by_the_numbers():
    timed = times(lambda length: 0.01, lambda length: 0.001 * length)
    right, wrong = (analyse(peaks(off), GROWTH, timed) for off in (0.01, 0.2))
    assert "was right" in answer_peak(right)
    assert "was not right" in answer_peak(wrong)
    assert "20.00 %" in answer_peak(wrong)
    assert "all 2 tokens" in answer_growth(right)
    other = analyse(peaks(0.0), GROWTH.assign(measured=[10, 21]), timed)
    assert "1 of 2 tokens" in answer_growth(other)
    assert "10 ms with the cache and 512 ms" in answer_time(right)
    assert "51 times" in answer_time(right)


def test_the_worst_error_keeps_its_sign_and_context():
    found = pd.concat([peaks(0.01), peaks(-0.03).assign(context=128)], ignore_index=True)
    worst = analyse(found, GROWTH, times(float, float))["off"]["peak"]
    assert worst == {"error": pytest.approx(-0.03), "context": 128}
    assert np.sign(worst["error"]) == -1
