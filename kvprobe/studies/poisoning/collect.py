"""What a slip does to the next prediction and to answers, where in the cache it sits, and what takes it back."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from kvprobe.attention.patterns import attend
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.patching.metrics import KL, LogitDiff
from kvprobe.policies import RestartInPlace
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.cases import (
    DRAFTS,
    History,
    arms,
    histories,
    single,
    slips,
    stated,
    wording_of,
)
from kvprobe.tasks.steps import LATER, REGISTERS, SLIPPED, Draft, Slip
from kvprobe.tasks.worded_steps import LATER_STEPS, STEP, Wording
from kvprobe.text.tokens import Tokens

ALL = -1
"""Stands for all layers at once."""
BANDS = ("lower", "middle", "upper")
"""Thirds of the layers."""
ROWS = 12
"""Caches that are read on from at once."""
Case = tuple[int, Slip]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows.

    `samples`: the prediction of the value that the last step starts from, by `edit` of the cache and `layer`.
    `attention`: what that prediction attends to of the step that may be wrong. `answers`: by `arm`. `verdicts`: how
    probable `wait` is after the slip and after later steps. `histories`: one step after others of which some are wrong.
    """
    cases = list(enumerate(slips(model, config)))

    def parts(name: str, measure: Callable[[Slip], pd.DataFrame], doing: str) -> pd.DataFrame:
        def measured(case: Case) -> pd.DataFrame:
            return measure(case[1]).assign(case=case[0])

        return table_of_parts(run, cases, name, measured, doing=doing, unit="problem")

    def after_errors(case: Case) -> pd.DataFrame:
        rng = np.random.default_rng([config.seed, case[0], 1])
        wraps = wording_of(model).words
        return results(model, histories(rng, wraps)).assign(case=case[0])

    tables = {
        "samples": parts("edits", lambda slip: edits(model, slip), "Editing caches"),
        "attention": parts("attention", lambda slip: attention(model, slip), "Recording attention"),
        "answers": parts("answers", lambda slip: answers(model, slip, config.new), "Answering"),
        "histories": table_of_parts(
            run, cases, "histories", after_errors, doing="Reading after errors", unit="problem"
        ),
    }
    if wording_of(model).words:
        tables["verdicts"] = parts("verdicts", lambda slip: verdicts(model, slip), "Reading verdicts")
    return tables


# ---- the next prediction, and what in the cache decides it


def edits(model: Model, slip: Slip) -> pd.DataFrame:
    """The margin of the right value over the wrong one (logits), and KL from the sound run (nats), by edit."""
    wording = wording_of(model)
    drafts = wording.drafts(slip)
    suffix, right, wrong = wording.suffix(slip, drafts["sound"])
    caches = {draft: model.prefill(drafts[draft] + later_of(wording, slip, suffix)) for draft in DRAFTS}
    lead = suffix[len(later_of(wording, slip, suffix)) :]
    ways = list(edited(model, caches["sound"], caches["slip"]))
    clean, margin = None, LogitDiff(right, wrong)
    rows = []
    for start in range(0, len(ways), ROWS):
        some = ways[start : start + ROWS]
        _, logits = model.extend(KVCache.join([cache for _, _, cache in some]), [lead] * len(some))
        clean = logits[0] if clean is None else clean
        for (edit, layer, _), row in zip(some, logits, strict=True):
            measured = {"margin": float(margin(row)), "kl": float(KL().to(clean)(row))}
            rows.append({"edit": edit, "layer": layer, **measured, "right": float(int(row[-1].argmax()) == right)})
    return pd.DataFrame(rows)


def later_of(wording: Wording, slip: Slip, suffix: Tokens) -> Tokens:
    """The later steps of a suffix, without the beginning of the last one."""
    return suffix[: len(wording.ids(wording.steps(slip.later)))]


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


def attention(model: Model, slip: Slip) -> pd.DataFrame:
    """How much of its attention the token before the value spends on the step that may be wrong, by layer: the mean
    over heads."""
    wording = wording_of(model)
    drafts, rows = wording.drafts(slip), []
    suffix, _, _ = wording.suffix(slip, drafts["sound"])
    for draft, tokens in drafts.items():
        pattern = attend(model, suffix, model.prefill(tokens))
        for layer, mass in zip(pattern.layers, pattern.mass(STEP).mean((1, 2)).tolist(), strict=True):
            rows.append({"draft": draft, "layer": layer, "mass": mass})
    return pd.DataFrame(rows)


# ---- answers


def answers(model: Model, slip: Slip, new: int) -> pd.DataFrame:
    """What the model makes of each way to go on; see `outcome`."""
    wording = wording_of(model)
    ways = arms(wording, slip)
    texts: list[str] = []
    for start in range(0, len(ways), ROWS):
        some = ways[start : start + ROWS]
        texts += model.generate([arm.prompt for arm in some], max_new_tokens=new).texts
    rows = [
        {"arm": arm.name, "draft": arm.draft, "delay": arm.delay, **outcome(wording, slip, text), "text": text}
        for arm, text in zip(ways, texts, strict=True)
    ]
    for draft in DRAFTS:
        last = alone(model, slip, draft, new)
        right, ends = float(last == slip.problem.steps()[-1].after), float(last is not None)
        rows.append({"arm": "alone", "draft": draft, "delay": LATER, "right": right, "ends": ends})
    return pd.DataFrame(rows)


def outcome(wording: Wording, slip: Slip, text: str) -> dict[str, float]:
    """Of an answer: whether it states the problem's last step with the right value, with the one that follows from the
    slip, or at all; whether it states the third step again, rightly; and the share of its steps that follow from the
    value that they start from."""
    steps, right = wording.read(text), slip.problem.steps()
    wrong = slip.problem.steps({SLIPPED: slip.wrong})
    last = [step.after for step in steps if step.operation == right[-1].operation][-1:]
    return {
        "right": float(last == [right[-1].after]),
        "handed_on": float(last == [wrong[-1].after]),
        "ends": float(bool(last)),
        "restated": float(right[SLIPPED] in steps),
        "local": float(np.mean([step.adds_up for step in steps])) if steps else np.nan,
    }


def alone(model: Model, slip: Slip, draft: Draft, new: int) -> int | None:
    """The last value where each step is a conversation of its own: the third, as the draft states it, is reviewed, and
    all others are asked for. None if the model does not state one of them."""
    wording, problem = wording_of(model), slip.problem
    values: dict[str, int] = dict(zip(REGISTERS, problem.starts, strict=True))
    for number in range(len(problem.operations)):
        one = single(problem, values, number)
        given = slip.drafts[draft][1][SLIPPED]
        text = wording.handed(one, [given], "review") if number == SLIPPED else wording.question(one)
        steps = wording.read(model.generate([wording.chat(text)], max_new_tokens=new).text)
        (asked,) = one.operations
        said = [step.after for step in steps if step.operation == asked]
        if not said:
            return None
        values[asked.register] = said[-1]
    return values[problem.operations[-1].register]


# ---- noticing, and errors that have nothing to do with what is asked


def verdicts(model: Model, slip: Slip) -> pd.DataFrame:
    """The probability of `wait` after the third step and after each later one, where all before stand as `ok`."""
    wording, rows = wording_of(model), []
    (wait,) = wording.ids("wait")
    asked = wording.chat(wording.question(slip.problem))
    for draft in DRAFTS:
        steps = stated(slip, draft)
        answer = wording.after(asked, "answer", wording.stated(steps))
        # A verdict is predicted at the value before it; each step and its verdict are as many words.
        length = (len(answer) + 1) // len(steps)
        _, logits = model.extend(None, [asked + answer], logits=len(answer))
        chances = logits[0].float().softmax(-1)[:, wait].tolist()
        for delay in range(len(steps) - SLIPPED):
            rows.append({"draft": draft, "delay": delay, "wait": chances[(SLIPPED + 1 + delay) * length - 2]})
    return pd.DataFrame(rows)


def results(model: Model, given: Sequence[History]) -> pd.DataFrame:
    """Whether the step that is asked for has the right result after each history, up to its value teacher-forced."""
    wording, rows = wording_of(model), []
    for history in given:
        asked = wording.chat(wording.question(history.problem))
        answer = wording.after(asked, "answer", wording.stated([*history.steps, history.asked]))
        read, value = answer[:-1], answer.ids[-1]
        logits = model.extend(None, [asked + read])[1][0, -1].float()
        row = {"wrong": history.wrong, "right": float(int(logits.argmax()) == value)}
        rows.append({**row, "log_probability": float(torch.log_softmax(logits, -1)[value])})
    return pd.DataFrame(rows)
