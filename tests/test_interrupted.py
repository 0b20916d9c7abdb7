"""Ctrl-C and files on the command line: what is kept is said, and files are opened before anything runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.cli import main

# One function of several annotations in turn: what checks them in tests takes the first for all.
pytestmark = pytest.mark.usefixtures("unchecked")


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["kvprobe", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(str(left.value.code)), capsys.readouterr().err


INTERRUPTED = """
import sys
from kvprobe.cli import main
from kvprobe.experiments.settings import folder_of
from kvprobe.studies import Entry

def interrupted(self, config, root, name, processes=1, share=None):
    parts = folder_of(self.name, config, root, name) / "parts"
    parts.mkdir(parents=True)
    (parts / "00000-kl.parquet").touch()
    (parts / ".0.partial").touch()
    raise KeyboardInterrupt

Entry.run = interrupted
sys.argv[0] = "kvprobe"
main()
"""


def test_an_interrupted_run_says_what_is_kept_and_how_to_resume(tmp_path: Path):
    """In a process of its own, since what others have registered or changed is not there."""
    arguments = ["run", "leakage", "--out", str(tmp_path), "--name", "r"]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert f"1 measured parts are kept in {tmp_path / 'r'}" in done.stderr
    assert f"`kvprobe run leakage --out {tmp_path} --name r` resumes" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"), [('{"prompt": 1}', "The field 'prompt' is 1"), (None, "There is no file")]
)
def test_a_dry_run_opens_the_task_file(
    content: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.jsonl"
    if content is not None:
        file.write_text(content)
    code, sentence = said(["run", "robustness", "--tasks", str(file), "--dry-run"], monkeypatch, capsys)
    assert (code, words in sentence) == (2, True)
