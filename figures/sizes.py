"""Draw the figures of docs/results/sizes.md: the same questions, asked of models of three sizes.

    python figures/sizes.py [FOLDER]

Takes numbers from the finished runs of the presets below in FOLDER (runs by default), each under its preset's name:
`kvprobe run PRESET --name PRESET`. Where there is none, those of docs/results/runs/sizes.csv stay; its rows of
`compaction` are copied from docs/results/caching-key.md. Differences in figures/sizes_copied.csv are copied from
docs/results/sizes.md, and drawn as long as no run gives them.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import pandas as pd

from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import as_mapping, from_mapping
from kvprobe.experiments.study import Conclusion
from kvprobe.policies.catalogue import CATALOGUE
from kvprobe.presets import presets
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots import save
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.lines import Style
from kvprobe.stats import Estimate
from kvprobe.studies import find
from kvprobe.studies.compaction.reading import PAIRS
from kvprobe.tidy import Key

GALLERY = Path(__file__).resolve().parent
TABLE = GALLERY.parent / "docs" / "results" / "runs" / "sizes.csv"
COPIED = GALLERY / "sizes_copied.csv"
STYLES = {
    "SmolLM2 135M": Style("#56b4e9"),
    "Qwen2.5-Coder 0.5B": Style("#0072b2", "s"),
    "Qwen2.5-Coder 1.5B": Style("#332288", "D"),
}
VALUES = tuple(asdict(Estimate(0.0)))
"""Columns of the table that hold a number and its interval."""
SUFFIXES = ("quick", "qwen0.5b", "qwen1.5b")
"""Of the presets of each of these models, unless SmolLM2 has one of its own."""


@dataclass(frozen=True)
class Question:
    """A panel: what is asked of three models.

    Attributes:
        preset: the start of the presets' names.
        label: of the axis.
        series: by name, the finding that answers, and its keys.
        scale: panels of one such name have one scale.
        limits: of the axis, beyond which an interval may reach.
        small, medium: the presets of SmolLM2 and of the 0.5B, if they are named in another way.
    """

    preset: str
    label: str
    series: Mapping[str, tuple[str, Mapping[str, Key]]]
    small: str | None = None
    medium: str | None = None
    scale: str = "share"
    limits: tuple[float, float] | None = None

    def runs(self) -> dict[str, str]:
        """By model, the name of its preset."""
        small, medium, large = (f"{self.preset}-{suffix}" for suffix in SUFFIXES)
        return dict(zip(STYLES, (self.small or small, self.medium or medium, large), strict=True))


def leak(preset: str, what: str, **more: str) -> Question:
    splits = {"in conversations never seen": "leave-context-out", "centred within a conversation": "paired"}
    series = {name: ("leak", {"arm": "masked", "split": split}) for name, split in splits.items()}
    return Question(preset, f"{what} read beyond a restart (share)", series, **more)


def right(label: str, arms: Mapping[str, str]) -> Question:
    known = {name: ("outcome", {"outcome": "right_summary", "condition": arm}) for name, arm in arms.items()}
    return Question("compaction", f"right answers, {label} (share)", known, "compaction")


ARMS = ("everything in view", "summary retained", "summary recomputed")
PLACES = {"first slot": "sink", "later turn": "later", "question, reply": "local", "elsewhere": "elsewhere"}
QUESTIONS = {
    "leakage": [
        leak("leakage", "digits of a code"),
        leak("leakage-topic", "topics", small="leakage-topic-smollm2"),
    ],
    "compaction": [
        right("the summarised turns hidden", dict(zip(ARMS, ("full", *PAIRS[0]), strict=True))),
        right("unrelated turns hidden", dict(zip(ARMS[1:], PAIRS[1], strict=True))),
        Question(
            "compaction",
            "difference within a conversation (share)",
            {
                "retained less recomputed": ("gap", {"outcome": "right_summary"}),
                "… unrelated turns hidden": ("gap_irrelevant", {"outcome": "right_summary"}),
            },
            "compaction",
            scale="difference",
        ),
    ],
    "reliance": [
        Question(
            "reliance",
            "retained less recomputed summary (nats)",
            {
                "the stated answer": ("worse", {"when": "later"}),
                "margin, turns stated the same": ("relies", {"when": "later"}),
                "margin, turns stated the other": ("poisoned", {"when": "later"}),
                "an answer that nobody stated": ("general", {"when": "later"}),
            },
            "reliance",
            "reliance-qwen0.5b",
        )
    ],
    "patching": [
        Question(
            "patching",
            "share of the way to the other fact",
            {f"{part} swapped": ("everything", {"part": part}) for part in "KV"},
        )
    ],
    "damage": [
        Question(
            "filter_poison",
            "share of the damage that restoring heads removes, beyond random heads",
            {
                "heads that pass on both": ("beyond", {"sort": "poison"}),
                "… of noise": ("beyond_one", {"family": "gaussian", "sort": "poison"}),
                "… of a false statement": ("beyond_one", {"family": "false", "sort": "poison"}),
            },
        )
    ],
    "attention": [
        Question(
            "dangling",
            "share of the attention that a hidden turn had",
            {name: ("went", {"arm": "masked", "place": place}) for name, place in PLACES.items()},
            limits=(-0.2, 1.0),
        )
    ],
    "policies": [
        Question(
            "policies",
            "KL from the full cache at half of the slots (nats)",
            {
                CATALOGUE[kind].label.partition(" (")[0]: ("quality", {"measure": "kl", "kind": kind, "level": 50})
                for kind in ("sliding", "sinks", "random", "random-heads", "h2o", "tova", "snapkv", "pyramidkv")
            },
            "policies-smollm2",
        )
    ],
}
"""By figure, its panels."""


def main() -> None:
    matplotlib.use("Agg")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    table: pd.DataFrame = pd.concat([pd.read_csv(TABLE), *measured(folder)])
    table = table.drop_duplicates(["panel", "series", "preset"], keep="last")
    table = table.sort_values("model", key=lambda models: models.map(list(STYLES).index), kind="stable")
    table = table.sort_values("panel", kind="stable")
    table = table.loc[list(map(asked, table["panel"], table["series"], table["preset"]))]
    table.to_csv(TABLE, index=False, float_format="%.4g")
    table = pd.concat([pd.read_csv(COPIED), table]).drop_duplicates(["panel", "series", "preset"], keep="last")
    findings = Findings(
        Finding(
            row["panel"],
            {key: row[key] for key in ("series", "model")},
            Estimate(*(row[name] for name in VALUES)),
            comparisons=row["comparisons"],
        )
        for row in table.to_dict("records")
    )
    for figure, questions in QUESTIONS.items():
        panels = tuple(
            Panel(
                finding=f"{figure} {number}",
                down="series",
                line="model",
                styles=STYLES,
                label=question.label,
                level=("zero", "", {}),
                scale=question.scale,
                limits=question.limits,
            )
            for number, question in enumerate(questions)
        )
        counted = "facts" if figure == "patching" else "conversations"
        drawn = Dots(figure, "", panels).draw(
            findings, lambda key, value, counted=counted: f"{value} {counted}" if key == "n" else str(value), ""
        )
        if drawn is not None:
            save(drawn, GALLERY / f"sizes_{figure}")


def measured(folder: Path) -> Iterator[pd.DataFrame]:
    """A table for each panel and model that was run."""
    for figure, questions in QUESTIONS.items():
        for number, question in enumerate(questions):
            for model, preset in question.runs().items():
                if (run := finished(folder, preset)) is not None:
                    rows = pd.DataFrame(answers(run, question))
                    yield rows.assign(panel=f"{figure} {number}", model=model, preset=preset)


def asked(panel: str, series: str, preset: str) -> bool:
    """Whether a row of the table belongs to a question that is still asked."""
    figure, number = panel.split()
    question = QUESTIONS[figure][int(number)]
    return series in question.series and preset in question.runs().values()


def finished(folder: Path, preset: str) -> Run | None:
    """The finished run of a preset, if there is one."""
    if not (folder / preset / "metrics.json").is_file():
        return None
    run, chosen = Run.load(folder / preset), presets()[preset]
    if run.config["settings"] != as_mapping(from_mapping(find(chosen.study).config, chosen.settings)):
        sys.exit(f"{run.path} has other settings than the preset {preset}; run the preset again, or move the run away.")
    return run


def answers(run: Run, question: Question) -> Iterator[dict[str, Key | float]]:
    findings = Conclusion.of(run.metrics).findings
    for series, (name, keys) in question.series.items():
        if (finding := findings.find(name, **keys)) is not None:
            yield {"series": series, **asdict(finding.value), "comparisons": finding.comparisons}


if __name__ == "__main__":
    main()
