"""Code blocks of README.md and docs/ run as printed, and the command line takes every `kvprobe …` line."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pytest
import torch
import yaml

from kvprobe.experiments.skeleton import write_skeleton
from tests.as_printed import run_code

matplotlib.use("Agg")
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = 3
"""Blocks that a comment excuses, with its reason: `<!-- not run: … -->` on the line before."""


class Block(NamedTuple):
    language: str
    code: str
    line: int
    excuse: str | None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    fences = re.finditer(
        r"(?:<!-- not run: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE
    )
    return [Block(block[2], block[3], text[: block.start(3)].count("\n"), block[1]) for block in fences]


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


def run(page: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run a page's Python; a block that begins with the name of a file is written to it first."""
    for block in blocks(page):
        if block.language == "python" and block.excuse is None:
            file = re.match(r"# (\w+\.py)\n", block.code)
            if file is not None:
                Path(file[1]).write_text(block.code)
            code = "\n" * block.line + block.code
            run_code(code, page.name, namespace)
    return namespace


@pytest.mark.parametrize("page", WITH_PYTHON, ids=shown)
def test_the_blocks_of_a_page_run_as_printed(
    page: Path, namespace: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(page, namespace)
    said = capsys.readouterr().out
    check = {"README.md": readme_prints, "docs/guides/tutorial.md": tutorial_says}.get(shown(page))
    if check is not None:
        check(namespace, said, tmp_path)


def readme_prints(names: dict[str, Any], said: str, folder: Path) -> None:
    (printed,) = (block.code for block in blocks(PAGES[0]) if block.language == "text")
    assert said == printed
    japan, masked_japan, restarted_japan, brazil, masked_brazil, restarted_brazil = (
        float(line.partition(": ")[2]) for line in said.splitlines()
    )
    assert restarted_japan == restarted_brazil
    assert japan > masked_japan > restarted_japan > masked_brazil > brazil
    masked, restarted = names["full"].mask("T1"), names["cache"]
    assert "T1" not in restarted.ledger.names
    seen = masked.ledger.live_somewhere
    for kept in ("tokens", "positions", "origins"):
        assert torch.equal(getattr(masked.ledger, kept)[seen], getattr(restarted.ledger, kept)[0])
    assert not seen.all()
    assert seen[0, 0]  # the sink stays


def tutorial_says(names: dict[str, Any], said: str, folder: Path) -> None:
    def without_numbers(text: str) -> list[str]:
        """Its lines; numbers of a model's measurement may differ between processors."""
        return [re.sub(r"[\d.,]+", "#", " ".join(line.split())) for line in text.splitlines() if line.strip(" …")]

    shown = [block for block in blocks(ROOT / "docs/guides/tutorial.md") if block.language == "text"]
    printed = without_numbers(said)
    assert len(shown) == 4
    for block in shown:
        lines = without_numbers(block.code)
        start = printed.index(lines[0])
        assert printed[start : start + len(lines)] == lines
    layer, channel, *_ = names["swept"].outcomes
    assert sum(layer.kl) > sum(channel.kl)
    assert "GQA 9:3" in said
    assert names["measured"].cache == names["planned"].cache
    assert {"random", "leave-context-out", "paired"} <= {line.split(":")[0] for line in said.splitlines()}
    for figure in ("leak.png", "memory.png"):
        assert (folder / figure).stat().st_size > 10_000


def test_blocks_that_are_not_run_say_why():
    assert sum(block.excuse is not None for page in PAGES for block in blocks(page)) == NOT_RUN


STANDS_FOR = {
    "RUN": "runs/one",
    "OTHER": "runs/two",
    "MODEL": "smollm2-135m",
    "TEXT": "hello",
    "FILE.json": "chat.json",
    "FILE.yaml": "mine.yaml",
    "FILE.py": "hidden_thirds.py",
}
"""What a word in capitals stands for."""

LEFT_OPEN = {
    "model": "smollm2-135m", "contexts": 12, "samples": 240, "seed": 1, "device": "cpu",
    "context": 2048, "batch": 4, "length": 420,
}  # fmt: skip
"""What a flag whose value is left open (`…`) may be given."""


def commands(page: Path) -> list[str]:
    """Each `kvprobe …` line of a page's blocks, and each in its text that is more than the name of a command."""
    shells = [re.sub(r"\\\n\s*", "", block.code) for block in blocks(page) if block.language != "python"]
    fenced = [line for code in shells for line in code.splitlines()]
    fenced = [line.removeprefix("  entrypoint: ") for line in fenced]  # of a manifest of Kubernetes
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    inline = [line for line in re.findall(r"`(kvprobe [^`]*)`", text) if len(line.split()) > 2]
    return [line for line in (*fenced, *inline) if line.startswith("kvprobe ")]


PARSE = """
import json, sys
from kvprobe.cli import app, runs
runs.add_run_commands([])
runs.add_run_commands(["run", "mine.yaml"])
runs._add_run_command("hidden_thirds.py", runs.Preset("own", "hidden_thirds.py", {}))
for line, arguments in json.load(sys.stdin):
    try:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    except Exception as error:
        print(line, "is refused:", " ".join(str(error).split()))
"""


def test_every_command_is_one_that_the_command_line_takes(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("study: leakage\n")
    write_skeleton("hidden_thirds", tmp_path)
    lines = {line: read_line(line) for page in PAGES for line in commands(page)}
    assert len(lines) > 40
    given = json.dumps(
        [(line, arguments) for line, commands_of_line in lines.items() for arguments in commands_of_line]
    )
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=given, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


def test_manifests_are_yaml():
    manifests = [block.code for page in PAGES for block in blocks(page) if block.language == "yaml"]
    named = [yaml.safe_load(manifest) for manifest in manifests]
    assert "RayJob" in {manifest.get("kind") for manifest in named}


def read_line(line: str) -> list[list[str]]:
    """The commands that a line stands for: with its optional flags and without, and one for each alternative."""
    line = re.split(r"\s{2,}|\s#", line)[0]
    line = re.sub(r"--(\w+) …", lambda flag: f"--{flag[1]} {LEFT_OPEN[flag[1]]}", line)
    line = line.replace(" …", "")
    whole = line.replace("[", "").replace("]", "")
    bare = re.sub(r"\[[^\]]*\]", "", line)
    command_lines = []
    for form in dict.fromkeys((whole, bare)):
        head, *alternatives = form.split(" | ")
        kept = " ".join(head.split()[:-2])
        command_lines += [head, *(f"{kept} {alternative}" for alternative in alternatives)]
    return [
        [STANDS_FOR.get(word, word) for word in shlex.split(command)[1:]]
        for command in command_lines
        if command != "kvprobe"
    ]


def test_the_map_lists_the_rooms_in_the_order_of_their_imports():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = {room: floor for floor, rooms in enumerate(contract["layers"]) for room in rooms.split(" | ")}
    listed = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/reference/rooms.md").read_text(), flags=re.MULTILINE)
    assert set(listed) == {folder.parent.name for folder in (ROOT / "kvprobe").glob("*/__init__.py")}
    assert listed == sorted(listed, key=floors.__getitem__)


def test_the_readme_is_short_up_to_its_first_section():
    before, _, _ = PAGES[0].read_text().partition("\n## ")
    assert len(before.split()) <= 400
    assert len(next(block.code for block in blocks(PAGES[0])).strip().replace("\n\n", "\n").splitlines()) <= 10


def test_each_example_of_an_extension_is_under_40_lines():
    guide = blocks(ROOT / "docs" / "guides" / "extend.md")
    examples = [block.code for block in guide if block.language == "python"]
    assert len(examples) == 7
    assert all(len(code.splitlines()) < 40 for code in examples)
