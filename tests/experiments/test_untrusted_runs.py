"""Run folders that anyone may have written: every command on them works, or says one sentence and exits with 2."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kvprobe.cli import entry, main, runs
from kvprobe.errors import UserError
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.inference.model import Model
from kvprobe.presets import read_preset
from kvprobe.probes.card import ProbeInput
from kvprobe.studies import find
from kvprobe.studies.leakage.study import STUDY
from tests.probes.made_probes import made_probe
from tests.studies.test_leakage import example

DEEP = '{"a": ' * 100_000
NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 700,
    "../../../etc/passwd",
    "\x00",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"a": []},
    ["x"] * 2_000,
    "<script>",
    [float("nan")],
]
FIGURE = f"figures/{STUDY.figures[0].file}.png"
FILES = (
    "config.yaml",
    "env.json",
    "metrics.json",
    "samples.parquet",
    FIGURE,
    "probes/one/card.yaml",
    "probes/one/weights.safetensors",
)
OF_CONTENT = ("value", "missing", "extra")
KINDS = ("bytes", "cut", "folder", "gone", "deep", "link")
CASES = [(file, kind) for file in FILES for kind in (*OF_CONTENT * file.endswith(("yaml", "json")), *KINDS)]


@pytest.fixture(scope="module")
def whole(tiny_llama: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run with everything that a run can hold."""
    config, conclusion = example()
    folder = tmp_path_factory.mktemp("runs")
    run = Run.open("leakage", config, tiny_llama.fingerprint, "cpu, float32", folder, "r")
    (run.path / FIGURE).write_bytes(b"\x89PNG")
    made_probe(tiny_llama, ProbeInput("v", 1, None, "mean"), name="one").save(run.path / "probes" / "one")
    run.save_table("samples", pd.DataFrame({"sample": [0, 1]}))
    run.finish(conclusion.record())
    return run.path


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every container of plain data with each of its keys."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else []
    return [pair for key in keys for pair in [(content, key), *places(content[key])]]


def mutate(folder: Path, file: str, kind: str, rng: random.Random) -> None:
    path = folder / file
    if kind in OF_CONTENT:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
        at, key = rng.choice(places(content))
        if kind == "value":
            at[key] = rng.choice(NASTY)
        elif kind == "missing":
            del at[key]
        elif isinstance(at, dict):
            at["unexpected"] = rng.choice(NASTY)
        else:
            at.append(rng.choice(NASTY))
        path.write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "gone":
        path.unlink()
    elif kind == "deep":
        path.write_text(DEEP)
    elif kind == "link":
        path.unlink()
        path.symlink_to("/dev/zero")
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    else:
        path.write_bytes(rng.randbytes(rng.choice([0, 3, 500])))


@pytest.mark.parametrize(("file", "kind"), CASES)
def test_a_folder_that_was_altered_is_read_or_refused_in_a_sentence(file: str, kind: str, whole: Path, tmp_path: Path):
    rng = random.Random(f"{file} {kind}")
    for number in range(6 if kind in OF_CONTENT else 2):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        mutate(folder, file, kind, rng)
        run = Run(folder)
        for do in (
            lambda folder=folder: runs.report(folder),
            lambda folder=folder: runs.view(folder),
            lambda folder=folder: runs.publish(folder, to=folder / "published"),
            run.df,
            lambda run=run: (run.config, run.environment),
            lambda run=run: run.metrics,
        ):
            assert "\n" not in (refusal(do) or "")


def refusal(do: Callable[[], object]) -> str | None:
    """What is refused, which is one sentence; None if all is well. Any other exception ends the test."""
    try:
        do()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("command", ["report", "view", "publish"])
def test_a_refusal_is_one_line_and_exit_code_2(
    command: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(whole, tmp_path / "run")
    for file in ("metrics.json", "env.json"):
        (folder / file).write_text(DEEP)
    monkeypatch.setattr(entry, "add_run_commands", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["kvprobe", command, str(folder)])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("kvprobe: ")
    assert said.count("\n") == 1


def test_a_folder_that_was_not_altered_is_read_by_every_command(whole: Path, tmp_path: Path):
    folder = shutil.copytree(whole, tmp_path / "run")
    runs.report(folder)
    runs.view(folder)
    runs.publish(folder, to=tmp_path / "published")
    assert (tmp_path / "published" / "one" / "card.yaml").is_file()


SETTINGS: list[Any] = [
    {"study": "leakage", "settings": {"samples": value}}
    for value in [None, "many", 1.5, [1], {"a": 1}, float("nan"), -1]
]
SETTINGS += [{"study": value} for value in NASTY if not isinstance(value, str) or value.isprintable()]
SETTINGS += [{"study": "leakage", "settings": value} for value in (["a"], "x", 3, {3: 4}, {"model": 3}, {None: 1})]
SETTINGS += [{"study": "bands", "settings": {"single": float("nan")}}, {"study": "leakage", 3: 4}, [1], "text", None]


@pytest.mark.parametrize("content", SETTINGS, ids=lambda content: repr(content)[:40])
def test_a_settings_file_that_is_none_is_refused_in_a_sentence(content: Any, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))

    def read() -> None:
        preset = read_preset(path)
        from_mapping(find(preset.study).config, preset.settings)

    said = refusal(read)
    assert said is not None
    assert "\n" not in said
