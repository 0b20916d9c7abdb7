"""What holds for every study: settings are refused before a model is loaded, and pages show every outcome."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import isfunction, isgeneratorfunction, signature, unwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from kvprobe import studies
from kvprobe.experiments import running
from kvprobe.experiments.estimands import Difference, Estimand, Mean
from kvprobe.experiments.page import answer, write_page
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.stats import POSITIVE
from kvprobe.studies import STUDIES, find
from tests.experiments.made_up import page_of
from tests.frozen import MODULES
from tests.refusals import refused
from tests.studies.outcomes import FORGED, OUTCOMES, with_failed_controls, with_forged_texts, with_outcome

FAMILY = "expected false, or a fault and a percentage above 0, up to 100"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "leakage": [
        ({"contexts": 4}, "'contexts' is 4; expected 1, or at least as many as folds (5)"),
        ({"samples": 10}, "'samples' is 10; expected 96 to 40000"),
        ({"samples": 769}, "not a multiple of the 48 contexts; expected 768 or 816"),
    ],
    "leakage_scaling": [
        ({"readers": ("slot",)}, "lacks 'pooled'"),
        ({"arms": ("turn",)}, "'arms' is turn; expected 'turn', where the number is in full view, and another"),
        ({"readers": ("pooled", "soft"), "conversations": (500,), "prompted": 150}, "expected at least the fewest"),
    ],
    "compaction": [
        ({"contexts": 4}, "'contexts' is 4; expected 5 to 48"),
        ({"samples": 100}, "not a multiple of the 48 contexts; expected 96 or 144"),
    ],
    "policies": [
        ({"budgets": (1, 20)}, "expected at least 8 slots, 2 percent"),
        ({"tasks": ("retrieve",)}, "give both"),
        ({"policies": ("SnapKV(50%)",)}, "give both"),
        ({"tasks": ("retrive",), "policies": ("TOVA(8)",)}, "did you mean 'retrieve'"),
        ({"tasks": ("retrieve",), "policies": ("TOVA(8), SnapKW(50%)",)}, "did you mean 'SnapKV'"),
        ({"tasks": ("retrieve",), "policies": ("SnapKV(150%)",)}, "a share of the prompt's"),
    ],
    "robustness": [
        ({"faults": ("gaussian", "zero")}, "did you mean 'zeros'"),
        ({"tasks": ("resite",)}, "did you mean 'recite'"),
        ({"reported": "canarypwn-8b"}, "did you mean 'canarypwn-7b'"),
        ({"reported": "canarypwn-7b"}, "which is about gsm8k"),
        ({"reported": "canarypwn-bands-7b", "tasks": ("gsm8k",)}, "name one of those"),
        ({"rates": (10.0, 101.0)}, "'rates' has 101; expected percents above 0, up to 100"),
    ],
    "bands": [
        ({"rates": (0.0, 5.0)}, "'rates' has 0; expected percents"),
        ({"noises": ("window", "layer"), "timing": "once", "parts": ("kv",)}, "'noises' has window, which hide"),
        ({"noises": ("window", "random")}, "'noises' has random, window, which hide"),
        ({"reported": "canarypwn"}, "'canarypwn-7b'"),
        ({"reported": "canarypwn-bands-7b"}, "expected a table of bands on one of this run's tasks"),
        ({"reported": "canarypwn-7b", "tasks": ("gsm8k",)}, "a table of gaussian, zeros, distractor"),
    ],
    "bitflips": [
        ({"error_rates": (2.0,)}, "'error_rates' has 2; expected shares"),
        ({"tasks": ("retreive",)}, "did you mean 'retrieve'"),
    ],
    "memory": [
        ({"batches": (4,)}, "'batches' is 4; expected at least 3"),
        ({"timed": (64, 128)}, "'timed' is 64, 128; expected at least 3"),
        ({"memory": "24G"}, "24GiB"),
    ],
    "filter_poison": [
        ({"families": ("zeros:30",)}, "'families' is 'zeros:30'; expected two or more"),
        ({"families": ("zeros:0", "false")}, f"'families' has 'zeros:0'; {FAMILY}"),
        ({"families": ("zeros", "false")}, f"'families' has 'zeros'; {FAMILY}"),
        ({"families": ("zeros:30", "zeros:50")}, "which names a fault twice"),
    ],
    "multihop": [
        ({"sessions": 31}, "'sessions' is 31; expected 5 to 30"),
        ({"samples": 361}, "not a multiple of the 30 sessions; expected 360 or 390"),
        ({"families": ("resid_post",)}, "expected k_pre, k or v as well"),
    ],
    "guard": [
        ({"faults": ("bits", "zero")}, "did you mean 'zeros'"),
        ({"alarms": 0.0}, "'alarms' has 0; expected percents above 0, up to 50"),
    ],
    "detection": [
        ({"bugs": ("vllm-1",)}, "no bug that is not benign called 'vllm-1'"),
        ({"bugs": ("vllm-39146",)}, "no bug that is not benign called 'vllm-39146'"),
        ({"alarms": 0.0}, "'alarms' has 0; expected percents above 0, up to 50"),
    ],
    "engines": [
        ({"model": "ordinal"}, "ordinal has no GGUF file that kvprobe knows; give it as gguf"),
        ({"gguf": "nowhere.gguf"}, "There is no GGUF file at nowhere.gguf"),
    ],
    "features": [({"active": 2000}, "'active' is 2000; expected 1 to 1024")],
}
"""What a study refuses beside numbers that are out of the range of their setting."""


def out_of_range() -> Iterator[tuple[str, dict[str, Any], str]]:
    """For each study and setting with a range, the number below it and, if it ends, the one above it."""
    for name, study in STUDIES.items():
        for setting in (setting for setting in fields(study.config) if "range" in setting.metadata):
            low, high = setting.metadata["range"]
            expected = f"expected at least {low}" if high is None else f"expected {low} to {high}"
            several = isinstance(setting.default, tuple)
            usual = setting.default[0] if several else setting.default
            kind = int if usual is None else type(usual)
            for number in map(kind, (low - 1,) if high is None else (low - 1, high + 1)):
                yield name, {setting.name: (number,) if several else number}, f"is {number}; {expected}"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [*((name, *row) for name, rows in REFUSED.items() for row in rows), *out_of_range()],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_before_a_model_is_loaded(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    refused(lambda: find(name).run(find(name).config(**settings), tmp_path), words)
    assert not list(tmp_path.iterdir())


@cache
def declared(name: str) -> tuple[Study[Any], Settings, Conclusion]:
    """A declared study, and settings with a made-up conclusion in which every part of its page is shown."""
    study = find(name).declaration
    return (study, *import_module(f"tests.studies.{MODULES[name]}").example())


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Figures drawn, and empty files in their place; whole runs save them."""

    def draw(figure: Figure | None, path: Path) -> None:
        if figure is not None:
            figure.draw_without_rendering()
            path.with_name(f"{path.name}.png").touch()

    monkeypatch.setattr(running, "save_or_remove", draw)
    yield
    plt.close("all")


NUMBER = re.compile(r"(?<![\w.,–-])[-+−]?\d[\d.,]*")
"""Of its own, and not a part of a name such as T2, float32 or 3–5."""


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("name", STUDIES)
def test_a_page_can_show_every_outcome_and_is_the_same_when_made_again_from_the_files(
    name: str, outcome: str, tmp_path: Path, unsaved: None
):
    study, config, conclusion = declared(name)
    drawn = outcome in ("below", "unknown")  # axes fail at these, if at any
    conclusion = with_outcome(study, conclusion, outcome)
    shown = page_of(study, config, conclusion, tmp_path, drawn=drawn)
    kept = Run.load(shown.path)
    pd.testing.assert_frame_equal(kept.findings, conclusion.findings.frame(), check_dtype=False)
    assert answer(study, shown).strip()
    before = shown.read("report.html")
    assert ": nan" not in before
    assert not drawn or write_page(study, kept).read_text() == before, "made again, figures too"
    phrases = {"above": "above", "below": "below"}.get(outcome, "unclear")
    page = html.unescape(before)
    first = Markup(page.partition('<div class="answer">')[2].partition("</p>")[0]).striptags()
    assert first.endswith(".")
    assert not re.search(r"[.?!] [A-Z]", first), f"not one sentence: {first}"
    assert len(NUMBER.findall(re.sub(r"\([^()]*\)", "", first))) <= 2, first
    for claim in study.claims:
        said = max(re.split(r"\{\w+\}", getattr(claim, phrases)), key=len).strip()
        assert said in page, claim


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_may_be_claimed_that_does_not_hold_together(name: str):
    study, _, conclusion = declared(name)
    for claim in study.claims:
        findings = conclusion.findings.where(claim.finding)
        assert findings, claim
        assert all(finding.comparisons > 0 for finding in findings), claim


def declared_estimands(value: Any) -> Iterator[Estimand]:
    """Those in a module's constants, and of its functions that need nothing."""
    if isinstance(value, Estimand):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from declared_estimands(each)
    elif isfunction(value) and isgeneratorfunction(unwrap(value)) and not signature(value).parameters:
        yield from declared_estimands([*value()])


def test_the_interval_of_a_mean_kl_ends_at_0():
    folders = {file.parent.name for file in Path(studies.__path__[0]).glob("*/conclude.py")}
    modules = [import_module(f"kvprobe.studies.{name}.conclude") for name in folders]
    means = {
        (module.__name__, each.name, each.of): each.within
        for module in modules
        for value in vars(module).values()
        for each in declared_estimands(value)
        if isinstance(each, Mean) and not isinstance(each, Difference) and re.fullmatch("kl(_all|_masked)?", each.of)
    }
    assert len(means) > 15
    assert {kind for kind, within in means.items() if within != POSITIVE} == set()


@pytest.mark.parametrize("name", STUDIES)
def test_a_control_that_fails_is_a_warning_at_the_top(name: str, tmp_path: Path):
    study, config, conclusion = declared(name)
    assert conclusion.controls
    assert "A control fails" not in page_of(study, config, conclusion, tmp_path / "sound").read("report.html")
    page = page_of(study, config, with_failed_controls(conclusion), tmp_path).read("report.html")
    assert page.count("A control fails: doubt this run.") == page.count("<b>FAILS.</b>") == len(conclusion.controls)
    assert page.index("A control fails") < page.index("<h2>")


@pytest.mark.parametrize("name", STUDIES)
def test_texts_of_a_run_are_escaped(name: str, tmp_path: Path):
    study, config, conclusion = declared(name)
    page = page_of(study, config, with_forged_texts(conclusion), tmp_path).read("report.html")
    assert FORGED not in page
    assert html.escape(FORGED) in page


@pytest.mark.parametrize("name", STUDIES)
def test_an_altered_run_is_refused_in_a_sentence(name: str, tmp_path: Path):
    study, config, conclusion = declared(name)
    shown = page_of(study, config, conclusion, tmp_path)
    metrics = json.loads(shown.read("metrics.json"))
    for change in ({"findings": {}}, {"controls": [1]}, {"warnings": "all"}, {"facts": {}}, {"facts": []}):
        (shown.path / "metrics.json").write_text(json.dumps(metrics | change))
        refused(lambda: write_page(study, Run.load(shown.path)), re.compile("must be a|were altered|expected"))
    (shown.path / "metrics.json").write_text(json.dumps(metrics))
    environment = json.loads(shown.read("env.json"))
    del environment["machine"]
    (shown.path / "env.json").write_text(json.dumps(environment))
    refused(lambda: write_page(study, Run.load(shown.path)), "were altered")
