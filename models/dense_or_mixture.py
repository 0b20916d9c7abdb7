"""Does a mistake poison mixtures of experts more than dense models? `python models/dense_or_mixture.py FOLDER`

FOLDER holds models that `kvprobe train steps` made, of several shapes and seeds. The study `poisoning` is run on each
(runs that are there are not run again), and a table has a row for each measure, with the value of each seed (of more
than three, their mean and range), and how much more the mixtures have than the dense models: the difference of means,
with a 95 % interval over seeds (Welch's t).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import ttest_ind

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
    "right if the model itself remarks on it": ("right", {"arm": "at once", **SLIP}),
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
    findings = {
        shape: [findings_of(model) for model in sorted(folder.glob(f"steps-{shape}-corrected-*"))] for shape in SHAPES
    }
    shapes = [shape for shape in SHAPES if findings[shape]]
    heads = [f"{SHAPES[shape]} (seeds: {len(findings[shape])})" for shape in shapes]
    more = [f"{SHAPES['moe']} less {SHAPES[shape]}" for shape in shapes if shape != "moe"]
    print(f"| | {' | '.join(heads + more)} |")
    print("|---" * (1 + len(heads) + len(more)) + "|")
    for words, (name, keys) in MEASURES.items():
        seeds = {shape: [100 * one.at(name, **keys).mean for one in findings[shape]] for shape in shapes}
        cells = list(map(listed, seeds.values()))
        cells += [difference(seeds["moe"], values) for shape, values in seeds.items() if shape != "moe"]
        print(f"| {words} | {' | '.join(cells)} |")


def listed(values: Sequence[float]) -> str:
    """Each seed's value; of many, the mean and the range."""
    if len(values) <= 3:
        return ", ".join(f"{value:.1f}" for value in values)
    return f"{np.mean(values):.1f} (range {min(values):.1f} to {max(values):.1f})"


def difference(mixture: Sequence[float], dense: Sequence[float]) -> str:
    """The difference of means, with its interval where seeds differ at all."""
    mean = np.mean(mixture) - np.mean(dense)
    if min(len(mixture), len(dense)) < 2 or not (np.ptp(mixture) or np.ptp(dense)):
        return f"{mean:+.1f}"
    low, high = ttest_ind(mixture, dense, equal_var=False).confidence_interval(0.95)
    return f"{mean:+.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
