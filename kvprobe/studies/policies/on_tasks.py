"""The policies study on tasks of one's own: how many answers stay right under each policy, and what memory it saves.

An item's prompt is read and answered with the full cache, then under each policy as it would be deployed: it acts after
the prompt, the question in view, and as often as it says while the answer is written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from kvprobe.cache.footprint import footprint
from kvprobe.experiments.estimands import Estimand, Mean, Share, measure
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Claim, Conclusion, Control, Study
from kvprobe.fingerprint import digest
from kvprobe.inference.generate import generate, stop_tokens
from kvprobe.inference.model import Model
from kvprobe.inference.trials import newlines
from kvprobe.policies import Policy, SlidingWindow
from kvprobe.policies.written import policies_of
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.policies import Config
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import Item, Task, items_digest, prompt, rankable, shown_task
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters, percent, points, share

FULL, IDLE = "full", "keeps all"
DRAWN = 48
"""Items of a task that has any number of them."""
NUMBER_BYTES = 2
"""Memory is that of a 16-bit cache, which is what engines hold, whatever the dtype here."""


def inputs(config: Config) -> dict[str, str]:
    """A digest of the items, where there are tasks.

    Raises:
        UserError: an unknown task, a malformed file, or fewer items than asked for.
    """
    items = (items_digest([task], count, config.seed).encode() for task, count in tasks_of(config))
    return {"tasks": digest(list(items))} if config.tasks else {}


def tasks_of(config: Config) -> list[tuple[Task, int]]:
    """Each task, and how many of its items are asked."""
    tasks = [find_task(name) for name in config.tasks]
    return [(task, config.items or int(getattr(task, "available", DRAWN))) for task in tasks]


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """One row per item and policy, the full cache first.

    Columns: `right` (by the task's first scorer), `same` (the full cache's reply, word for word), `memory` (as a share
    of what the full cache takes, over the reply) and `text`.
    """
    asked = [(task, item) for task, count in tasks_of(config) for item in task.items(count, config.seed)]
    cases = [(number, *case) for number, case in enumerate(asked)]
    return Parts(model, config, run).table(measure_item, cases, "answers", doing="Answering", unit="item")


def measure_item(model: Model, config: Config, case: tuple[int, Task, Item]) -> Iterator[dict[str, Any]]:
    """The rows of one item."""
    number, task, item = case
    policies = policies_of(config.policies)
    idle = {} if number else {IDLE: SlidingWindow(10**6)}  # once is enough for a control
    rows = [_answer(model, task, item, policy) for policy in (None, *policies.values(), *idle.values())]
    known = {"task": task.name, "sample": number, "item": item.id, "answer": item.answer}
    for name, row in zip((FULL, *policies, *idle), rows, strict=True):
        yield {**known, "policy": name, **row, "same": row["text"] == rows[0]["text"]}


def _answer(model: Model, task: Task, item: Item, policy: Policy | None) -> dict[str, Any]:
    tokens = prompt(item, model.tokenizer)
    stop = [*stop_tokens(model.lanes), *(newlines(model.tokenizer) if task.one_line else ())]
    reply = generate(model.lanes, [tokens], max_new_tokens=task.max_new_tokens, stop=stop, policy=policy)
    shape = reply.cache.shape
    slot = model.geometry.numbers * NUMBER_BYTES
    held = sum(footprint(kept.ledger, shape, NUMBER_BYTES) for kept in reply.trace)
    whole = sum((len(tokens) + kept.step) * slot for kept in reply.trace)
    right = task.score(reply.text, item)[task.scorers[0]]
    return {
        "slots": len(tokens),
        "right": float(right),
        "memory": held / whole if reply.trace else 1.0,
        "text": reply.text,
    }


ESTIMANDS: tuple[Estimand, ...] = (
    Share(name="accuracy", of="right", by=("task", "policy")),
    Share(name="same", of="same", by=("task", "policy")),
    Mean(name="memory", of="memory", by=("task", "policy"), within=SHARE),
)


def conclude(rows: Rows, config: Config, model: Model) -> Conclusion:
    """Each policy against the full cache on the same items."""
    return concluded(rows, config)


def concluded(table: Rows, config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    rows = table[table["policy"] != IDLE].astype({"same": float})
    beyond = rows.assign(change=rows["right"] - beside(rows, "right", {"policy": FULL}, ("sample",)))
    change = Mean(name="change", of="change", by=("task", "policy"), within=DIFFERENCE, together=())
    findings = measure(rows, ESTIMANDS, (beyond[beyond["policy"] != FULL], [change]))
    tasks, few, warnings = {}, list[str](), list[str]()
    for task, count in tasks_of(config):
        whole = findings.at("accuracy", task=task.name, policy=FULL)
        findings.number("chance", task.chance, task=task.name)
        tasks[task.name] = {"items": count, "scorer": task.scorers[0]}
        few += few_clusters(count, f"items of {shown_task(task.name)}")
        if not rankable(whole.mean, task.chance):
            warnings.append(
                f"With the full cache the model is right in {whole.mean:.0%} of the items of {shown_task(task.name)} "
                f"(chance: {task.chance:.0%}), so what policies cost there cannot be judged; give it easier items."
            )
    if len(few) < len(tasks):  # the answer says it where all are too few
        warnings = few + warnings
    idle = table[table["policy"] == IDLE]
    control = Control(
        f"A window that keeps everything gives the full cache's reply in {int(idle['same'].sum())} of {len(idle)} "
        f"items, with {float(idle['memory'].min()):.0%} of its memory.",
        bool(idle["same"].all() and (idle["memory"] == 1).all()),
    )
    return Conclusion(findings, [control], {"tasks": tasks, "full": FULL}, warnings)


ON_TASKS = Study(
    name="policies",
    title="Cache policies on tasks",
    question="How many answers of these tasks stay right under each cache policy, and what memory does it save?",
    config=Config,
    collect=collect,
    conclude=conclude,
    folder=Path(__file__).parent / "tasks",
    claims=(
        Claim("change", above="more right answers", below="fewer right answers", unclear="no difference detected"),
    ),
    labels={"task": shown_task, "policy": {FULL: "full cache"}},
    written={**dict.fromkeys(("accuracy", "same", "memory"), percent), "change": points, "chance": share},
    inputs=inputs,
)
