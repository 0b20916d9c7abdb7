"""All comparisons on one page: each script of this folder that compares, one after the other, each in its own process.

What a script measured is kept in a folder, so that an interrupted run goes on; it is measured anew where kvprobe, what
is installed, or the settings are others. Where a script fails, the page says so.

    make bench [QUICK=1] [NAMES="lanes curves"]     or     python benchmarks/bench.py [NAMES] [--quick] [--out FOLDER]

The tables of docs/results/costs.md are `tables` of what is published in docs/results/runs/bench.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from math import log, nan
from pathlib import Path
from typing import Any

from timing import Row
from tqdm import tqdm

from kvprobe.environment import environment, short_commit
from kvprobe.files import write_whole
from kvprobe.report.findings import Findings
from kvprobe.report.page import picture
from kvprobe.report.plots.lines import Lines
from kvprobe.report.plots.style import save_or_remove
from kvprobe.report.views.page import templates
from kvprobe.stats import Estimate
from kvprobe.units import short

HERE = Path(__file__).parent
NAMES = (
    "lanes", "beside", "patching", "curves", "policies", "faults", "packed", "attention", "probes", "probe_tasks",
    "memory", "framework",
)  # fmt: skip
BESIDE = ("nnsight", "kvpress", "scikit-learn")
"""Packages whose versions are on the page too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="small settings: minutes, and ratios of little meaning")
    parser.add_argument("--model", help="instead of that of each benchmark")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    asked = parser.parse_args()
    if unknown := set(asked.names) - {*NAMES}:
        parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(NAMES)}")
    folder = asked.out / ("quick" if asked.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in NAMES if name in (asked.names or NAMES)]
    bar = tqdm(names, unit="benchmark")
    for name in bar:
        bar.set_description(name)
        if not measured(folder, name, asked.model):
            measure(folder, name, asked.model, asked.quick)
    page = write_page(folder, asked.quick)
    print(f"\n{page}\n{page.with_suffix('.json')}")


def versions() -> dict[str, Any]:
    """What a result must have been measured with to be kept."""
    here = environment()
    others = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    return {"commit": here["commit"], **here["versions"], **{name: others.get(name) for name in BESIDE}}


def measured(folder: Path, name: str, model: str | None) -> bool:
    path = folder / f"{name}.json"
    return path.is_file() and json.loads(path.read_text()).get("with") == [model, versions()]


def measure(folder: Path, name: str, model: str | None, quick: bool) -> None:
    """Run a script, and keep its rows, or why it failed."""
    partial, path = folder / f"{name}.part", folder / f"{name}.json"
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(partial), *["--quick"] * quick]
    command += ["--model", model] if model else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        kept = json.loads(partial.read_text())
        partial.unlink()
        kept["with"] = [model, versions()]
    else:  # it is tried again the next time
        kept = {"rows": [], "failed": (done.stderr.strip() or "no message").splitlines()[-1][:500]}
    write_whole(path, json.dumps(kept, indent=1))


def write_page(folder: Path, quick: bool) -> Path:
    """`index.html` and `index.json` of all that is in a folder."""
    kept = {name: json.loads(path.read_text()) for name in NAMES if (path := folder / f"{name}.json").is_file()}
    rows = {name: [row_of(row) for row in of["rows"]] for name, of in kept.items()}
    findings = curves([row for of in rows.values() for row in of if row.grows])
    figures = [
        Lines(
            file=f"curve-{number}",
            caption=f"{grows}: seconds, by how many there are",
            finding="seconds",
            x="size",
            x_label=str(grows),
            y_label="seconds",
            line="side",
            where={"grows": grows},
            log=True,
            size=(4.5, 3.0),
        )
        for number, grows in enumerate(findings.values("seconds", "grows"))
    ]
    for figure in figures:
        save_or_remove(figure.draw(findings, lambda _, value: str(value), ""), folder / figure.file)
    write_whole(folder / "index.json", json.dumps(kept, indent=1))
    here = versions()
    missing = sorted({f"{row.beside}: {row.note}" for of in rows.values() for row in of if row.ours is None})
    text = templates(HERE).get_template("bench.html.j2").render(
        title="kvprobe beside what one would use instead",
        question="Ratios of kvprobe's cost to the other's, with 95 % intervals, or ranges below eight pairs.",
        answer=said(rows, quick),
        passages=[],
        parts=[],
        scripts=[],
        policy="default-src 'none'; img-src data:; style-src 'unsafe-inline'",
        version=metadata.version("kvprobe"),
        kept=kept,
        rows=rows,
        names=[name for name in NAMES if name not in kept],
        missing=missing,
        curves=[(picture(folder, figure), figure.caption) for figure in figures],
        size=size,
        slopes=[*findings.where("slope")],
        versions={**here, "commit": short_commit(here["commit"] or "")},
    )  # fmt: skip
    write_whole(folder / "index.html", text)
    return folder / "index.html"


def tables(kept: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: a table of what was compared, and one of curves: seconds at each size, and the slope."""
    rows = [row_of(row) for of in kept.values() for row in of["rows"] if row["ours"] is not None]
    compared = ["| what | beside | kvprobe | the other | ratio | pairs |", "|---|---|---:|---:|---:|---:|"]
    compared += [
        f"| {row.what} | {row.beside} | {size(row.ours, row.unit)} | {size(row.theirs, row.unit)} "
        f"| {row.size_of_ratio} | {row.ratio.clusters} |"
        for row in rows
        if not row.grows
    ]
    findings = curves([row for row in rows if row.grows])
    grown = ["| what grows | | seconds | slope |", "|---|---|---|---:|"]
    for slope in findings.where("slope"):
        where = {key: slope.keys[key] for key in ("grows", "side")}
        points = [f"{point.value.mean:.3g} ({point.keys['size']:,})" for point in findings.where("seconds", **where)]
        grown.append(f"| {where['grows']} | {where['side']} | {', '.join(points)} | {slope.value.mean:.2f} |")
    return [*compared, "", *grown] if findings.where("slope") else compared


def size(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return short(value) if unit == "B" else f"{value:.4g} {unit}"


def said(rows: Mapping[str, Sequence[Row]], quick: bool) -> str:
    """How many comparisons there are, and which are above what they are meant to be."""
    held = [row for of in rows.values() for row in of if row.most is not None and not row.ratio.unknown]
    above = [f"{row.what} ({row.size_of_ratio})" for row in held if row.ratio.mean > row.most]
    small = " Small settings: they show that everything runs, and their ratios mean little." if quick else ""
    beyond = f"; above: {'; '.join(above)}" if above else ""
    count, within = sum(map(len, rows.values())), len(held) - len(above)
    return f"{count} comparisons; {within} of {len(held)} are within limits{beyond}.{small}"


def row_of(record: Mapping[str, Any]) -> Row:
    ratio: dict[str, Any] = {name: nan if value is None else value for name, value in record["ratio"].items()}
    return Row(**{**record, "ratio": Estimate(**ratio)})


def curves(rows: Sequence[Row]) -> Findings:
    """Seconds of each side by size, and its slope: that of a line through the logarithms."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        for side, seconds in ((f"kvprobe: {row.what}", row.ours), (row.beside, row.theirs)):
            if side and seconds is not None:
                points.setdefault((row.grows, side), {})[row.size] = seconds
    findings = Findings()
    for (grows, side), taken in points.items():
        for size, seconds in taken.items():
            findings.number("seconds", seconds, "s", grows=grows, side=side, size=size)
        if len(taken) > 1:
            logs = [[log(value) for value in values] for values in (taken, taken.values())]
            slope = statistics.linear_regression(*logs).slope
            ends: dict[str, Any] = {"from": min(taken), "to": max(taken)}
            findings.number("slope", slope, grows=grows, side=side, **ends)
    return findings


if __name__ == "__main__":
    main()
