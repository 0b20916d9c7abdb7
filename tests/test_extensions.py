"""Policies and studies of another package, installed beside kvprobe, on the command line."""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvprobe.cli import main
from kvprobe.memory.written import plan_of
from kvprobe.studies import find
from tests.refusals import refused

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "extend.md"
ENTRY_POINTS = """\
[kvprobe.policies]
SmallKeys = my_package:SmallKeys
Broken = my_package:Missing
NoPolicy = my_package:torch

[kvprobe.studies]
first_slot = my_package:STUDY
renamed = my_package:STUDY
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages, with the policy and the study that the guide shows."""
    folder = tmp_path_factory.mktemp("site")
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    policy, study = (next(code for code in examples if word in code) for word in ("class SmallKeys", "STUDY = Study"))
    (folder / "my_package.py").write_text(f"{policy.partition('for policy in')[0]}\n{study}")
    described = folder / "my_package-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture(autouse=True)
def beside(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))


def test_the_command_line_lists_and_plans_a_study_of_a_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    for arguments in (["ls", "studies"], ["run", "first_slot", "--prompts", "3", "--dry-run", "--out", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["kvprobe", *arguments])
        with suppress(SystemExit):
            main()
    said = capsys.readouterr().out
    assert re.search(r"first_slot +\(of package my-package\)", said)
    assert "first_slot would run with these settings:" in said
    assert "  prompts: 3" in said
    assert find("first_slot").declaration.command == "first_slot"


def test_a_policy_of_a_package_is_budgeted_as_one_that_ships():
    added, shipped = (plan_of(text) for text in ("SmallKeys(256)", "RandomEviction(256, seed=0)"))
    assert (added.evicts, added.rounds) == (shipped.evicts, shipped.rounds)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (partial(find, "renamed"), "must be a Study whose name is 'renamed'"),
        (partial(find, "first_slit"), "did you mean 'first_slot'"),
        (partial(plan_of, "Broken(1)"), "'Broken' of package my-package cannot be imported"),
        (partial(plan_of, "NoPolicy(1)"), "must be a class of policies"),
        (partial(plan_of, "SmallKey(1)"), "did you mean 'SmallKeys'"),
    ],
)
def test_what_is_wrong_with_a_package_is_said_in_a_sentence(asked: Callable[[], object], sentence: str):
    refused(asked, sentence)
