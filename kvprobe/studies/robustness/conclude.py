"""From answers to findings: every fault at every rate against the same items on a sound cache."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Difference, Estimand, Mean, Share, Total, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.report.crossing import until_below
from kvprobe.report.document import Passage, chat_record
from kvprobe.report.findings import Findings, Key
from kvprobe.report.published import add_published, published_facts
from kvprobe.stats import DIFFERENCE, FEWEST, POSITIVE
from kvprobe.studies import answers
from kvprobe.studies.answers import NATS
from kvprobe.studies.robustness import Config
from kvprobe.studies.robustness.collect import CONTROL, MAIN, NOT_A_NUMBER, PROCEDURE, cases, reported_beside
from kvprobe.tasks.task import Task
from kvprobe.tidy import Rows, Where, beside, groups

CONTRASTS = (
    ("gaussian", "zeros"),
    ("zeros", "distractor"),
    ("gaussian", "gaussian-channel"),
    ("zeros", "zero-values"),
    ("zero-keys", "zero-values"),
    ("zero-keys", "distractor-keys"),
    ("distractor-keys", "distractor-values"),
    ("distractor", "distractor-matched"),
    ("foreign-block", "distractor"),
)
"""Pairs of faults whose difference says why one of them hurts: what is written, at what scale, to which part and in
whole blocks or not. The first two are claims of canarypwn's article."""
UNCHANGED = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.02}
"""Nats of KL that slots in another order may cost by rounding, by the dtype of the model."""
FEW = 20
"""Items below which little can be distinguished."""

LEVEL = ("task", "fault", "rate")
READING = ("task", "fault", "timing", "drawn")
SOUND: Where = {"case": -1, "headline": True}
STRUCK: Where = {"group": MAIN, "headline": True}
READ: Where = {"group": PROCEDURE, "headline": True}
RANKED: Where = {**STRUCK, "able": True, "control": False}
RANKED_BY_KL: Where = {**STRUCK, "whole": True, "control": False}
LOST: dict[str, Any] = {"of": "lost", "within": DIFFERENCE}
KL: dict[str, Any] = {"of": "kl", "unit": NATS}

ESTIMANDS: tuple[Estimand, ...] = (
    Share(name="sound", of="correct", by=("task",), where=SOUND),
    Share(name="sound_also", of="correct", by=("task", "scorer"), where={"case": -1, "headline": False}),
    Share(name="accuracy", of="correct", by=LEVEL, where=STRUCK),
    Share(name="accuracy_also", of="correct", by=(*LEVEL, "scorer"), where={"group": MAIN, "headline": False}),
    Mean(name="lost", of="lost", by=LEVEL, where=STRUCK, within=DIFFERENCE),
    Mean(name="beyond_half", of="beyond_half", by=LEVEL, where={**STRUCK, "able": True}, within=DIFFERENCE),
    Share(name="same", of="same", by=LEVEL, where=STRUCK),
    Mean(name="kl", by=LEVEL, where=STRUCK, within=POSITIVE, **KL),
    *(Total(name=name, of=name, by=LEVEL, where=STRUCK) for name in ("rows", "broken_rows", "untouched_rows")),
    Mean(name="harm", by=("task", "fault"), where=RANKED, together=(), **LOST),
    Mean(name="harm_kl", by=("task", "fault"), where=RANKED_BY_KL, within=POSITIVE, together=(), **KL),
    Share(name="reading", of="correct", by=READING, where=READ),
    Mean(name="reading_kl", by=READING, where=READ, within=POSITIVE, **KL),
    Mean(name="reading_lost", of="beyond_usual", by=READING, where=READ, within=DIFFERENCE, together=READING[:2]),
)
"""Of a fault at a rate; of a fault, averaged over rates with equal weight; of canarypwn's faults in every reading."""


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    tasks = answers.tasks_of(config)
    rows = prepared(table, tasks)
    findings = measure(rows, (*ESTIMANDS, *contrasts()))
    for task in tasks:
        findings.number("chance", task.chance, task=task.name)
        for name in ("harm", "harm_kl"):
            findings.extend(measure(rows, neighbours(findings, name, task.name)))
    add_cliffs(findings)
    add_divergence(findings, rows)
    published = reported_beside(config, tasks)
    if published is not None:
        add_published(findings, tasks, published, "fault")
    reach = int((table["slots"] + table["task"].map({task.name: task.max_new_tokens for task in tasks})).max())
    facts: dict[str, Any] = {
        "tasks": {
            task.name: {**answers.task_facts(table, task, findings), "unranked_kl": unranked_by_kl(task, findings)}
            for task in tasks
        },
        "faults": fault_facts(config),
        "example": example(table, config, tasks[0]),
        "rate": middle_rate(config),
        "layers": model.geometry.n_layers,
        "dtype": model.dtype,
        "published": None if published is None else published_facts(published, config.model),
    }
    controls = list(controls_of(table, config, model.dtype, reach=reach, window=model.geometry.shortest_window))
    return Conclusion(findings, controls, facts, list(warnings_of(table, config, facts)))


def prepared(table: Rows, tasks: Sequence[Task]) -> Rows:
    """A row for each answer and scorer; a broken row is wrong whatever it said."""
    tables = []
    for task in tasks:
        rows = table[table["task"] == task.name]
        whole = rows[rows["group"] == MAIN].groupby("fault")["broken"].agg(lambda broken: bool((broken == "").all()))
        rows = rows.assign(
            rows=1,
            drawn=rows["unit"],
            broken_rows=rows["broken"] != "",
            untouched_rows=rows["struck"] == 0,
            control=[name in CATALOGUE and CATALOGUE[name].control for name in rows["fault"]],
            whole=rows["fault"].map(whole),
        )
        for scorer in task.scorers:
            correct = rows[f"score_{scorer}"].astype(bool) & ~rows["broken_rows"]
            tables.append(rows.assign(scorer=scorer, headline=scorer == task.scorers[0], correct=correct.astype(float)))
    rows: Rows = pd.concat(tables, ignore_index=True)
    by_item = ("task", "scorer", "sample")
    clean = beside(rows, "correct", {"case": -1}, by_item)
    usual = beside(rows, "correct", {"group": PROCEDURE, "timing": "fresh", "unit": "slot"}, (*by_item, "fault"))
    return rows.assign(
        able=answers.able(rows, tasks, "correct", SOUND),
        lost=clean - rows["correct"],
        beyond_half=rows["correct"] - clean / 2,
        beyond_usual=usual - rows["correct"],
    )


def costs_more(name: str, first: str, second: str, keys: Mapping[str, Key], **only: Key) -> Difference:
    """What the first of two faults costs more than the second, averaged over rates; in KL, if the name says so."""
    ranked, measured = (RANKED_BY_KL, KL) if "_kl" in name else (RANKED, LOST)
    where, less = ({**ranked, **only, "fault": fault} for fault in (first, second))
    return Difference(name=name, by=("task",), where=where, less=less, keys=keys, together=("task",), **measured)


def contrasts() -> list[Estimand]:
    return [
        costs_more(name, first, second, {"first": first, "second": second})
        for name in ("contrast", "contrast_kl")
        for first, second in CONTRASTS
    ]


def neighbours(findings: Findings, name: str, task: str) -> list[Estimand]:
    """By what each fault of a ranking exceeds the next one."""
    ranking = sorted(findings.where(name, task=task), key=lambda finding: -finding.value.mean)
    order = [str(finding.keys["fault"]) for finding in ranking]
    pairs = pairwise(order)
    return [costs_more(f"{name}_over_next", *pair, {"fault": pair[0]}, task=task) for pair in pairs]


def add_cliffs(findings: Findings) -> None:
    """The lowest rate at which accuracy is significantly below half of the sound cache's; unknown where none is."""
    for keys in dict.fromkeys(
        (finding.keys["task"], finding.keys["fault"]) for finding in findings.where("beyond_half")
    ):
        place = dict(zip(("task", "fault"), keys, strict=True))
        _, cliff = until_below(findings.where("beyond_half", **place), "rate")
        findings.number("cliff", cliff, "%", **place)


def add_divergence(findings: Findings, rows: Rows) -> None:
    """Quartiles of the first token that was not the sound cache's one; unknown for never."""
    for keys, struck in groups(rows, LEVEL, STRUCK):
        steps = struck["diverged"].astype(float)
        quartiles = np.quantile(steps.where(steps >= 0, np.inf), [0.25, 0.5, 0.75], method="inverted_cdf")
        for name, step in zip(("low", "median", "high"), quartiles.tolist(), strict=True):
            findings.number("diverged", step if np.isfinite(step) else None, "tokens", quartile=name, **keys)


def unranked_by_kl(task: Task, findings: Findings) -> list[Key]:
    """The faults that are no controls and have no KL."""
    return [
        name
        for name in findings.values("lost", "fault", task=task.name)
        if not CATALOGUE[str(name)].control and findings.get("harm_kl", task=task.name, fault=name) is None
    ]


def fault_facts(config: Config) -> dict[str, dict[str, str]]:
    """Of each fault: what a struck slot holds, what is drawn at once, and the operator at its first rate."""
    first = {str(case.labels["fault"]): case for case in reversed(cases(config))}
    return {
        name: {
            "content": CATALOGUE[name].content,
            "drawn": "blocks of 16" if CATALOGUE[name].paged else CATALOGUE[name].unit(config.unit),
            "operator": f"{first[name].trial.fault} at {float(first[name].labels['rate']):g} %",
        }
        for name in config.faults
    }


def example(table: Rows, config: Config, task: Task) -> dict[str, Any]:
    """The answers to the first item that a sound cache gets right (or to the first at all), sound and at the middle
    rate."""
    mine = table[table["task"] == task.name]
    sound = mine[mine["case"] == -1]
    shown = sound[sound["right"].astype(bool)] if sound["right"].any() else sound
    first = mine[mine["sample"] == shown["sample"].min()]
    main = first[(first["group"] == MAIN) & (first["rate"] == middle_rate(config)) & (first["repeat"] == 0)]
    place = int(first["sample"].iloc[0] - mine["sample"].min())
    item = task.items(place + 1, config.seed)[-1]
    lead = [vars(Passage("generation", "assistant", f"{item.lead} …"))] if item.lead else []
    return {
        "chat": chat_record(item.chat, marked=item.answer) + lead,
        "answer": str(first["answer"].iloc[0]),
        "sound": str(first[first["case"] == -1]["text"].iloc[0]),
        "damaged": {str(name): str(text) for name, text in zip(main["fault"], main["text"], strict=True)},
    }


def middle_rate(config: Config) -> float:
    """The rate at which tables that show one of them stand."""
    return config.rates[(len(config.rates) - 1) // 2]


def controls_of(table: Rows, config: Config, dtype: str, *, reach: int, window: int | None) -> Iterator[Control]:
    """Whether nothing did nothing, a NaN was found, and slots in another order made no difference."""
    allowed = UNCHANGED[dtype]

    def within(rows: Rows) -> bool:
        """Whether every row was measured and is as near as allowed; without KL there is nothing to exceed it."""
        return not config.follow or bool((rows["kl"] <= allowed).all())

    checks = table[table["group"] == CONTROL]
    nothing, nan = checks[checks["rate"] == 0], checks[checks["fault"] == NOT_A_NUMBER]
    yield answers.nothing_struck(nothing, allowed)
    reported = int((nan["broken"] != "").sum())
    yield Control(f"One slot of NaN was reported as broken in {reported} of {len(nan)} rows.", reported == len(nan))
    for name in config.faults:
        if CATALOGUE[name].control:
            rows = table[(table["group"] == MAIN) & (table["fault"] == name)]
            seen = f"{CATALOGUE[name].label}, slots in another order: {answers.as_sound(rows, allowed)}"
            if window is None or reach <= window:
                yield Control(seen, within(rows) and (config.follow or bool(rows["same"].all())))
            else:
                hidden = f"Prompts and answers reach {reach} positions and the shortest sliding window is {window}"
                yield Control(f"{seen} {hidden}, so the order decides what is visible.", None)


def warnings_of(table: Rows, config: Config, facts: dict[str, Any]) -> Iterator[str]:
    yield from answers.warnings_of(config, facts["tasks"])
    if FEWEST <= config.samples < FEW:
        yield f"{config.samples} items of each task show only large differences. Run with more samples."
    yield from answers.broken_rows(table[table["fault"] != NOT_A_NUMBER], "fault", "rate")
