"""What studies of damaged caches share: items of tasks are answered under many faults, and held against sound caches.

Answers are kept group by group, of as many items as share a batch, so that an interrupted run resumes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Control, Written
from kvprobe.faults.fault import When
from kvprobe.inference.model import Model
from kvprobe.inference.trials import AskedItem, Case, answer
from kvprobe.models.geometry import Geometry
from kvprobe.report.findings import Findings
from kvprobe.studies.settings import TIMINGS, AnswerSettings, Timing
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import Item, Task, items_digest, prompt, rankable, shown_task, too_hard
from kvprobe.tidy import Rows, Where, chosen
from kvprobe.wording import few_clusters, percent, share

Answering = TypeVar("Answering", bound=AnswerSettings)
WHEN: dict[Timing, tuple[When, bool]] = {"once": (0, False), "fresh": ("every", True), "piling": ("every", False)}
"""Before which token a fault of each timing strikes, and whether it is undone."""
SOUND: Where = {"case": -1}
"""The rows of sound caches."""
NATS = "nats per token"
LABELS = {"task": shown_task, "rate": "{:g} %".format, "timing": TIMINGS}
"""How the keys of these studies are written."""
WRITTEN: dict[str, Written] = {
    **dict.fromkeys(("sound", "accuracy", "same", "published", "published_sound"), percent),
    "chance": share,
}
"""How their numbers are written."""


def tasks_of(config: AnswerSettings) -> list[Task]:
    """The tasks of a config, in its order.

    Raises:
        UserError: an unknown task.
    """
    return [find_task(name) for name in config.tasks]


def inputs(config: AnswerSettings) -> dict[str, str]:
    """A digest of the items.

    Raises:
        UserError: an unknown task, or too few items.
    """
    return {"tasks": items_digest(tasks_of(config), config.samples, config.seed)}


def collect_answers(
    model: Model,
    config: Answering,
    run: Run,
    cases_of: Callable[[Geometry, Answering, AskedItem], Sequence[Case]],
) -> pd.DataFrame:
    """All items of all tasks under all cases of a sample; see `kvprobe.inference.trials.answer` for the columns."""
    groups: list[tuple[Task, int, list[Item]]] = []
    for place, task in enumerate(tasks_of(config)):
        items, first = task.items(config.samples, config.seed), place * config.samples
        starts = range(0, len(items), config.together)
        groups += [(task, first + start, items[start : start + config.together]) for start in starts]
    unit, doing = "prompt" if config.together == 1 else f"{config.together} prompts", "Damaging and answering"
    return Parts(model, config, run).table(answered, groups, "answers", cases_of, doing=doing, unit=unit)


def answered(
    model: Model,
    config: Answering,
    group: tuple[Task, int, list[Item]],
    cases_of: Callable[[Geometry, Answering, AskedItem], Sequence[Case]],
) -> pd.DataFrame:
    """The rows of items of one task, of which the first has this number."""
    task, first, items = group
    prompts = [prompt(item, model.tokenizer) for item in items]
    samples = [AskedItem(task, item, first + place, prompts[place]) for place, item in enumerate(items)]
    asked = [(sample, cases_of(model.geometry, config, sample)) for sample in samples]
    return pd.DataFrame(answer(model, asked, config.seed, follow=config.follow))


def able(rows: Rows, tasks: Sequence[Task], of: str, where: Where = SOUND) -> Rows:
    """For each row, whether the model does its task well enough on sound caches for damage to be visible.

    Args:
        of: the column of right answers.
        where: which rows are those of sound caches.
    """
    sound = chosen(rows, where).groupby("task")[of].mean()
    return rows["task"].map({task.name: rankable(float(sound[task.name]), task.chance) for task in tasks})


def task_facts(table: Rows, task: Task, findings: Findings) -> dict[str, Any]:
    """What a page reports of a task: its scorers, the lengths of its prompts, and whether it is too hard."""
    slots = table[table["task"] == task.name]["slots"]
    return {
        "scorers": list(task.scorers),
        "slots": [int(slots.min()), int(slots.max())],
        "too_hard": too_hard(task.name, findings.at("sound", task=task.name).mean, task.chance),
    }


def as_sound(rows: Rows, allowed: float) -> str:
    """How many answers are those of sound caches, and how far the rows are from these."""
    kl = float(rows["kl"].max())
    largest = "not measured" if np.isnan(kl) else f"at most {kl:.1e} nats"
    answers = f"{int(rows['same'].sum())} of {len(rows)} rows give the sound cache's whole answer"
    return f"{answers}, and KL is {largest} (allowed for rounding: {allowed:g})."


def nothing_struck(rows: Rows, allowed: float, of: str = "") -> Control:
    """Whether rows in which nothing is struck are those of sound caches.

    Args:
        allowed: nats of KL that rounding may cost.
        of: names the rows, in brackets.
    """
    struck = int(rows["struck"].sum())
    unchanged = bool(rows["same"].all()) and (rows["broken"] == "").all() and not rows["kl"].max() > allowed
    seen = f"{struck} vectors were struck, {as_sound(rows, allowed)}"
    return Control(f"Nothing struck, nothing changed{of}: {seen}", bool(struck == 0 and unchanged))


def warnings_of(config: AnswerSettings, tasks: dict[str, Any]) -> Iterator[str]:
    """Warnings of too few items, of tasks that the model cannot do, and of KL that was not measured."""
    yield from few_clusters(config.samples, "items of each task")
    yield from (task["too_hard"] for task in tasks.values() if task["too_hard"])
    if not config.follow:
        yield "KL was not measured in this run (follow is off), so what changes no answer was not seen."


def broken_rows(rows: Rows, *labels: str) -> Iterator[str]:
    """A warning of rows in which numbers were not finite, with these labels of the first of them."""
    broken = rows[rows["broken"] != ""]
    if len(broken):
        first = broken.iloc[0]
        known = ", ".join(f"{name} {first[name]}" for name in ("task", "item", *labels) if pd.notna(first[name]))
        yield (
            f"In {len(broken)} of {len(rows)} rows K, V or the logits were not finite. They count as wrong and are "
            f"left out of KL. The first: {first['broken']} ({known})."
        )
