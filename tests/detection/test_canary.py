"""The canary: a sound engine passes, each planted bug fails the property that it breaks, and noise raises no alarm."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from kvprobe.cli.entry import app
from kvprobe.detection.canary import EngineAnswer, ScriptSizes, canary
from kvprobe.detection.canary import run as canary_run
from kvprobe.detection.canary.floor import FALSE_ALARMS, distance, distances
from kvprobe.detection.canary.run import CERTAIN, FLOOR_PROMPTS, POWER
from kvprobe.detection.canary.target import Prompt, Token
from kvprobe.errors import UserError
from kvprobe.report.views.canary import canary_page
from tests.detection.paged_engine import BLOCK, PagedEngine

SIZES = ScriptSizes(block=BLOCK, chunk=100, fill=600, idle=0.0)
BUGS = {
    "hash without the beginning": "beginning",
    "stale last slot": "prefix",
    "evicted block returned": "evict",
    "cross-talk": "side by side",
    "keys out of step": "prefix",
    "decoding at a boundary": "token by token",
    "zeroed layer": "slot file",
}


def test_a_sound_engine_passes_and_its_cache_is_used():
    result = canary(PagedEngine(), sizes=SIZES)
    assert result.failed == []
    assert result.power == 1
    states = {finding.name: finding.state for finding in result.findings}
    assert states.pop("load") == "not offered"
    assert set(states.values()) == {"sound"}


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_fails_the_property_that_it_breaks(bug: str):
    result = canary(PagedEngine(bug), sizes=SIZES)
    assert BUGS[bug] in result.failed


def test_the_smallest_script_is_shorter_and_has_no_step_too_many():
    result = canary(PagedEngine("keys out of step"), sizes=SIZES)
    failure = next(finding.failure for finding in result.findings if finding.name == "branch")
    assert failure is not None
    assert failure.gap > result.threshold
    assert failure.length <= 2 * BLOCK
    assert len(failure.script) == 2


@dataclass
class Altered(PagedEngine):
    """One whose answers are altered before they are given: `alter` takes whether reuse was asked for."""

    alter: Callable[[EngineAnswer, bool], EngineAnswer] = lambda answer, reuse: answer

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        return [self.alter(answer, reuse) for answer in super().ask(prompts, new, reuse)]


def ending_at(tokens: int, answer: EngineAnswer) -> EngineAnswer:
    return replace(answer, tokens=answer.tokens[:tokens], tops=answer.tops[:tokens])


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_engine_whose_hits_end_early_fails(tokens: int):
    engine = Altered(alter=lambda answer, reuse: ending_at(tokens, answer) if reuse and answer.reused else answer)
    assert "hit" in canary(engine, sizes=SIZES).failed
    engine = Altered(alter=lambda answer, reuse: ending_at(tokens, answer))
    with pytest.raises(UserError, match="go on after an end of text"):
        canary(engine, sizes=SIZES)


def test_an_engine_that_does_not_report_what_it_reuses_is_not_said_to_have_used_its_cache():
    result = canary(Altered(alter=lambda answer, reuse: replace(answer, reused=None)), sizes=SIZES)
    assert {finding.state for finding in result.findings if finding.reused is None and finding.name == "hit"} == {
        "not reported"
    }
    assert "does not report what it reuses" in result.verdict


def test_an_engine_that_never_reuses_or_always_does_is_refused():
    engine = PagedEngine(room=0)
    with pytest.raises(UserError, match="never reused a token"):
        canary(engine, sizes=SIZES)
    engine = PagedEngine()
    engine.ask = lambda prompts, new, reuse: PagedEngine.ask(engine, prompts, new, True)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="was to be read anew"):
        canary(engine, sizes=SIZES)


def test_an_engine_whose_noise_hides_a_wrong_block_is_refused():
    with pytest.raises(UserError, match="would hide a wrong block"):
        canary(PagedEngine(noise=0.5), sizes=SIZES)


@dataclass
class Noisy:
    """A sound engine without a model, whose numerics differ from one request to the next, more so for some prompts."""

    seed: int
    scale: float = 0.01
    name: str = "noise"

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def tokens(self, text: str, first: bool = False) -> Prompt:
        return tuple(text.split()) or (text,)

    def text(self, prompt: Prompt) -> str:
        return " ".join(map(str, prompt))

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        return [self._answer(prompt, new, reuse) for prompt in prompts]

    def _answer(self, prompt: Prompt, new: int, reuse: bool) -> EngineAnswer:
        tokens, tops = (), []
        for _ in range(new):
            own = np.random.default_rng(crc32(" ".join(map(str, prompt + tokens)).encode()))
            scale = self.scale * np.exp(0.4 * own.normal())
            logs = -3 * np.arange(20) / 5 + own.normal(size=20) + scale * self.rng.normal(size=20)
            tops.append({f"t{place}": float(logs[place]) for place in own.permutation(20)})
            tokens += (f"t{int(logs.argmax())}",)
        return EngineAnswer(tokens, tops, len(prompt) - 1 if reuse else 0)


@dataclass
class OtherKernel(Noisy):
    """An engine that computes the same to the bit up to 256 tokens, and with noise beyond; hits lie `off` nats away."""

    off: float = 0.0

    def _answer(self, prompt: Prompt, new: int, reuse: bool) -> EngineAnswer:
        scale, self.scale = self.scale, self.scale if len(prompt) > 256 else 0.0
        answer = super()._answer(prompt, new, reuse)
        self.scale = scale
        tops = [{token: value - self.off * reuse for token, value in top.items()} for top in answer.tops]
        return replace(answer, tops=tops)


def test_a_sound_engine_whose_kernels_differ_with_the_length_does_not_fail():
    for seed in range(6):
        assert not canary(OtherKernel(seed), seed=seed).failed


def test_noise_of_long_prompts_does_not_hide_a_small_fault_of_short_ones():
    result = canary(OtherKernel(0, off=0.01))
    assert result.threshold < 0.01 < result.long_threshold
    assert "hit" in result.failed
    assert "chunk" not in result.failed


def test_at_most_the_stated_share_of_sound_runs_fails():
    runs = 60
    failed = sum(bool(canary(Noisy(seed), sizes=ScriptSizes(idle=0.0), seed=seed).failed) for seed in range(runs))
    assert failed <= 3  # more has a probability of 0.3 % at the stated rate
    assert FALSE_ALARMS == 0.01


def test_more_benign_differences_are_measured_before_an_engine_is_refused_for_its_noise():
    runs = [canary(Noisy(seed, 0.06), sizes=ScriptSizes(idle=0.0), seed=seed) for seed in range(6)]
    assert any(len(run.wrong_blocks) > FLOOR_PROMPTS for run in runs)
    assert all(run.power >= POWER and not run.failed for run in runs)


def test_where_noise_nearly_hides_a_wrong_block_one_excess_must_come_back():
    limit = 1.0
    near, far = 0.9 * CERTAIN * limit, 1.1 * CERTAIN * limit
    for block in (0.5 * limit, 1.5 * limit):
        assert canary_run._state([near], limit, block, lambda: 0.0) == "not repeated"
        assert canary_run._state([near], limit, block, lambda: near) == "failed"
        assert canary_run._state([far], limit, block, lambda: 0.0) == "failed"
    assert canary_run._state([far], limit, 2 * far, lambda: 0.0) == "not repeated"


MADE = """
from tests.detection.paged_engine import PagedEngine

def sound():
    return PagedEngine()

def broken():
    return PagedEngine("keys out of step")
"""


def test_the_command_exits_with_0_1_or_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (file := tmp_path / "made.py").write_text(MADE)
    flags = ["--chunk", "100", "--fill", "600", "--idle", "0", "--out", str(tmp_path / "canary.html")]
    for function, code in {"sound": 0, "broken": 1}.items():
        with pytest.raises(SystemExit) as ended:
            app(["canary", "--module", f"{file}:{function}", *flags], exit_on_error=False)
        assert (ended.value.code or 0) == code
    assert "smallest: " in capsys.readouterr().out
    with pytest.raises(UserError, match="no file"):
        app(["canary", "--module", "no.py:sound"], exit_on_error=False)
    with pytest.raises(UserError, match="Give one of"):
        app(["canary"], exit_on_error=False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--module", "FILE:failing"], "failing gives no target .ZeroDivisionError: division by zero."),
        (["--module", "FILE:absent"], "no function in .* called 'absent'"),
        (["--module", "FILE:sound", "--idle", "inf"], "'idle' is inf"),
        (["--module", "FILE:sound", "--chunk", "1000000"], "'chunk' is 1000000"),
        (["--module", "FILE:sound", "--model", "smollm2-135m"], "--model is read with --dumps"),
        (["--url", "http://127.0.0.1:1", "--model", "smollm2-135m"], "--model is read with --dumps"),
        (["--url", "http://127.0.0.1:1", "--block", "0"], "'block' is 0"),
        (["--dumps", "dumps", "--out", "canary.html"], "no page is written"),
    ],
)
def test_what_the_command_cannot_do_is_said_before_anything_is_asked(flags: list[str], said: str, tmp_path: Path):
    (file := tmp_path / "made.py").write_text(f"{MADE}\n\ndef failing():\n    return 1 / 0\n")
    with pytest.raises(UserError, match=said):
        app(["canary", *(flag.replace("FILE", str(file)) for flag in flags)], exit_on_error=False)


def test_what_was_found_is_told_though_the_page_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (folder := tmp_path / "pages").mkdir()
    leaving = f"def leaving():\n    __import__('os').rmdir({str(folder)!r})\n    return broken()\n"
    (file := tmp_path / "made.py").write_text(f"{MADE}\n\n{leaving}")
    flags = ["--chunk", "100", "--fill", "600", "--idle", "0", "--out", str(folder / "canary.html")]
    with pytest.raises(UserError, match="no folder"):
        app(["canary", "--module", f"{file}:leaving", *flags], exit_on_error=False)
    assert "smallest: " in capsys.readouterr().out


def test_distances_end_where_the_answers_part_and_are_infinite_without_numbers():
    tops: list[dict[Token, float]] = [{1: -0.5, 2: -1.0}] * 3
    first = EngineAnswer((1, 2, 3), tops)
    assert distances(first, first) == [0, 0, 0]
    assert len(distances(first, EngineAnswer((1, 3, 3), first.tops))) == 2
    assert distances(first, EngineAnswer((1, 3, 3), first.tops[:1])) == [math.inf]
    assert distances(first, EngineAnswer((5,), [])) == [math.inf]
    assert distance({1: float("nan")}, {1: 0.0}) == distance({}, {1: 0.0}) == float("inf")
    assert distance({1: -1.0, 2: -3.0}, {1: -1.0, 3: -4.0}) == pytest.approx((1 / 3) ** 0.5)


def test_the_record_is_json_and_the_page_escapes_what_an_engine_is_called():
    result = canary(PagedEngine("stale last slot", name="<script>alert(1)</script>"), sizes=SIZES)
    assert json.loads(json.dumps(result.record(), allow_nan=False))["verdict"].startswith("Failed: ")
    page = canary_page(result)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@dataclass
class Slipping(PagedEngine):
    """A sound engine of which the hits named in `slips` lie `off` nats away, counted from 1."""

    slips: range = range(3, 4)
    off: float = 0.1
    hits: int = 0

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        answers = super().ask(prompts, new, reuse)
        for place, answer in enumerate(answers):
            if answer.reused:
                self.hits += 1
                if self.hits in self.slips:
                    tops = [{token: value - self.off for token, value in top.items()} for top in answer.tops]
                    answers[place] = replace(answer, tops=tops)
        return answers


def test_a_small_difference_counts_if_it_comes_back_on_new_prompts_and_a_large_one_at_once():
    once = canary(Slipping(), sizes=SIZES)
    assert once.threshold < 0.1 < np.median(once.wrong_blocks) < 9
    assert once.failed == []
    assert {finding.name for finding in once.findings if finding.state == "not repeated"} == {"hit"}
    assert "Beyond the threshold once, and not on new prompts: hit." in once.verdict
    assert "hit" in canary(Slipping(slips=range(1, 10**6)), sizes=SIZES).failed
    assert canary(Slipping(off=9.0), sizes=SIZES).failed == ["hit"]
