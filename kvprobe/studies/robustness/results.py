"""The sections of the robustness report that hold its results; every verdict is decided by the numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reported import Reported
from kvprobe.experiments.trial_settings import TIMINGS
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.report.document import Figure, Section, Table
from kvprobe.stats import wilson
from kvprobe.studies.robustness.analyse import CONTRASTS
from kvprobe.studies.robustness.collect import same_task
from kvprobe.studies.robustness.config import Config
from kvprobe.studies.robustness.figures import loss_maps, shown_task
from kvprobe.wording import estimate_of, percent, points, signed, span, verdict

UNITS = {
    "slot": "slots, the same ones in all layers and heads",
    "layer": "slots, in each layer its own",
    "head": "slots, in each layer and KV head its own",
    "number": "single numbers of K and of V, in each layer its own",
}


def accuracy_section(metrics: Mapping[str, Any], config: Config) -> Section:
    tables = [
        _by_rate(
            metrics,
            name,
            lambda level, scorer=scorer: percent(estimate_of(level["accuracy"][scorer])),
            f"{shown_task(name)}: right answers ({scorer}). Sound cache {percent(estimate_of(task['clean'][scorer]))}, "
            f"chance {shown_chance(task['chance'])}."
            + ("" if task["rankable"] else " The model cannot do this task; it says nothing of damage."),
        )
        for name, task in metrics["tasks"].items()
        for scorer in task["scorers"]
    ]
    return Section(
        title="Accuracy",
        paragraphs=[],
        figures=[
            Figure(
                "accuracy_by_rate",
                "Right answers with Wilson intervals. Grey band and dashed line: sound cache; dotted: chance. Points "
                "of one rate are drawn side by side. Controls are not drawn."
                + (" Hollow: published, with the intervals of their sample size." if config.reported else ""),
            )
        ],
        maps=loss_maps(metrics),
        tables=tables,
    )


def ranking_section(metrics: Mapping[str, Any], config: Config) -> Section:
    tables = []
    for name, task in metrics["tasks"].items():
        for measure, key in (("accuracy lost", "ranking"), ("KL", "ranking_kl")):
            if task[key]:
                tables.append(_ranking_table(metrics, name, measure, key))
    contrasts = [
        [shown_task(name), CONTRASTS[each["faults"][0], each["faults"][1]], *_contrast_cells(each)]
        for name, task in metrics["tasks"].items()
        for each in task["contrasts"]
    ]
    if contrasts:
        tables.append(
            Table(
                columns=["task", "contrast", "the first costs more accuracy by", "and more KL by (nats)", "verdict"],
                rows=contrasts,
                caption="The same items, rates and draws; averaged over rates. The verdict is on accuracy, or on KL "
                "where faults are not ranked by accuracy.",
            )
        )
    excluded = [
        f"{shown_task(name)}: {listed_labels([CATALOGUE[each].label for each in task['unranked_kl']])}"
        for name, task in metrics["tasks"].items()
        if task["unranked_kl"] and config.follow
    ]
    return Section(
        title="Which faults are worst",
        paragraphs=[
            "Faults are ranked by the accuracy that they cost, and by KL, averaged over rates with equal weight, so a "
            "ranking depends on which rates were chosen. Neighbours differ significantly where the whole interval of "
            "their difference is above zero. Intervals of what faults cost hold together over all faults and tasks, "
            "those of neighbours over a ranking, and those of contrasts over the contrasts of a task (Bonferroni). A "
            "cliff is the lowest measured rate at which accuracy is significantly below half of that with a sound "
            "cache (the interval of the difference, paired, lies below zero).",
            *(task["too_hard"] for task in metrics["tasks"].values() if task["too_hard"]),
        ],
        tables=tables,
        points=[f"Not ranked by KL, because rows broke and have none: {each}." for each in excluded],
    )


def distance_section(metrics: Mapping[str, Any], config: Config) -> Section:
    rate = next(iter(metrics["tasks"].values()))["examples"]["rate"]
    tables = []
    for name, task in metrics["tasks"].items():
        if config.follow:
            caption = f"{shown_task(name)}: KL from the sound cache, nats per token of its answer."
            tables.append(_by_rate(metrics, name, lambda level: shown_kl(level["kl"]), caption))
        rows = [_level_row(level) for level in task["levels"] if level["rate"] == rate]
        tables.append(
            Table(
                columns=[
                    "fault",
                    "whole answer unchanged",
                    "first token that differs",
                    "accuracy lost",
                    "broken",
                    "untouched",
                ],
                rows=rows,
                caption=f"{shown_task(name)} at {rate:g} %. First token that differs: median and quartiles, counted "
                "from 0. Broken: rows with a number that was not finite. Untouched: rows in which the draws struck "
                "nothing.",
            )
        )
    return Section(
        title="Distance from the sound cache",
        paragraphs=[
            "An answer can be right and yet be another one; KL sees damage long before an answer changes. For KL, "
            "every row reads the sound cache's answer, so all are measured on the same tokens."
            if config.follow
            else "An answer can be right and yet be another one. KL was not measured in this run.",
        ],
        figures=[Figure("kl_by_rate", "KL with intervals over items, on log scales. Controls are not drawn.")]
        if config.follow
        else [],
        tables=tables,
    )


def beside_section(metrics: Mapping[str, Any], config: Config, table: Reported, model: str) -> Section:
    """What was published and what was measured, rate by rate."""
    tables = []
    for name, task in metrics["tasks"].items():
        if not same_task(name, table):
            continue
        rows = [["sound cache", "0 %", *_beside_cells(table.clean, table.samples, task["clean"])]]
        for level in task["levels"]:
            share = table.accuracy(level["fault"], level["rate"])
            if share is not None:
                cells = _beside_cells(share, table.samples, level["accuracy"])
                rows.append([CATALOGUE[level["fault"]].label, f"{level['rate']:g} %", *cells])
        tables.append(
            Table(
                columns=[
                    "fault",
                    "struck",
                    "canarypwn",
                    *(f"measured ({each})" for each in task["scorers"]),
                    "intervals",
                ],
                rows=rows,
                caption=f"{table.source}: {table.model}, {table.samples} items. Measured: {model}, {metrics['items']} "
                "items. “Apart” means that the two intervals (the article's, and the measured one of "
                f"{task['scorers'][0]}) do not overlap.",
            )
        )
    return Section(
        title="Beside the article's numbers",
        paragraphs=[
            f"The article's table, with Wilson intervals for its {table.samples} items, beside what was measured here."
            + (
                ""
                if model.lower().endswith(table.model.lower())
                else f" The model is another one: {model}, not {table.model}."
            )
        ],
        tables=tables,
        points=[
            "The article does not say whether an entry of the cache is a slot, a slot of one layer or a number, nor "
            f"whether damage is redrawn for each token, or stays. Here: {UNITS[config.unit]}; "
            f"{TIMINGS[config.timing]}.",
            "Nor does it give its prompt, or how it found the answer in what the model wrote; measured columns follow "
            "lm-evaluation-harness.",
            "Its distractor is an unrelated prompt that it does not print; here it is small talk, drawn for each item.",
        ],
    )


def procedure_section(metrics: Mapping[str, Any], config: Config) -> Section:
    tables, found = [], []
    for name, task in metrics["tasks"].items():
        cells = {(each["fault"], each["timing"], each["unit"]): each for each in task["procedure"]}
        units = list(dict.fromkeys(unit for _, _, unit in cells))
        rows = [
            [CATALOGUE[fault].label, timing, *(_procedure_cell(cells[fault, timing, unit]) for unit in units)]
            for fault in REPORTED_FAULTS
            for timing in TIMINGS
        ]
        tables.append(
            Table(
                columns=["fault", "timing", *(f"by {unit}" for unit in units)],
                rows=rows,
                caption=f"{shown_task(name)}: right answers, and KL in nats, at {config.procedure:g} %.",
            )
        )
        if task["rankable"]:
            found += [_procedure_point(name, fault, cells) for fault in REPORTED_FAULTS]
    return Section(
        title="What the article leaves open",
        paragraphs=[
            "Canarypwn's article replaces a share of the cache's entries “during autoregressive decoding”. It does not "
            "say what an entry is, nor whether damage is redrawn or stays. Here are its three faults at one rate, "
            "every way: "
            + "; ".join(f"{name}, {text}" for name, text in TIMINGS.items())
            + ". By slot: "
            + f"{UNITS['slot']}; by layer: {UNITS['layer']}; by number: {UNITS['number']}.",
        ],
        tables=tables,
        points=found,
    )


def listed_labels(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shown_kl(value: Mapping[str, float] | None) -> str:
    """KL spans many orders of magnitude: two digits of it, whatever its size."""
    if value is None:
        return "–"
    known = estimate_of(value)
    return f"{known.mean:.2g} ({span(known, lambda number: f'{number:.2g}')})"


def shown_chance(chance: float) -> str:
    return f"{100 * chance:.3g} %"


def _by_rate(metrics: Mapping[str, Any], name: str, cell: Any, caption: str) -> Table:
    levels = {(each["fault"], each["rate"]): each for each in metrics["tasks"][name]["levels"]}
    return Table(
        columns=["fault", *(f"{rate:g} %" for rate in metrics["rates"])],
        rows=[
            [CATALOGUE[fault].label, *(cell(levels[fault, rate]) for rate in metrics["rates"])]
            for fault in metrics["faults"]
        ],
        caption=caption,
    )


def _ranking_table(metrics: Mapping[str, Any], name: str, measure: str, key: str) -> Table:
    task = metrics["tasks"][name]
    by_accuracy = key == "ranking"
    rows = []
    for place, each in enumerate(task[key], start=1):
        harm, fault = estimate_of(each["harm"]), each["fault"]
        over = each["over_next"] and estimate_of(each["over_next"])
        apart = "–" if over is None else verdict(over, "yes", "yes", "not detected")
        cliff = task["cliffs"][fault] if by_accuracy else None
        rows.append(
            [
                str(place),
                CATALOGUE[fault].label,
                points(harm) if by_accuracy else shown_kl(each["harm"]),
                apart,
                *([f"{cliff:g} %" if cliff else f"none up to {metrics['rates'][-1]:g} %"] if by_accuracy else []),
            ]
        )
    unit = "accuracy lost" if by_accuracy else "KL (nats)"
    return Table(
        columns=["", "fault", unit, "worse than the next", *(["cliff"] if by_accuracy else [])],
        rows=rows,
        caption=f"{shown_task(name)}, by {measure}, averaged over rates.",
    )


def _contrast_cells(contrast: Mapping[str, Any]) -> list[str]:
    lost, kl = (contrast[key] and estimate_of(contrast[key]) for key in ("lost", "kl"))
    decisive = lost or kl
    assert decisive is not None
    return [
        points(lost) if lost else "–",
        signed(kl, 2) if kl else "–",
        verdict(decisive, "the first is worse", "the second is worse", "a difference was not found"),
    ]


def _level_row(level: Mapping[str, Any]) -> list[str]:
    steps = {key: "never" if step is None else f"{step:g}" for key, step in level["diverged"].items()}
    lost = estimate_of(next(iter(level["lost"].values())))
    return [
        CATALOGUE[level["fault"]].label,
        percent(estimate_of(level["same"])),
        f"{steps['median']} ({steps['low']} to {steps['high']})",
        points(lost),
        f"{level['broken']} of {level['rows']}",
        f"{level['untouched']} of {level['rows']}",
    ]


def _beside_cells(share: float, samples: int, measured: Mapping[str, Mapping[str, float]]) -> list[str]:
    theirs = wilson(share * samples, samples)
    own = [estimate_of(each) for each in measured.values()]
    apart = own[0].above(theirs.high) or own[0].below(theirs.low)
    return [percent(theirs), *(percent(each) for each in own), "apart" if apart else "overlap"]


def _procedure_cell(each: Mapping[str, Any]) -> str:
    right = percent(estimate_of(next(iter(each["accuracy"].values()))))
    return right if each["kl"] is None else f"{right}; {each['kl']['mean']:.2g}"


def _procedure_point(name: str, fault: str, cells: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> str:
    """Which readings of the article's procedure differ significantly from fresh damage to whole slots."""
    differing = [
        f"{timing} by {unit} ({points(beyond)} lost)"
        for (each, timing, unit), cell in cells.items()
        if each == fault and verdict(beyond := estimate_of(cell["beyond"]), "x", "x", "") == "x"
    ]
    label = f"{shown_task(name)}, {CATALOGUE[fault].label}"
    if not differing:
        return f"{label}: no reading was found to differ in accuracy from fresh damage by slot."
    return (
        f"{label}: of {len(REPORTED_FAULTS) * len(TIMINGS) - 1} readings these differ from fresh damage by slot: "
        f"{', '.join(differing)}."
    )
