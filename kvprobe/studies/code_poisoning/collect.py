"""First answers, what becomes of them by each way to go on, what each route to a right answer costs, and what can be
seen of a wrong line."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.parts import table_of_parts
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
    coder, numbered = Coder(model, config.new, config.rows), list(enumerate(tasks(config.tasks)))
    groups = [numbered[start : start + config.rows] for start in range(0, len(numbered), config.rows)]

    def parts(name: str, measure: Callable[[Group], list[Row]], doing: str) -> pd.DataFrame:
        def measured(group: Group) -> pd.DataFrame:
            return pd.DataFrame(measure(group))

        return table_of_parts(run, groups, name, measured, doing=doing, unit="group of tasks")

    first = parts("first", lambda group: first_answers(coder, group, config), "Answering")
    of_task = dict(iter(first.groupby("sample")))

    def drafts(group: Group) -> list[tuple[int, Draft]]:
        found: list[tuple[int, Draft]] = []
        for number, task in group:
            rows = of_task[number]
            texts = rows[rows["how"] == DRAWN]["text"].tolist()
            rng = np.random.default_rng([config.seed, number])
            found += [(number, draft) for draft in drafts_of(task, texts, rng)]
        return found

    def fresh(number: int) -> str:
        rows = of_task[number]
        return rows[rows["how"] == LIKELIEST]["text"].tolist()[0]

    others = tasks(config.tasks)
    answers = parts("answers", lambda group: fixes(coder, drafts(group), others, fresh), "Mending")
    seen = parts("suspicions", lambda group: suspected(coder, drafts(group)), "Asking for bugs")
    ways = parts("routes", lambda group: travelled(coder, group, config.rounds), "Taking routes")
    rng = np.random.default_rng([config.seed, config.tasks])
    probes = table_of_parts(run, [0], "probes", lambda _: probed(coder, others, rng), doing="Probing", unit="probe")
    return {"samples": answers, "first": first, "suspicions": seen, "routes": ways, "probes": probes}


LIKELIEST, DRAWN = "likeliest", "drawn"


def first_answers(coder: Coder, group: Group, config: Config) -> list[Row]:
    """The likeliest answer to each task, and some that are drawn by the model's own probabilities."""
    rows: list[Row] = []
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


def fixes(
    coder: Coder,
    drafts: Sequence[tuple[int, Draft]],
    others: Sequence[CodeTask],
    fresh: Callable[[int], str],
) -> list[Row]:
    """What each way to go on makes of each draft.

    Args:
        others: all tasks, of which the one after a draft's is asked for next.
        fresh: the likeliest first answer to a task.
    """
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
        *((number, draft, "fresh", draft.task.whole, fresh(number)) for number, draft in drafts),
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


def suspected(coder: Coder, drafts: Sequence[tuple[int, Draft]]) -> list[Row]:
    """Two rows for each draft."""
    rows = suspicions(coder, [draft for _, draft in drafts])
    return [
        {"sample": number, "template": draft.task.template, **row}
        for (number, draft), place in zip(drafts, range(0, len(rows), 2), strict=True)
        for row in rows[place : place + 2]
    ]


def travelled(coder: Coder, group: Group, rounds: int) -> list[Row]:
    """What each route costs for each task, and whether it ends rightly."""
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
        for route, journeys in routes(coder, [task for _, task in group], rounds).items()
        for (number, task), journey in zip(group, journeys, strict=True)
    ]
