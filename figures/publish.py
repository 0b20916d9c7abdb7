"""Copies what runs found beside the pages of results that quote them.

    python figures/publish.py RUN_DIR …

Of each run, its settings and its findings, in six digits and without line breaks, under docs/results/runs/NAME. A test
holds the tables and sentences of the pages against them. What the run now has for each interval that is listed as one
of a preset NAME that was not published is printed.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from kvprobe.experiments.study import Conclusion

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs" / "results" / "runs"
LISTED = ROOT / "tests" / "intervals_without_runs.yaml"


def main(runs: list[str]) -> None:
    for run in map(Path, runs):
        folder = RUNS / run.name
        folder.mkdir(parents=True, exist_ok=True)
        metrics = six_digits(json.loads((run / "metrics.json").read_text(encoding="utf-8")))
        text = json.dumps(metrics, ensure_ascii=False, separators=(",", ":")).replace('},{"name"', '},\n{"name"')
        (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
        shutil.copy(run / "config.yaml", folder / "config.yaml")
        print_moved(run.name, metrics)


def print_moved(preset: str, metrics: Any) -> None:
    """The listed intervals of a preset, each beside the finding that it is."""
    findings = Conclusion.of(metrics).findings
    for page, presets in yaml.safe_load(LISTED.read_text(encoding="utf-8")).items():
        for interval, finding in presets.get(preset, {}).items():
            now = findings.where(**finding) if finding else []
            values = [f"{each.value.mean:.6g} ({each.value.ends[0]:.6g} to {each.value.ends[1]:.6g})" for each in now]
            print(f"{page}: {interval} → {', '.join(values) or 'which finding it is, is not known'}")


def six_digits(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: six_digits(each) for key, each in value.items()}
    return [six_digits(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(sys.argv[1:])
