"""The wheel holds everything that `kvprobe run leakage` needs, and works from wherever it is unpacked."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_presets_probes_texts_and_types_are_inside(unpacked: Path):
    for file in (
        "_shipped/analyses/leakage.yaml",
        "_shipped/models/ordinal/model.safetensors",
        "_shipped/models/ordinal/tokenizer.json",
        "_shipped/models/features/smollm2-135m-v.7/cfg.json",
        "_shipped/probes/README.md",
        "report/reported.yaml",
        "tasks/facts.yaml",
        "tasks/passcode.yaml",
        "tasks/recite.yaml",
        "report/templates/report.html.j2",
        "py.typed",
    ):
        assert (unpacked / "kvprobe" / file).is_file()


def test_nothing_but_kvprobe_is_importable(unpacked: Path):
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"kvprobe"}


def test_the_readme_of_the_package_has_no_relative_link(unpacked: Path):
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "# kvprobe\n" in text
    assert not re.search(r"\]\((?!https?://)", text)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("[rooms](docs/a.md#b)", "[rooms](https://example.org/k/blob/HEAD/docs/a.md#b)"),
        ("![one](figures/a.png)", "![one](https://example.org/k/raw/HEAD/figures/a.png)"),
        ("[there](https://example.org)", "[there](https://example.org)"),
    ],
)
def test_its_links_lead_into_the_repository_where_there_is_one(page: str, shown: str):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.absolute(page, "https://example.org/k/") == shown


def test_the_command_finds_its_presets_there(unpacked: Path, tmp_path: Path):
    check = (
        "import kvprobe, sys; from kvprobe.cli import main; print(kvprobe.__file__); "
        "sys.argv = ['kvprobe', 'ls', 'presets', 'leakage']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(unpacked) in done.stdout
    assert "leakage-one-template" in done.stdout
