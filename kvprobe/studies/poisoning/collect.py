"""What a slip does to the next prediction and to answers, where in the cache it sits, and what takes it back."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from kvprobe.attention.patterns import attend
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.fingerprint import digest
from kvprobe.inference.model import Model
from kvprobe.names import full_repr
from kvprobe.patching.metrics import KL, LogitDiff
from kvprobe.policies import RestartInPlace
from kvprobe.studies.poisoning import SUMS, Config
from kvprobe.studies.poisoning.cases import DRAFTS, HISTORY, Case, History
from kvprobe.studies.poisoning.stories import draw_story
from kvprobe.studies.poisoning.sums import Sum, draw_sum
from kvprobe.tasks.solutions import WorkedProblem, worked_problems
from kvprobe.tasks.worded_steps import LATER_STEPS, STEP, Wording
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns

ALL = -1
"""Stands for all layers at once."""
BANDS = ("lower", "middle", "upper")
"""Thirds of the layers."""
ROWS = 12
"""Caches that are read on from at once."""
EXAMPLES = 3
"""Worked problems before each, so that answers are short and have the form that is read."""


def cases_of(model: Model, config: Config) -> Callable[[int], Case]:
    """Each problem of a run with its slip, by its number."""
    problems = () if config.task == SUMS else problems_of(config)

    def case(number: int) -> Case:
        rng = np.random.default_rng([config.seed, number])
        own = np.random.default_rng([config.seed, number, 2]) if config.mistake == "own" else None
        if config.task == SUMS:
            return draw_sum(model, rng, own)
        return draw_story(Turns.of(model), problems[number:], EXAMPLES, own or rng, model if own else None)

    return case


def inputs(config: Config) -> dict[str, str]:
    """A digest of the problems that are not drawn in words of the models `steps`."""
    return {} if config.task == SUMS else {"task": digest([full_repr(problems_of(config)).encode()])}


def problems_of(config: Config) -> Sequence[WorkedProblem]:
    """The worked problems of a run; those after the last one are for examples and earlier exchanges."""
    return worked_problems(config.task, config.problems + HISTORY, config.seed)


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows.

    `samples`: the prediction of the value that the last step starts from, by `edit` of the cache and `layer`.
    `attention`: what that prediction attends to of the step that may be wrong. `answers`: by `arm`. `remarks`: how
    probable `wait` is after the slip and after later steps. `histories`: one step after others of which some are wrong.
    """

    case_of = cases_of(model, config)

    def parts(name: str, measure: Callable[[Case, int], pd.DataFrame], doing: str) -> pd.DataFrame:
        def measured(number: int) -> pd.DataFrame:
            return measure(case_of(number), number).assign(case=number)

        return table_of_parts(run, range(config.problems), name, measured, doing=doing, unit="problem")

    def after_errors(case: Case, number: int) -> pd.DataFrame:
        return results(model, case.histories(np.random.default_rng([config.seed, number, 1])))

    tables = {
        "samples": parts("edits", lambda case, _: edits(model, case), "Editing caches"),
        "attention": parts("attention", lambda case, _: attention(model, case), "Recording attention"),
        "answers": parts("answers", lambda case, _: answers(model, case, config.new), "Answering"),
        "histories": parts("histories", after_errors, "Reading after errors"),
    }
    if has_remarks(model, config):
        tables["remarks"] = parts("remarks", lambda case, _: remarks(model, case), "Reading remarks")
    return tables


def has_remarks(model: Model, config: Config) -> bool:
    return config.task == SUMS and Wording.of(model).words


# ---- the next prediction, and what in the cache decides it


def edits(model: Model, case: Case) -> pd.DataFrame:
    """The margin of the right value over the wrong one (logits), and KL from the sound run (nats), by edit."""
    drafts, rest = case.drafts(), case.rest()
    caches = {draft: model.prefill(drafts[draft] + rest.later) for draft in DRAFTS}
    ways = list(edited(model, caches["sound"], caches["slip"]))
    clean, margin = None, LogitDiff(rest.right, rest.wrong)
    rows = []
    for start in range(0, len(ways), ROWS):
        some = ways[start : start + ROWS]
        _, logits = model.extend(KVCache.join([cache for _, _, cache in some]), [rest.lead] * len(some))
        clean = logits[0] if clean is None else clean
        for (edit, layer, _), row in zip(some, logits, strict=True):
            measured = {"margin": float(margin(row)), "kl": float(KL().to(clean)(row))}
            rows.append({"edit": edit, "layer": layer, **measured, "right": float(int(row[-1].argmax()) == rest.right)})
    return pd.DataFrame(rows)


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


def attention(model: Model, case: Case) -> pd.DataFrame:
    """How much of its attention the token before the value spends on the step that may be wrong, by layer: the mean
    over heads."""
    rest, rows = case.rest(), []
    for draft, tokens in case.drafts().items():
        pattern = attend(model, rest.later + rest.lead, model.prefill(tokens))
        for layer, mass in zip(pattern.layers, pattern.mass(STEP).mean((1, 2)).tolist(), strict=True):
            rows.append({"draft": draft, "layer": layer, "mass": mass})
    return pd.DataFrame(rows)


# ---- answers


def answers(model: Model, case: Case, new: int) -> pd.DataFrame:
    """What the model makes of each way to go on."""
    ways = case.arms()
    texts: list[str] = []
    for start in range(0, len(ways), ROWS):
        some = ways[start : start + ROWS]
        texts += model.generate([arm.prompt for arm in some], max_new_tokens=new).texts
    rows = [
        {"arm": arm.name, "draft": arm.draft, "delay": arm.delay, "main": arm.main, **case.outcome(text), "text": text}
        for arm, text in zip(ways, texts, strict=True)
    ]
    alone = [{"arm": "alone", "draft": draft, "main": True, **case.alone(model, draft, new)} for draft in DRAFTS]
    return pd.DataFrame(rows + alone)


# ---- noticing, and errors that have nothing to do with what is asked


def remarks(model: Model, case: Case) -> pd.DataFrame:
    assert isinstance(case, Sum)  # no other has them
    return case.remarks(model)


def results(model: Model, histories: Sequence[History]) -> pd.DataFrame:
    """Whether the result of the last step is the likeliest after each history, token by token, and how likely it is."""
    rows = []
    for history in histories:
        read = history.prompt + Tokens.of(history.result[:-1], "answer", history.prompt.following)
        logits = model.extend(None, [read], logits=len(history.result))[1][0].float()
        wanted = torch.tensor(history.result, device=logits.device)
        right = float(bool((logits.argmax(-1) == wanted).all()))
        log_probability = float(torch.log_softmax(logits, -1).gather(-1, wanted[:, None]).sum())
        rows.append({"wrong": history.wrong, "right": right, "log_probability": log_probability})
    return pd.DataFrame(rows)
