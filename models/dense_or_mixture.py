"""Does a mistake poison mixtures of experts more than dense models? `python models/dense_or_mixture.py FOLDER`

FOLDER holds models that `kvprobe train steps` made, of several shapes and seeds. The study `poisoning` is run on each
(runs that are there are not run again), and a table has a row for each measure, with the value of each seed.
"""

import sys
from pathlib import Path

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.report.findings import Findings, Key
from kvprobe.studies import find
from kvprobe.studies.poisoning import Config

SHAPES = {"moe": "mixture", "active": "dense, active parameters", "total": "dense, all parameters"}
SLIP: dict[str, Key] = {"draft": "slip"}
MEASURES: dict[str, tuple[str, dict[str, Key]]] = {
    "right after a sound draft": ("right", {"arm": "continue", "draft": "sound"}),
    "right after the slip, gone on with": ("right", {"arm": "continue", **SLIP}),
    "`wait` at once, more than at a right value": ("notices", {}),
    "right if the model gives the verdict": ("right", {"arm": "at once", **SLIP}),
    "right after a review of its own": ("right", {"arm": "review", **SLIP}),
    "right after a review of another's": ("right", {"arm": "other's", **SLIP}),
    "right after “wait” one step later": ("right", {"arm": "wait", **SLIP}),
    "right after an erratum": ("right", {"arm": "erratum", **SLIP}),
    "right after a restart with the text": ("right", {"arm": "handed", **SLIP}),
    "right step by step": ("right", {"arm": "alone", **SLIP}),
    "damage left with the step masked": ("ghost", {}),
    "damage undone by V of the step": ("undone", {"edit": "sound step, V"}),
    "slope of errors": ("conditioned", {}),
}


def findings_of(model: Path) -> Findings:
    """Of the study on this model."""
    run: Run = find("poisoning").run(Config(model=str(model)), Path("runs"))
    return Conclusion.of(run.metrics).findings


def main() -> None:
    folder = Path(sys.argv[1])
    found = {
        shape: [findings_of(model) for model in sorted(folder.glob(f"steps-{shape}-corrected-*"))] for shape in SHAPES
    }
    shapes = [shape for shape in SHAPES if found[shape]]
    print("| | " + " | ".join(f"{SHAPES[shape]} (seeds: {len(found[shape])})" for shape in shapes) + " |")
    print("|---" * (1 + len(shapes)) + "|")
    for words, (name, keys) in MEASURES.items():
        cells = [", ".join(f"{100 * one.at(name, **keys).mean:.1f}" for one in found[shape]) for shape in shapes]
        print(f"| {words} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
