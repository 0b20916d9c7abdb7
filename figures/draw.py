"""Draw the gallery from what the runs of presets found.

    python figures/draw.py [NAME …]

Of runs whose findings are published (docs/results/runs), the figures are drawn from these, in seconds. Other presets
are run first, if they have not been: by name alone, since that takes hours. `make figures` draws the published ones.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import yaml

from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.memory.budget import budget
from kvprobe.presets import presets
from kvprobe.report.findings import Findings
from kvprobe.report.plots import memory, save
from kvprobe.report.plots.figure import Figure, Labels
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies import find
from kvprobe.studies.idle_rebuild import FIRST
from kvprobe.studies.idle_rebuild.study import RUNS as RUNS_OF_SESSIONS
from kvprobe.studies.leakage.study import by_layer

GALLERY = Path(__file__).resolve().parent
RUNS = GALLERY.parent / "runs"
PUBLISHED = GALLERY.parent / "docs" / "results" / "runs"
FIGURES: dict[str, tuple[str, str | Figure]] = {
    "leakage": ("leakage", replace(by_layer("leakage", "mean", ""), where={"read": "mean", "family": "v"})),
    "leakage_topic": (
        "leakage-topic",
        replace(by_layer("leakage_topic", "mean", ""), where={"read": "mean", "family": "resid_post"}),
    ),
    "leakage_by_segment": ("leakage", "layer_by_segment"),
    "use": ("use", "read_and_used"),
    "multihop": ("multihop", "by_distance"),
    "multihop_transfer": ("multihop", "transfer"),
    "features": ("features", "differences"),
    "features_sparse": ("features", "curves_paired"),
    "memory_times": ("memory", "times"),
    "memory_batch": ("memory", "batches"),
    "memory_growth": ("memory-gemma3", "growth"),
    "mask_or_restart": ("compaction", "arms"),
    "dangling_attention": ("compaction", "dangling"),
    "rebuilt_cache": ("idle_rebuild", "drift_by_layer"),
    "engines": ("engines", "distances"),
    "finetuned": ("finetuned", "whole"),
    "finetuned_bands": ("finetuned", "bands"),
    "forgetting": ("forgetting", "frontier"),
    "forgetting_qwen": ("forgetting-qwen0.5b", "frontier"),
    "detection": ("detection", "seen"),
    "detection_severity": ("detection", "severity"),
    "policies": ("policies", "quality_by_memory"),
    "policies-gemma": ("policies-gemma", "quality_by_memory"),
    "noise_by_layer": ("bands-smollm2", "kl_by_layer"),
    "noise_by_band": ("bands-smollm2", "accuracy_by_band"),
    "robustness": ("robustness-smollm2", "accuracy_by_rate"),
    "gsm8k_cliff": ("gsm8k-qwen2.5-coder-1.5b-cliff", "accuracy_by_rate"),
    "bitflips": ("bitflips-smollm2", "shares_by_bit"),
    "patching": ("patching", "layer_by_segment"),
    "patching_by_head": ("patching", "layer_by_head"),
    "carriers": ("carriers", "shares"),
    "filter_poison": ("filter_poison", "strips"),
    "filter_poison_tested": ("filter_poison", "tested"),
    "dangling": ("dangling", "went"),
    "dangling_rescued": ("dangling", "rescues"),
    "payload_or_pointer": ("dangling", "memos"),
    "pointers": ("pointers-qwen1.5b", "address"),
    "routing_start": ("routing", "start_by_place"),
    "reliance": ("reliance", "answers_by_source"),
    "reliance_right": ("reliance", "right_by_turns"),
    "reliance_layers": ("reliance", "undone_by_band"),
    "leakage_by_amount": ("leakage_scaling", "for_ridge"),
    "leakage_by_world": ("leakage_scaling", "by_world"),
    "leakage_used": ("leakage_scaling", "used"),
    "code_poisoning": ("code_poisoning-qwen1.5b", "code_poisoning"),
    "ghost_state": ("ghost_state", "reach"),
    "ghost_state_capacity": ("ghost_state", "capacity"),
    "memento_layers": ("memento_toy-seeds", "by_layer"),
    "memento_training": ("memento_toy-seeds", "by_training"),
    "lossy_memento": ("lossy_memento", "capacity"),
}
"""By file: the preset, and the figure of its run, by its name or as it is declared."""
GSM8K = {
    "gsm8k-qwen2.5-coder-1.5b": Style("#d55e00"),
    "gsm8k-qwen2.5-coder-1.5b-rates": Style("#0072b2", "s"),
    "gsm8k-qwen2.5-coder-1.5b-rates-gaussian": Style("#009e73", "^"),
}
"""Runs on the same task at different rates, which are published."""

REMOVED = {
    "idle_rebuild": "three turns, summarised",
    "idle_rebuild-tool": "a tool's result",
    "idle_rebuild-window": "before each turn the oldest one",
}
"""Runs on rebuilding, by what had left the view."""
SHAPES = {"poisoning": "mixture of experts", "poisoning-active": "dense, of as many active parameters"}
"""Runs on poisoning, by the model's shape."""


@dataclass(frozen=True)
class Found:
    """What a run found, and of which study and models it is."""

    study: Study[Any]
    model: str
    findings: Findings


def main(names: list[str]) -> None:
    matplotlib.use("Agg")
    others = {
        "memory": lambda: memory(budget("google/gemma-3-27b-it", memory="80GB")),
        "gsm8k": gsm8k,
        "rebuilt": rebuilt,
        "poisoning": lambda: by_shape("right_by_arm", row=lambda keys: SHAPES[str(keys["of"])], size=(7.2, 2.4)),
        "poisoning_layers": lambda: by_shape("undone_by_layer", panel="of"),
        "leakage_scaling": by_reader,
        "memento": over_seeds,
    }
    drawn = names or [*others, *(name for name, (preset, _) in FIGURES.items() if (PUBLISHED / preset).is_dir())]
    for name in drawn:
        save(others[name]() if name in others else figure_of(name), GALLERY / name)
    if not names:
        print("Without published findings, and left as they are:", ", ".join(sorted(FIGURES.keys() - drawn)))


def figure_of(name: str) -> Any:
    """A figure of the gallery, from what the run of its preset found."""
    preset, which = FIGURES[name]
    found = published(preset) if (PUBLISHED / preset).is_dir() else run_of(preset)
    figure = declared(found.study, which) if isinstance(which, str) else which
    return figure.draw(found.findings, found.study.label, found.model)


def published(name: str) -> Found:
    """What was published of a run."""
    settings = yaml.safe_load((PUBLISHED / name / "config.yaml").read_text(encoding="utf-8"))
    metrics = json.loads((PUBLISHED / name / "metrics.json").read_text(encoding="utf-8"))
    return _found(settings, metrics)


def run_of(preset: str) -> Found:
    """What the run of a preset found."""
    chosen = presets()[preset]
    study = find(chosen.study)
    run: Run = study.run(from_mapping(study.config, chosen.settings), RUNS)
    return _found(run.config, run.metrics)


def _found(settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> Found:
    study = find(settings["study"])
    config = from_mapping(study.config, settings["settings"])
    return Found(study.declaration, config.model + config.and_more, Conclusion.of(metrics).findings)


def gsm8k() -> Any:
    """All rates of these runs, a panel for each fault, beside those that were published; a rate of 0 is a sound
    cache."""
    together, names, model = Findings(), {}, ""
    for name in GSM8K:
        found = published(name)
        model, names[name] = found.model, f"kvprobe, {_counted(found.findings, 'sound')}"
        names["published"] = f"published (Qwen2.5-1.5B-Instruct), {_counted(found.findings, 'published_sound')}"
        for source, sound, run in (("accuracy", "sound", name), ("published", "published_sound", "published")):
            at_once = found.findings.where(sound)[0]
            for finding in found.findings.where(source):
                for rate, each in ((0.0, at_once), (finding.keys["rate"], finding)):
                    keys = {"fault": finding.keys["fault"], "run": run, "rate": rate}
                    if together.find("accuracy", **keys) is None:
                        together.add(replace(each, name="accuracy", keys=keys))
    lines = Lines(
        file="gsm8k",
        caption="",
        finding="accuracy",
        x="rate",
        line="run",
        row=lambda keys: find("robustness").declaration.label("fault", keys["fault"]),
        styles=GSM8K | {"published": Style("black", "D", "--")},
        x_label="struck (% of the slots)",
        y_label="right answers",
        limits=(-0.03, 1.03),
        size=(7.0, 2.0),
    )
    labels = {"n": "{} questions".format, "run": names.__getitem__}
    return lines.draw(together, lambda key, value: labels[key](value), f"GSM8K, {model}")


def rebuilt() -> Any:
    """How far the runs are from the running one, turn by turn, a panel for each kind of removal."""
    lines = Lines(
        file="rebuilt",
        caption="",
        finding="by_turn",
        x="turn",
        line="run",
        panel="of",
        where={"measure": "from_compacted"},
        drawn=lambda run: run in ("in_place", "rebuilt", "control"),
        styles=RUNS_OF_SESSIONS,
        upright=(FIRST - 0.5,),
        curves=True,
        y_label="KL from the running session (nats per token)",
        log=True,
        size=(2.9, 3.4),
    )
    return lines.draw(
        *beside_each_other("by_turn", REMOVED),
        f"What had left the view before the rebuild, {published('idle_rebuild').model}",
    )


def by_shape(file: str, **more: Any) -> Any:
    """A figure of poisoning for both shapes."""
    figure: Any = declared(published("poisoning").study, file)
    return replace(figure, **more).draw(
        *beside_each_other(figure.finding, SHAPES), "Models that work sums step by step"
    )


def by_reader() -> Any:
    """All readers, of which one learned from fewer conversations in a run of its own."""
    found = published("leakage_scaling")
    together = Findings((*found.findings, *published("leakage_scaling-soft").findings.where("read", reader="soft")))
    return declared(found.study, "by_conversations").draw(together, found.study.label, found.model)


def over_seeds() -> Any:
    """Digits by distance, the mean of three trainings of the toy of Memento."""
    found = published("memento_toy-seeds")
    figure = replace(declared(found.study, "by_distance"), finding="seeds", where={})
    labels = {"n": "{} seeds".format}
    return figure.draw(
        found.findings, lambda key, value: labels.get(key, partial(found.study.label, key))(value), "Toys of Memento"
    )


def declared(study: Study[Any], file: str) -> Any:
    """The figure of a study by its name."""
    return next(figure for figure in study.figures if figure.file == file)


def beside_each_other(name: str, runs: Mapping[str, str]) -> tuple[Findings, Labels]:
    """The findings of a name in some runs, with the key `of` for the run, and how keys are written."""
    found = {run: published(run) for run in runs}
    together = Findings(
        replace(finding, keys={**finding.keys, "of": run})
        for run in runs
        for finding in found[run].findings.where(name)
    )
    study = found[next(iter(runs))].study
    return together, lambda key, value: runs[str(value)] if key == "of" else study.label(key, value)


def _counted(findings: Findings, name: str) -> str:
    return f"n = {findings.where(name)[0].value.clusters}"


if __name__ == "__main__":
    main(sys.argv[1:])
