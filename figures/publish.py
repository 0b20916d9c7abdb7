"""Copies what runs found beside the pages of results that quote them.

    python figures/publish.py RUN_DIR …

Of each run, its settings and its findings, in six digits and without line breaks, under docs/results/runs/NAME; of a
folder of `make bench`, what all of it measured, as bench.json. Tests hold the tables and sentences of the pages against
them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs" / "results" / "runs"


def main(runs: list[str]) -> None:
    for run in map(Path, runs):
        if (measured := run / "index.json").is_file():
            kept = six_digits(json.loads(measured.read_text(encoding="utf-8")))
            for of in kept.values():
                of.get("environment", {}).pop("command", None)  # it names folders of the machine
            (RUNS / "bench.json").write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            continue
        folder = RUNS / run.name
        folder.mkdir(parents=True, exist_ok=True)
        metrics = six_digits(json.loads((run / "metrics.json").read_text(encoding="utf-8")))
        text = json.dumps(metrics, ensure_ascii=False, separators=(",", ":")).replace('},{"name"', '},\n{"name"')
        (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
        shutil.copy(run / "config.yaml", folder / "config.yaml")


def six_digits(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: six_digits(each) for key, each in value.items()}
    return [six_digits(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(sys.argv[1:])
