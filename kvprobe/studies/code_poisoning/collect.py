"""First answers, what becomes of them by each way to go on, what each route to a right answer costs, and what can be
seen of a wrong line."""

from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.fingerprint import digest
from kvprobe.inference.model import Model
from kvprobe.names import full_repr
from kvprobe.studies.code_poisoning import Config
from kvprobe.studies.code_poisoning.answers import Answer, fix_of, judged_all
from kvprobe.studies.code_poisoning.coder import Coder
from kvprobe.studies.code_poisoning.drafts import Draft, drafts_of
from kvprobe.studies.code_poisoning.noticing import probed, suspicions
from kvprobe.studies.code_poisoning.routes import routes
from kvprobe.studies.code_poisoning.tasks import CodeTask, tasks

Row = dict[str, Any]
Group = list[tuple[int, CodeTask]]


def inputs(config: Config) -> dict[str, str]:
    """A digest of the tasks."""
    return {"tasks": digest([full_repr(tasks(config.tasks)).encode()])}


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows.

    `first`: first answers, the likeliest and those drawn. `samples`: what becomes of them, by `draft` and `arm`.
    `suspicions`: whether the model says that there is a bug. `routes`: what each way to a right answer costs.
    `probes`: whether a probe tells a wrong line.
    """
    parts, numbered, unit = Parts(model, config, run), list(enumerate(tasks(config.tasks))), "group of tasks"
    groups = [numbered[start : start + config.rows] for start in range(0, len(numbered), config.rows)]
    first = parts.table(first_answers, groups, "first", doing="Answering", unit=unit)
    return {
        "samples": parts.table(fixes, groups, "answers", first, doing="Mending", unit=unit),
        "first": first,
        "suspicions": parts.table(suspected, groups, "suspicions", first, doing="Asking for bugs", unit=unit),
        "routes": parts.table(travelled, groups, "routes", doing="Taking routes", unit=unit),
        "probes": parts.table(seen, [tasks(config.tasks)], "probes", doing="Probing", unit="probe"),
    }


LIKELIEST, DRAWN = "likeliest", "drawn"


def first_answers(model: Model, config: Config, group: Group) -> list[Row]:
    """The likeliest answer to each task, and some that are drawn by the model's own probabilities."""
    coder, rows = coder_of(model, config), list[Row]()
    likeliest = coder.replies([coder.asked(task.whole, task.whole.question) for _, task in group])
    drawn = [(number, task) for number, task in group for _ in range(config.draws)]
    seed = int(np.random.SeedSequence([config.seed, group[0][0]]).generate_state(1)[0])
    sampled = coder.replies([coder.asked(task.whole, task.whole.question) for _, task in drawn], seed)
    for how, asked, replies in ((LIKELIEST, group, likeliest), (DRAWN, drawn, sampled)):
        answers = judged_all([(task.whole, reply.text) for (_, task), reply in zip(asked, replies, strict=True)])
        for (number, task), reply, answer in zip(asked, replies, answers, strict=True):
            rows.append(
                {
                    "sample": number,
                    "template": task.template,
                    "how": how,
                    "text": reply.text,
                    "right": float(answer.right),
                    "code": float(bool(answer.code)),
                }
            )
    return rows


def coder_of(model: Model, config: Config) -> Coder:
    return Coder(model, config.new, config.rows)


def texts_of(first: pd.DataFrame, number: int, how: str) -> list[str]:
    """The first answers to a task that were found so."""
    return first.loc[(first["sample"] == number) & (first["how"] == how), "text"].tolist()


def numbered_drafts(config: Config, group: Group, first: pd.DataFrame) -> list[tuple[int, Draft]]:
    """The drafts of each task, with its number."""
    return [
        (number, draft)
        for number, task in group
        for draft in drafts_of(task, texts_of(first, number, DRAWN), np.random.default_rng([config.seed, number]))
    ]


def fixes(model: Model, config: Config, group: Group, first: pd.DataFrame) -> list[Row]:
    """What each way to go on makes of each draft; in one, the task after it is asked for next."""
    coder, drafts, others = coder_of(model, config), numbered_drafts(config, group, first), tasks(config.tasks)
    asked = [
        (number, draft, arm, function, prompt)
        for number, draft in drafts
        for arm, function, prompt in draft.arms(coder, others[(number + 1) % len(others)].whole)
    ]
    replies = coder.replies([prompt for *_, prompt in asked])
    made = [
        *(
            (number, draft, arm, function, reply.text)
            for (number, draft, arm, function, _), reply in zip(asked, replies, strict=True)
        ),
        *(
            (number, draft, "fresh", draft.task.whole, texts_of(first, number, LIKELIEST)[0])
            for number, draft in drafts
        ),
    ]
    answers = judged_all([(function, text) for *_, function, text in made])
    return [
        row_of(number, draft, arm, text, answer)
        for (number, draft, arm, _, text), answer in zip(made, answers, strict=True)
    ]


def row_of(number: int, draft: Draft, arm: str, text: str, answer: Answer) -> Row:
    wrong = not draft.answer.right and arm != "next"
    return {
        "sample": number,
        "template": draft.task.template,
        "draft": draft.kind,
        "arm": arm,
        "right": float(answer.right),
        "fix": fix_of(draft.answer, answer) if wrong else "",
        "code": float(bool(answer.code)),
        "first": draft.text,
        "text": text,
    }


def suspected(model: Model, config: Config, group: Group, first: pd.DataFrame) -> list[Row]:
    """Two rows for each draft."""
    drafts = numbered_drafts(config, group, first)
    rows = suspicions(coder_of(model, config), [draft for _, draft in drafts])
    return [
        {"sample": number, "template": draft.task.template, **row}
        for (number, draft), place in zip(drafts, range(0, len(rows), 2), strict=True)
        for row in rows[place : place + 2]
    ]


def travelled(model: Model, config: Config, group: Group) -> list[Row]:
    """What each route costs for each task, and whether it ends rightly."""
    journeyed = routes(coder_of(model, config), [task for _, task in group], config.rounds)
    return [
        {
            "sample": number,
            "template": task.template,
            "route": route,
            "right": float(journey.answer.right),
            "generated": float(journey.generated),
            "tokens": float(journey.read + journey.generated),
            "cache": float(journey.longest * journey.slot_bytes),
            "seconds": journey.seconds,
        }
        for route, journeys in journeyed.items()
        for (number, task), journey in zip(group, journeys, strict=True)
    ]


def seen(model: Model, config: Config, every: list[CodeTask]) -> pd.DataFrame:
    """Whether a probe tells the wrong lines of all tasks."""
    return probed(coder_of(model, config), every, np.random.default_rng([config.seed, config.tasks]))
