"""What a slip does to the next prediction and to answers, where in the cache it sits, and what takes it back."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch

from kvprobe.attention.patterns import attend
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.fingerprint import digest
from kvprobe.inference.forced import chances, given_answer
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.shared import common_start, read_branches, read_common
from kvprobe.names import full_repr
from kvprobe.patching.metrics import KL, LogitDiff
from kvprobe.policies import RestartInPlace
from kvprobe.studies.poisoning import SUMS, Config
from kvprobe.studies.poisoning.solutions import WorkedProblem, worked_problems
from kvprobe.studies.poisoning.worked_solutions import draw_solution
from kvprobe.tasks.steps import Draft
from kvprobe.tasks.worded_steps import LATER_STEPS, STEP, Wording
from kvprobe.tasks.worked_answers import DRAFTS, HISTORY, WorkedAnswer
from kvprobe.tasks.worked_sums import WorkedSum, draw_sum
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns

ALL = -1
"""Stands for all layers at once."""
BANDS = ("lower", "middle", "upper")
"""Thirds of the layers."""
ROWS = 16
"""Caches that are read on from at once."""
EXAMPLES = 3
"""Worked problems before each, so that answers are short and have the form that is read."""

Row = dict[str, Any]
Problems = Sequence[WorkedProblem]
Way = TypeVar("Way")


def drawn(model: Model, config: Config, number: int, problems: Problems) -> WorkedAnswer:
    """A problem of a run with its slip, by its number."""
    rng = np.random.default_rng([config.seed, number])
    own = np.random.default_rng([config.seed, number, 2]) if config.mistake == "own" else None
    worked: WorkedAnswer = (
        draw_sum(Wording.of(model), rng)
        if config.task == SUMS
        else draw_solution(Turns.of(model), problems[number:], EXAMPLES, own or rng)
    )
    return worked if own is None else worked.own_mistake(partial(chances, model), own)


def inputs(config: Config) -> dict[str, str]:
    """A digest of the problems that are not drawn in words of the models `steps`."""
    return {} if config.task == SUMS else {"task": digest([full_repr(problems_of(config)).encode()])}


def problems_of(config: Config) -> Problems:
    """The worked problems of a run; those after the last one are for examples and earlier exchanges."""
    return () if config.task == SUMS else worked_problems(config.task, config.problems + HISTORY, config.seed)


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows.

    `samples`: the prediction of the value that the last step starts from, by `edit` of the cache and `layer`.
    `attention`: what that prediction attends to of the step that may be wrong. `answers`: by `arm`. `remarks`: how
    probable `wait` is after the slip and after later steps. `histories`: one step after others of which some are wrong.
    """
    parts, cases, problems, unit = Parts(model, config, run), range(config.problems), problems_of(config), "problem"
    tables = {
        "samples": parts.table(edits, cases, "edits", problems, doing="Editing caches", unit=unit),
        "attention": parts.table(attention, cases, "attention", problems, doing="Recording attention", unit=unit),
        "answers": parts.table(answers, cases, "answers", problems, doing="Answering", unit=unit),
        "histories": parts.table(histories, cases, "histories", problems, doing="Reading after errors", unit=unit),
    }
    if has_remarks(model, config):
        tables["remarks"] = parts.table(remarks, cases, "remarks", problems, doing="Reading remarks", unit=unit)
    return tables


def has_remarks(model: Model, config: Config) -> bool:
    return config.task == SUMS and Wording.of(model).words


def edits(model: Model, config: Config, number: int, problems: Problems) -> list[Row]:
    """The margin of the right value over the wrong one (logits), and KL from the sound run (nats), by edit."""
    worked = drawn(model, config, number, problems)
    written, rest = worked.drafts(), worked.rest()
    drafts = read_drafts(model, {draft: written[draft] for draft in DRAFTS})
    ways = list(edited(model, *(model.extend(drafts[draft], [rest.later])[0] for draft in DRAFTS)))
    logits = torch.cat(
        [
            model.extend(KVCache.join([cache for _, _, cache in some]), [rest.lead] * len(some))[1]
            for some in batched(ways)
        ]
    )
    margin, from_sound = LogitDiff(rest.right, rest.wrong), KL().to(logits[0])
    return [
        {
            "edit": edit,
            "layer": layer,
            "margin": float(margin(row)),
            "kl": float(from_sound(row)),
            "right": float(int(row[-1].argmax()) == rest.right),
            "sample": number,
        }
        for (edit, layer, _), row in zip(ways, logits, strict=True)
    ]


def read_drafts(model: Model, drafts: Mapping[Draft, Tokens]) -> dict[Draft, KVCache]:
    """Their caches; what drafts have in common is read once."""
    unread = read_branches(model, list(drafts.values()))
    return {draft: model.extend(past, [left])[0] for draft, (past, left) in zip(drafts, unread, strict=True)}


def edited(model: Model, sound: KVCache, slip: KVCache) -> Iterator[tuple[str, int, KVCache]]:
    """Edits of the two caches by name and layer; the sound one, unedited, is the first."""
    yield "sound", ALL, sound
    yield "slip", ALL, slip
    runs = {"sound": sound, "slip": slip}
    for name, cache in runs.items():
        yield f"masked {name}", ALL, cache.mask(STEP)
    for name, cache in runs.items():
        yield f"restarted {name}", ALL, model.apply(RestartInPlace(STEP), cache)
    yield "slip's step", ALL, sound.patch(slip, STEP)
    yield "sound step", ALL, slip.patch(sound, STEP)
    yield "sound step, K", ALL, slip.patch(sound, STEP, part="K")
    yield "sound step, V", ALL, slip.patch(sound, STEP, part="V")
    layers = range(slip.n_layers)
    for name, band in zip(BANDS, np.array_split(layers, len(BANDS)), strict=True):
        if len(band):
            yield f"sound step, {name} layers", ALL, slip.patch(sound, STEP, layers=band.tolist())
    yield "sound later steps", ALL, slip.patch(sound, LATER_STEPS)
    for layer in layers:
        yield "sound step", layer, slip.patch(sound, STEP, layers=[layer])


def attention(model: Model, config: Config, number: int, problems: Problems) -> list[Row]:
    """How much of its attention the token before the value spends on the step that may be wrong, by layer: the mean
    over heads."""
    worked = drawn(model, config, number, problems)
    rest, rows = worked.rest(), list[Row]()
    for draft, cache in read_drafts(model, worked.drafts()).items():
        pattern = attend(model, rest.later + rest.lead, cache)
        masses = zip(pattern.layers, pattern.mass(STEP).mean((1, 2)).tolist(), strict=True)
        rows += [{"draft": draft, "layer": layer, "mass": mass, "sample": number} for layer, mass in masses]
    return rows


def answers(model: Model, config: Config, number: int, problems: Problems) -> list[Row]:
    """What the model makes of each way to go on."""
    worked = drawn(model, config, number, problems)
    arms = worked.arms()
    past, left = read_common(model, [arm.prompt for arm in arms])
    start = arms[0].prompt[: -len(left[0])]

    def generated(after: KVCache | None, prompts: Sequence[Tokens]) -> tuple[str, ...]:
        return generate(model.lanes, prompts, after, max_new_tokens=config.new).texts

    def answered(prompt: Tokens) -> str:
        begun = len(start) < len(prompt) and common_start([start, prompt]) == len(start)
        return generated(past, [prompt[len(start) :]])[0] if begun else generated(None, [prompt])[0]

    texts = [text for some in batched(left) for text in generated(past, some)]
    rows: list[Row] = [
        {
            "arm": arm.name,
            "draft": arm.draft,
            "delay": arm.delay,
            "main": arm.main,
            **worked.outcome(text),
            "text": text,
            "sample": number,
        }
        for arm, text in zip(arms, texts, strict=True)
    ]
    for draft in DRAFTS:
        rows.append({"arm": "alone", "draft": draft, "main": True, **worked.alone(answered, draft), "sample": number})
    return rows


def remarks(model: Model, config: Config, number: int, problems: Problems) -> list[Row]:
    """The probability of `wait` after the third step and after each later one."""
    worked = drawn(model, config, number, problems)
    assert isinstance(worked, WorkedSum)  # no other has remarks
    (wait,) = worked.wording.ids("wait")
    rows: list[Row] = []
    for draft in DRAFTS:
        read, places = worked.remarked(draft)
        logits = model.extend(None, [read], logits=len(read) - len(worked.asked))[1][0].float()
        chances = logits.softmax(-1)[places, wait].tolist()
        rows += [
            {"draft": draft, "delay": delay, "wait": chance, "sample": number} for delay, chance in enumerate(chances)
        ]
    return rows


def histories(model: Model, config: Config, number: int, problems: Problems) -> Iterator[Row]:
    """Whether the result of a step is the likeliest after others of which some are wrong, and how likely it is."""
    asked = drawn(model, config, number, problems).histories(np.random.default_rng([config.seed, number, 1]))
    read = read_branches(model, [history.prompt for history in asked])
    for history, (past, left) in zip(asked, read, strict=True):
        given = given_answer(model, past, left, history.result)
        measured = {"right": float(given.likeliest), "log_probability": given.log_prob}
        yield {"wrong": history.wrong, **measured, "sample": number}


def batched(ways: Sequence[Way]) -> list[Sequence[Way]]:
    """As many at once as are read together."""
    return [ways[start : start + ROWS] for start in range(0, len(ways), ROWS)]
