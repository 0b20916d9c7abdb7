"""Policies on tasks of the user: every answer is that of a generation by hand; runs can be set side by side."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from kvprobe.cli import app
from kvprobe.experiments.beside import beside
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.policies import H2O, Quantise, SinkWindow, SnapKV
from kvprobe.studies import find
from kvprobe.studies.policies import Config
from kvprobe.studies.policies.on_tasks import FULL, IDLE, ON_TASKS, concluded, tasks_of
from kvprobe.tasks.jsonl import JSONLines
from kvprobe.tasks.task import prompt
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of, page_of
from tests.refusals import refused
from tests.studies.outcomes import FORGED, with_forged_texts
from tests.studies.runs import every, whole_run

POLICIES = ("SnapKV(50%, window=4), H2O(0.3)", "SinkWindow(4, 25%) | Quantise(4, tail=8)")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Replies of three tokens: these tests ask whether numbers are right, not what they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvprobe.tasks.catalogue.JSONLines", partial(JSONLines, max_new_tokens=3))
        yield


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    """Nine short prompts, which tiny models answer with the letters that they like."""
    lines = [{"prompt": f"the {word} sat on the {word}, what?", "answer": "i", "id": word} for word in "abcdehimt"]
    path = root / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return Config(tasks=(str(path),), policies=POLICIES)


@pytest.fixture(scope="module")
def finished(config: Config, roomy: Model, root: Path) -> Run:
    return whole_run(ON_TASKS, config, roomy, root, [True])


def test_every_answer_is_that_of_a_generation_under_the_policy(finished: Run, config: Config, roomy: Model):
    rows = finished.df()
    [(task, count)] = tasks_of(config)
    given = {
        FULL: None,
        "SnapKV(50%, window=4)": SnapKV(0.5, window=4),
        "H2O(0.3)": H2O(0.3),
        POLICIES[1]: SinkWindow(4, 0.25) | Quantise(4, tail=8),
    }
    assert count == 9
    assert list(rows["policy"].unique()) == [*given, IDLE]
    for number, item in enumerate(task.items(2, 0)):
        tokens = prompt(item, roomy.tokenizer)
        for name, policy in given.items():
            [row] = chosen(rows, {"sample": number, "policy": name}).to_dict("records")
            reply = roomy.generate([tokens], policy=policy, max_new_tokens=task.max_new_tokens)
            assert row["text"] == reply.text
            assert row["right"] == float(task.score(reply.text, item)["contains"])
            held = [kept.footprint for kept in reply.trace] or [1]
            slot = roomy.prefill([tokens]).footprint / len(tokens)
            whole = [(len(tokens) + kept.step) * slot for kept in reply.trace] or [1]
            # The footprint is that of float32; only rounding makes a difference to a share.
            assert row["memory"] == pytest.approx(sum(held) / sum(whole), abs=0.01 if "Quant" not in name else 0.2)


def test_accuracy_is_held_against_the_full_cache_on_the_same_items(config: Config, tmp_path: Path):
    table = every(sample=range(12), policy=[FULL, "SnapKV(50%)", "H2O(0.3)"])
    right = (table["policy"] != "H2O(0.3)") | (table["sample"] < 2)
    known = {"task": config.tasks[0], "same": True, "memory": 0.5, "item": "", "text": ""}
    idle = pd.DataFrame([{"sample": 0, "policy": IDLE, "right": 1.0}])
    table = pd.concat([table.assign(right=right.astype(float)), idle]).assign(**known)
    table["memory"] = table["memory"].where(table["policy"] != IDLE, 1.0)
    conclusion = concluded(table, config)
    change = conclusion.findings.at("change", task=config.tasks[0], policy="H2O(0.3)")
    assert change.mean == pytest.approx(-10 / 12)
    assert change.high < 0
    said = answer_of(ON_TASKS, config, conclusion, tmp_path)
    right = "of the answers on mine.jsonl are right, where the full cache gives 100 %"
    assert f"Under H2O(0.3), which does worst here, 17 % {right} (fewer right answers)." in said
    assert "SnapKV" not in said
    alike = concluded(table[table["policy"] != "H2O(0.3)"], config)
    said = answer_of(ON_TASKS, config, alike, tmp_path / "alike")
    assert f"Under SnapKV(50%), 100 % {right} (no difference detected)." in said
    few = concluded(table[table["sample"] < 3], replace(config, items=3))
    page = page_of(ON_TASKS, replace(config, items=3), few, tmp_path / "few").read("report.html")
    assert page.count("too few to tell") == 1
    assert "Whether a policy costs right answers is not known: 3 items are too few to tell." in page
    assert "no difference detected" not in page
    forged = page_of(ON_TASKS, config, with_forged_texts(conclusion), tmp_path / "forged").read("report.html")
    assert FORGED not in forged


@pytest.mark.usefixtures("unchecked")
def test_policies_of_python_are_taken_and_a_list_too():
    assert Config(tasks=["retrieve"], policies=[H2O(0.3)]).policies == ("H2O(budget=30%)",)  # pyright: ignore[reportArgumentType]


def test_the_report_is_that_of_the_tasks(finished: Run, config: Config):
    study = find("policies").declaration
    assert answer(study, finished).strip().startswith("Under SnapKV(50%, window=4), ")
    assert tasks_of(replace(config, items=3))[0][1] == 3


# Two runs side by side.


@pytest.fixture(scope="module")
def second(config: Config, roomy: Model, root: Path, finished: Run) -> Run:
    other = replace(config, policies=("SnapKV(30%)", "H2O(0.3)"))
    return find("policies").run(other, root, "second", model=roomy)


def test_findings_of_two_runs_are_side_by_side_with_paired_differences(finished: Run, second: Run, tmp_path: Path):
    both = beside(finished, second)
    assert set(both.differing) == {"policies"}
    rows = both.findings.set_index(["name", "policy"])
    one, other = (run.df().set_index(["policy", "sample"])["memory"] for run in (finished, second))
    gone = (other["H2O(0.3)"] - one["H2O(0.3)"]).mean()
    assert rows.loc[("memory", "H2O(0.3)"), "difference"] == pytest.approx(gone)
    assert rows.loc[("memory", "H2O(0.3)"), "low"] <= 0 <= rows.loc[("memory", "H2O(0.3)"), "high"]
    assert both.rest > 0
    assert "SnapKV(30%)" not in str(both.findings)
    page = both.save(tmp_path / "both.html").read_text()
    assert "memory (task" in page
    assert "policies" in str(both)


def test_runs_of_other_samples_do_not_pair_and_of_other_studies_are_refused(
    finished: Run, config: Config, roomy: Model, root: Path, tmp_path: Path
):
    fewer = find("policies").run(replace(config, items=8, policies=("H2O(0.3)",)), root, "fewer", model=roomy)
    table = beside(finished, fewer).findings
    assert len(table)
    assert table["low"].isna().all()
    (tmp_path / "config.yaml").write_text("study: leakage\n")
    refused(lambda: beside(finished, Run(tmp_path)), "'policies'", "'leakage'", "one study")


def test_the_command_prints_both_and_writes_a_page(finished: Run, second: Run, capsys: pytest.CaptureFixture[str]):
    command, bound, _ = app.parse_args(["report", str(finished.path), str(second.path)])
    command(*bound.args, **bound.kwargs)
    assert "accuracy (task" in capsys.readouterr().out
    assert (finished.path / "beside-second.html").is_file()
