"""What runs take: measured, shipped, said before a run begins."""

import json
from pathlib import Path

import pytest

from kvprobe.cli import runs as module
from kvprobe.cli.runs import plan
from kvprobe.durations import Duration, durations, minutes
from kvprobe.experiments.settings import digest_of
from kvprobe.listing import digest_of_preset
from kvprobe.presets import presets
from kvprobe.progress import Stage, Timing
from kvprobe.studies.dangling import Config

TOOK = Duration(
    "dangling",
    "mine",
    "Linux x86_64, 2 cores with AVX512",
    3 * 10**9,
    Timing(150.0, 290.0, 0.0, (Stage("Hiding", 8, "turn", 50.0),)),
)


@pytest.mark.parametrize(
    ("seconds", "said"), [(3.2, "3 s"), (54.0, "54 s"), (58.0, "1.0 min"), (145.0, "2.4 min"), (720.0, "12 min")]
)
def test_durations_are_said_with_two_digits(seconds: float, said: str):
    assert minutes(seconds) == said


def test_a_duration_is_read_back_as_it_was_written():
    assert Duration.from_record(json.loads(json.dumps(TOOK.record()))) == TOOK
    assert str(TOOK) == "2.5 min on 2 cores with AVX512 (4.8 min of CPU)"


def test_every_duration_that_ships_is_of_a_preset_as_it_is_now():
    """One that fails here was changed after it was measured: run `python benchmarks/durations.py PRESET` again."""
    now = {digest_of_preset(preset): preset.name for preset in presets().values()}
    assert {digest: took.preset for digest, took in durations().items()}.items() <= now.items()
    assert all(took.timing.stages and took.timing.others < 0.2 for took in durations().values())
    assert "leakage-quick" in {took.preset for took in durations().values()}


def test_a_plan_says_settings_place_and_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = Config(prompts=2)
    monkeypatch.setattr(module, "durations", lambda: {digest_of("dangling", config): TOOK})
    said = "\n".join(plan("dangling", config, tmp_path, None))
    assert "  prompts: 2\n" in said
    assert f"dangling-{digest_of('dangling', config)} would be new." in said
    assert "It took 2.5 min on 2 cores with AVX512 (4.8 min of CPU) and 3.0 GB of memory" in said
    assert said.endswith("  Hiding: 8 × turn, 1.7 min")
    (tmp_path / "this" / "parts").mkdir(parents=True)
    other = "\n".join(plan("dangling", Config(prompts=3), tmp_path, "this"))
    assert f"{tmp_path / 'this'} would be resumed." in other
    assert other.endswith("was not measured. Of this study: mine 2.5 min on 2 cores with AVX512 (4.8 min of CPU).")
    (tmp_path / "this" / "metrics.json").touch()
    assert "is finished" in "\n".join(plan("dangling", config, tmp_path, "this"))
    assert "Of this study: nothing was." in "\n".join(plan("leakage", config, tmp_path, None))
