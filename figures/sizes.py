"""Draw the figures of docs/results/sizes.md: the same questions, asked of models of three sizes.

    python figures/sizes.py

Numbers are those of the published runs of the presets below (docs/results/runs).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from kvprobe.experiments.study import Conclusion
from kvprobe.policies.catalogue import CATALOGUE
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots import save
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.lines import Style
from kvprobe.studies.compaction.reading import PAIRS
from kvprobe.tidy import Key

GALLERY = Path(__file__).resolve().parent
RUNS = GALLERY.parent / "docs" / "results" / "runs"
STYLES = {
    "SmolLM2 135M": Style("#56b4e9"),
    "Qwen2.5-Coder 0.5B": Style("#0072b2", "s"),
    "Qwen2.5-Coder 1.5B": Style("#332288", "D"),
}
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
        small, large: the presets of SmolLM2 and the largest, if they are named in another way.
        log: whether numbers are logarithms, and the axis one of what these are of.
    """

    preset: str
    label: str
    series: Mapping[str, tuple[str, Mapping[str, Key]]]
    small: str | None = None
    large: str | None = None
    log: bool = False
    scale: str = "share"
    limits: tuple[float, float] | None = None

    def runs(self) -> dict[str, str]:
        """By model, the name of its preset."""
        small, medium, large = (f"{self.preset}-{suffix}" for suffix in SUFFIXES)
        return dict(zip(STYLES, (self.small or small, medium, self.large or large), strict=True))


def leak(preset: str, what: str, small: str | None = None) -> Question:
    splits = {"in conversations never seen": "leave-context-out", "centred within a conversation": "paired"}
    series = {name: ("leak", {"arm": "masked", "split": split}) for name, split in splits.items()}
    return Question(preset, f"{what} read beyond a restart (share)", series, small)


def right(label: str, arms: Mapping[str, str]) -> Question:
    known = {name: ("outcome", {"outcome": "right_summary", "condition": arm}) for name, arm in arms.items()}
    return Question("compaction", f"right answers, {label} (share)", known, "compaction", MORE)


MORE = "compaction-qwen1.5b-36"
"""All conversations that were asked of the largest model."""
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
            MORE,
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
            "KL from the full cache at half of the slots (nats, geometric mean)",
            {
                CATALOGUE[kind].label.partition(" (")[0]: ("log_kl", {"kind": kind, "level": 50})
                for kind in ("sliding", "sinks", "random", "random-heads", "h2o", "tova", "snapkv", "pyramidkv")
            },
            "policies-smollm2",
            log=True,
        )
    ],
}
"""By figure, its panels."""


def main() -> None:
    matplotlib.use("Agg")
    for figure, questions in QUESTIONS.items():
        panels = tuple(
            Panel(
                finding=f"{figure} {number}",
                down="series",
                line="model",
                styles=STYLES,
                label=question.label,
                level=None if question.log else ("zero", "", {}),
                log=question.log,
                scale=question.scale,
                limits=question.limits,
            )
            for number, question in enumerate(questions)
        )
        counted = "facts" if figure == "patching" else "conversations"
        drawn = Dots(figure, "", panels).draw(
            Findings(answers(figure, questions)),
            lambda key, value, counted=counted: f"{value} {counted}" if key == "n" else str(value),
            "",
        )
        if drawn is not None:
            save(drawn, GALLERY / f"sizes_{figure}")


def answers(figure: str, questions: Sequence[Question]) -> Iterator[Finding]:
    """What each model's run says to each question, as findings of the panels."""
    for number, question in enumerate(questions):
        for model, preset in question.runs().items():
            if not (RUNS / preset).is_dir():
                continue
            found = Conclusion.of(json.loads((RUNS / preset / "metrics.json").read_text(encoding="utf-8"))).findings
            for series, (name, keys) in question.series.items():
                if (answer := found.find(name, **keys)) is not None:
                    shown = {"series": series, "model": model}
                    value = answer.value.exponential if question.log else answer.value
                    yield Finding(f"{figure} {number}", shown, value, comparisons=answer.comparisons)


if __name__ == "__main__":
    main()
