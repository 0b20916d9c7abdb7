"""Bars, stages of a run, and what is left of it: against a clock that the test moves."""

import pytest

from kvprobe import progress
from kvprobe.progress import Bar, Clock, Stage, Timing, watched

EXPECTED = Timing(100.0, 150.0, 0.0, (Stage("Reading", 10, "text", 10.0), Stage("Fitting", 40, "probe", 30.0)))
"""Ten seconds before the first stage, then stages of twenty and of seventy seconds."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the clock will see it."""
    now = [0.0]
    monkeypatch.setattr(progress, "_times", lambda: (now[0], 0.5 * now[0], 2.0 * now[0]))
    return now


def test_a_run_as_fast_as_the_one_that_was_measured_takes_what_is_left_of_it(at: list[float]):
    clock = Clock(EXPECTED)
    assert clock.left(0.0) is None
    at[0] = 10.0
    clock.begin("Reading", 10, "text")
    assert clock.left(0.0) == pytest.approx(90.0)
    at[0] = 20.0
    assert clock.left(0.5) == pytest.approx(80.0)
    at[0] = 30.0
    clock.begin("Fitting", 40, "probe")
    assert clock.left(0.0) == pytest.approx(70.0)


def test_a_slower_machine_takes_as_much_longer(at: list[float]):
    clock = Clock(EXPECTED)
    at[0] = 3000.0
    clock.begin("Reading", 10, "text")
    clock.begin("Fitting", 40, "probe")
    # Thirty seconds of the measured run took a hundred times as long.
    assert clock.left(0.0) == pytest.approx(70.0 * 3005 / 35)


def test_what_an_earlier_attempt_did_says_nothing_of_the_speed(at: list[float]):
    """The first stage is skipped, and half of the second was there: only what was done now counts."""
    clock = Clock(EXPECTED)
    at[0] = 10.0
    clock.begin("Fitting", 40, "probe", already=20)
    assert clock.left(0.5) == pytest.approx(35.0)


def test_a_stage_that_the_measured_run_did_not_have_ends_the_estimate(at: list[float]):
    clock = Clock(EXPECTED)
    clock.begin("Reading", 10, "text")
    assert clock.left(0.5) is not None
    clock.begin("Something else", 1, "thing")
    clock.begin("Fitting", 40, "probe")
    assert clock.left(0.5) is None


def test_bars_are_stages_and_bars_within_them_are_not(at: list[float], capsys: pytest.CaptureFixture[str]):
    with watched(EXPECTED) as clock:
        for _ in Bar(range(10), desc="Reading", unit="text"):
            for _ in Bar(range(2), desc="Inside", leave=False):
                at[0] += 1.0
        with Bar(total=40, desc="Fitting", unit="probe", initial=10) as bar:
            bar.update(30)
            bar.refresh()
    Bar(range(1), desc="After").close()
    assert clock.timing.stages == (Stage("Reading", 10, "text", 0.0), Stage("Fitting", 40, "probe", 20.0))
    assert (clock.timing.seconds, clock.timing.cpu_seconds, clock.timing.others) == (20.0, 10.0, 1.5)
    assert clock.timing.lasted(0) == 20.0
    shown = capsys.readouterr().err
    assert "to the end of the run" in shown
    assert "Inside" in shown


def test_a_bar_of_a_run_that_was_not_measured_promises_nothing(capsys: pytest.CaptureFixture[str]):
    with watched():
        list(Bar(range(3), desc="Reading", unit="text"))
    list(Bar(range(3), desc="Reading", unit="text"))
    assert "end of the run" not in capsys.readouterr().err


def test_a_stage_ends_with_an_error_in_it():
    with watched() as clock:
        with pytest.raises(ValueError, match="lost"), Bar(total=2, desc="Reading"):
            raise ValueError("lost")
        list(Bar(range(3), desc="Fitting"))
    assert [stage.name for stage in clock.timing.stages] == ["Reading", "Fitting"]
