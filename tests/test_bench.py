"""The page of all benchmarks: what was measured, what is missing, and that only the same is kept."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """Modules of that folder, which are scripts."""
    names = ("timing", "memory", "bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def kept(scripts: dict[str, ModuleType], folder: Path, name: str, rows: list[Any], monkeypatch: Any) -> None:
    """As the script of this name would keep these rows."""
    timing = scripts["timing"]
    monkeypatch.setattr(timing.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--json", str(folder / f"{name}.json")])
    timing.main(lambda _: rows, "What is measured.\n\nMore.")


def test_the_page_has_every_row_with_its_interval_and_says_what_is_missing(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    timing, bench = scripts["timing"], scripts["bench"]
    row = timing.Row.of("read <b>", "transformers", [2.0] * 8, [1.0] * 7 + [1.1], most=1.5)
    assert row.ratio.has_interval
    assert 1.9 < row.ratio.low < row.ratio.mean < row.ratio.high < 2.1
    few = timing.Row.of("read less", "transformers", [1.0, 4.0], [2.0, 2.0])
    assert few.size_of_ratio == "1 (0.5 to 2)"
    kept(scripts, tmp_path, "lanes", [row, few], monkeypatch)
    kept(scripts, tmp_path, "beside", [timing.Row("read", "nnsight", note="not installed: make bench")], monkeypatch)
    points = [
        timing.Row.of("read", "bare", [size**2], [3.0 * size], grows="prompt", size=size) for size in (128, 1024, 8192)
    ]
    kept(scripts, tmp_path, "curves", points, monkeypatch)
    (tmp_path / "faults.json").write_text(json.dumps({"rows": [], "failed": "AssertionError: not <equal>"}))
    page = bench.write_page(tmp_path, quick=True).read_text()
    for text in (
        "read &lt;b&gt;", row.size_of_ratio, "nnsight: not installed: make bench", "not &lt;equal&gt;",
        "0 of 1 are within limits; above: read &lt;b&gt;", "Not measured yet: patching, policies", "data:image/png",
        "<td>kvprobe: read</td><td class=\"number\">2.00</td>", "<td>bare</td><td class=\"number\">1.00</td>",
    ):  # fmt: skip
        assert text in page, text
    assert json.loads((tmp_path / "index.json").read_text())["lanes"]["rows"][0]["what"] == "read <b>"


def test_what_was_measured_with_the_same_is_kept_and_what_failed_is_tried_again(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench, runs = scripts["bench"], list[str]()

    class Done:
        returncode, stderr = 0, "Traceback\nAssertionError: other slots"

    def run(command: list[str], **_: object) -> Done:
        runs.append(Path(command[1]).stem)
        Path(command[command.index("--json") + 1]).write_text('{"rows": []}')
        return Done()

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(bench, "write_page", lambda folder, _: folder / "index.html")
    monkeypatch.setattr(sys, "argv", ["bench", "memory", "lanes", "--out", str(tmp_path)])
    for returncode in (1, 0, 1):
        Done.returncode = returncode
        bench.main()
    assert runs == ["lanes", "memory"] * 2
    monkeypatch.setattr(bench, "versions", lambda: {"commit": "another"})
    bench.main()
    assert len(runs) == 6
    assert json.loads((tmp_path / "full" / "lanes.json").read_text())["failed"] == "AssertionError: other slots"


def test_a_script_yields_rows_that_are_read_back(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scripts["memory"], "CHOSEN", ("Qwen/Qwen3-8B", "google/gemma-2-9b-it"))
    asked = type("Asked", (), {"table": False, "quick": True})
    rows = [*scripts["memory"].measure(asked)]
    assert [row.ratio.mean for row in rows[:2]] == pytest.approx([1, 1])
    assert rows[2].ratio.mean < 0.9  # windows, which the calculators leave out
    read = scripts["bench"].row_of(json.loads(json.dumps({**vars(rows[0]), "ratio": rows[0].ratio.record()})))
    assert (read.what, read.ratio.mean) == (rows[0].what, rows[0].ratio.mean)
    assert math.isnan(read.ratio.low)


def test_the_page_of_costs_has_the_tables_of_what_was_measured(scripts: dict[str, ModuleType]):
    results = BENCHMARKS.parent / "docs" / "results"
    kept = json.loads((results / "runs" / "bench.json").read_text(encoding="utf-8"))
    page = (results / "costs.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("|")] == [*filter(None, scripts["bench"].tables(kept))]
    assert not [name for name, of in kept.items() if "failed" in of]
