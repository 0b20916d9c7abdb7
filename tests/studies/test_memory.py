"""The memory study on real weights, at short contexts, and its page on numbers that were made up."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.memory.budget import budget
from kvprobe.stats import estimate
from kvprobe.studies.memory import Config
from kvprobe.studies.memory.conclude import concluded, slopes
from kvprobe.studies.memory.study import STUDY
from tests.experiments.made_up import answer_of

SMALL = Config(contexts=(48, 160), prompt=24, new=4, batches=(1, 2, 3), timed=(8, 16, 32), repeats=2)
MODEL, HOLD = "smol", [True]
PARTS = ("weights", "cache", "reading", "generating", "peak")


def times(cached: Callable[[int], float], anew: Callable[[int], float]) -> pd.DataFrame:
    """Timings that follow two laws, in each repeat with a power that is hardly another."""
    rows = [
        {"length": length, "repeat": repeat}
        | {way: law(length) * length ** (1e-5 * (repeat - 3.5)) for way, law in (("cached", cached), ("anew", anew))}
        for length in (64, 128, 256, 512)
        for repeat in range(8)
    ]
    return pd.DataFrame(rows).assign(difference=0.0, others=0.0)


GROWTH = pd.DataFrame(
    {"new": [0, 1], "measured": [10, 20], "transformers": [10, 20], "logical": [1, 2], "vLLM": [3, 4]}
)


BATCHES = pd.DataFrame(
    {"batch": batch, "repeat": repeat, "seconds": 0.01 * batch ** (1 + 1e-5 * (repeat - 3.5)), "others": 0.0}
    | {"cache_predicted": 10 * batch, "cache_measured": 10 * batch, "peak_predicted": 98 * batch}
    | {"peak_measured": 100 * batch}
    for batch in (1, 2, 4, 8)
    for repeat in range(8)
)


def peaks(predicted: int, context: int = 64) -> pd.DataFrame:
    return pd.DataFrame({"what": PARTS}).assign(context=context, predicted=predicted, measured=1_000_000)


def made_up(**changed: pd.DataFrame) -> Conclusion:
    """A conclusion from made-up tables: the budget one hundredth too large, time that is constant and linear."""
    taken = times(lambda _: 0.01, lambda length: 0.001 * length)
    tables = {"samples": peaks(1_010_000), "batches": BATCHES, "growth": GROWTH, "times": taken}
    return concluded(tables | changed, budget("smollm2-135m", context=64, memory="1GiB"))


def example() -> tuple[Config, Conclusion]:
    return Config(prompt=64), made_up()


def noise(rng: np.random.Generator) -> Conclusion:
    """Times that depend neither on the length nor on the batch."""
    unmoved = times(lambda _: float(rng.lognormal()), lambda _: float(rng.lognormal()))
    return made_up(times=unmoved, batches=BATCHES.assign(seconds=rng.lognormal(size=len(BATCHES))))


def test_the_budget_of_real_weights_is_right_and_its_cache_equal_to_the_byte(finished: Run):
    conclusion = Conclusion.of(finished.metrics)
    assert conclusion.findings.at("equal_looks").mean == conclusion.findings.at("looks").mean == SMALL.new + 1
    worst = {what: conclusion.findings.at("worst", what=what).mean for what in PARTS}
    assert worst["cache"] == worst["weights"] == 0
    assert all(abs(error) < 0.02 for error in worst.values())
    found = conclusion.findings
    assert found.at("equal_batches").mean == found.at("batches").mean == 3
    one, three = (found.at("at_batch", batch=batch, measure="cache").mean for batch in (1, 3))
    assert three == pytest.approx(3 * one)
    assert abs(found.at("worst_batch").mean) < 0.02
    assert all("Other processes" in warning for warning in conclusion.warnings)
    assert conclusion.findings.values("faster", "length") == [8, 16, 32]


def test_slopes_are_over_repeats_and_hold_together_over_both_ways():
    rng = np.random.default_rng(0)
    drawn = times(lambda _: float(rng.lognormal()), float)
    cached = slopes(drawn, "length", ("cached", "anew")).query("way == 'cached'")["slope"].to_numpy()
    assert made_up(times=drawn).findings.at("slope", way="cached") == estimate(cached, comparisons=2)


def test_the_answer_is_decided_by_the_numbers(tmp_path: Path):
    right = answer_of(STUDY, *example(), tmp_path / "right")
    assert "The budget was right: over 1 contexts its peak was off by at most 1.00 %." in right
    assert "worst at 64 tokens" in right
    assert "at 2 of 2 tokens" in right
    assert "After 512 tokens the next one takes 51.2 times as long" in right
    assert "without it, it grows with the length" in right
    assert "to the byte for 4 of 4 batches, and the peak was off by at most 2.00 %" in right
    assert "gets a token grows with the number of conversations" in right
    off = made_up(samples=peaks(1_200_000), growth=GROWTH.assign(measured=[10, 21]))
    wrongly = answer_of(STUDY, Config(prompt=64), off, tmp_path / "wrong")
    assert "The budget was not right" in wrongly
    assert "20.00 %" in wrongly
    assert "at 1 of 2 tokens" in wrongly


def test_a_cache_of_a_batch_that_is_a_byte_off_is_counted_and_a_steady_step_has_no_slope():
    off = BATCHES.assign(cache_measured=BATCHES["cache_measured"] + (BATCHES["batch"] == 4), seconds=0.01)
    findings = made_up(batches=off).findings
    assert (findings.at("equal_batches").mean, findings.at("batches").mean) == (3, 4)
    assert made_up().findings.at("batch_slope").mean == pytest.approx(1, abs=1e-3)
    assert findings.at("batch_slope").mean == pytest.approx(0, abs=1e-9)


def test_the_worst_error_keeps_its_sign_and_context():
    findings = made_up(samples=pd.concat([peaks(1_010_000), peaks(970_000, 128)], ignore_index=True)).findings
    assert findings.at("worst", what="peak").mean == pytest.approx(-0.03)
    assert findings.at("worst_at", what="peak").mean == 128


def test_other_logits_with_the_cache_fail_the_control_and_other_work_is_warned_of():
    assert [control.holds for control in made_up().controls] == [True]
    assert not made_up().warnings
    other = made_up(times=times(lambda _: 0.01, float).assign(difference=0.1, others=1.3))
    assert [control.holds for control in other.controls] == [False]
    assert "used 1.3 cores" in other.warnings[-1]
