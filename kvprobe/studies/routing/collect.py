"""Reading the same later tokens after a sound draft, a slip and a harmless change; the same beginning cold and warm.

All three drafts have as many tokens, so that the later tokens stand at the same positions. The harmless change states
the value of the slip, but there it is right, because another amount was asked for.
"""

import numpy as np
import pandas as pd

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.patching.metrics import LogitDiff
from kvprobe.routing import Routing, agreement, load, mediate_each, read
from kvprobe.studies.routing import Config
from kvprobe.studies.routing.beginnings import Beginnings, beginnings
from kvprobe.tasks.steps import LONGEST, Draft, draw_problem
from kvprobe.tasks.worded_steps import Wording
from kvprobe.tasks.worked_sums import WorkedSum, draw_sum
from kvprobe.text.tokens import Tokens

ALL = -1
"""Stands for all layers at once."""
PAIRS: dict[str, tuple[Draft, Draft]] = {
    "sound, slip": ("sound", "slip"),
    "sound, harmless": ("sound", "harmless"),
    "slip, harmless": ("slip", "harmless"),
}
"""Of drafts after which the routing of later tokens is compared. The last two state the same value, the first two not.
They differ in one token (the value), three (the amount twice, the value) and two (the amount twice)."""


def sums(model: Model, config: Config) -> list[WorkedSum]:
    """The problems of a run: for a language model, sums that never pass 9 or 0."""
    draws = (np.random.default_rng([config.seed, number]) for number in range(config.problems))
    return [draw_sum(Wording.of(model), rng) for rng in draws]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """How alike the routing is by layer and token, what exchanging it does, and where experts are used."""
    _ = model.lanes.routers  # refuses a model without them before anything is read
    parts, cases = Parts(model, config, run), list(enumerate(sums(model, config)))
    return {
        "samples": parts.table(after_a_slip, cases, "slips", doing="Reading after a slip", unit="problem"),
        "starts": parts.table(cold_and_warm, cases, "starts", doing="Reading cold and warm", unit="problem"),
        "courses": parts.table(courses, cases, "courses", doing="Answering cold and warm", unit="problem"),
    }


def after_a_slip(model: Model, config: Config, case: tuple[int, WorkedSum]) -> pd.DataFrame:
    """Rows of four kinds: `token` (of a layer, for a pair of drafts), `exchange` (the routing of layers), `load` (of an
    expert) and `own` (a read that follows its own routing)."""
    number, worked = case
    rest = worked.rest()
    suffix, margin = rest.later + rest.lead, LogitDiff(rest.right, rest.wrong)
    caches = {draft: model.prefill(tokens) for draft, tokens in worked.drafts().items()}
    free = {draft: read(model, suffix, cache) for draft, cache in caches.items()}
    rows = [
        alike(free[one].routing, free[other].routing).assign(kind="token", pair=pair)
        for pair, (one, other) in PAIRS.items()
    ]
    for draft in ("slip", "harmless"):
        rows.append(exchanges(model, caches["sound"], caches[draft], suffix, rest.wrong).assign(draft=draft))
    rows.append(load(free["sound"].routing).drop(columns="cv").assign(kind="load"))
    for draft, cache in caches.items():
        again = read(model, suffix, cache, routing=free[draft].routing).logits - free[draft].logits
        off = float(again.abs().max() / free[draft].logits.abs().max())
        rows.append(pd.DataFrame([{"kind": "own", "draft": draft, "off": off}]))
    likeliest = {draft: int(routed.logits[0, -1].argmax()) for draft, routed in free.items()}
    of_sample = {f"margin_{draft}": float(margin(routed.logits[0])) for draft, routed in free.items()}
    of_sample["as_stated"] = float(likeliest["sound"] == rest.right and likeliest["slip"] == rest.wrong)
    return pd.concat(rows, ignore_index=True).assign(sample=number, **of_sample)


def alike(one: Routing, other: Routing) -> pd.DataFrame:
    """How alike two routings are, by layer and token."""
    return agreement(one, other).drop(columns=["row", "position"])


def exchanges(model: Model, sound: KVCache, changed: KVCache, suffix: Tokens, wrong: int) -> pd.DataFrame:
    """What the routing of all layers, and of each layer, does to the last prediction; and whether the changed run keeps
    its value as the likeliest."""
    routed = tuple(model.lanes.routers.modules)
    groups = {ALL: routed, **{layer: (layer,) for layer in routed}}
    mediations = mediate_each(model, sound, changed, suffix, groups.values())
    return pd.DataFrame(
        {
            "layer": layer,
            "damage": exchanged.damage,
            "undone": exchanged.damage - exchanged.left,
            "caused": exchanged.caused,
            "kept": float(int(exchanged.restored[-1].argmax()) == wrong),
        }
        for layer, exchanged in zip(groups, mediations, strict=True)
    ).assign(kind="exchange")


def cold_and_warm(model: Model, config: Config, case: tuple[int, WorkedSum]) -> pd.DataFrame:
    """How alike the routing of a question's first tokens is at the beginning of a conversation and after another one,
    after nothing at all and after another one, and after two different conversations; at the same positions."""
    number, worked = case
    begun = begun_after(worked, number, config)
    text = begun.turn[: config.start]

    def routed_after(before: Tokens) -> Routing:
        return read(model, text, model.prefill(before) if len(before) else None).routing

    first, second = map(routed_after, begun.earlier)
    pairs = {"cold": routed_after(begun.opening), "warm": second}
    if len(begun.opening):
        pairs["nothing"] = routed_after(begun.opening[:0])
    rows = [alike(other, first).assign(pair=name) for name, other in pairs.items()]
    return pd.concat(rows, ignore_index=True).assign(sample=number)


def begun_after(worked: WorkedSum, number: int, config: Config) -> Beginnings:
    """The question at the beginning of a conversation, and after each of two that are drawn."""
    wording, rng = worked.wording, np.random.default_rng([config.seed, number, 1])
    others = [draw_problem(LONGEST, rng) for _ in range(2)]
    earlier = [(wording.question(other), wording.steps(other.steps())) for other in others]
    return beginnings(wording, worked.question, earlier)


def courses(model: Model, config: Config, case: tuple[int, WorkedSum]) -> pd.DataFrame:
    """Whether the right value of each step of the answer is the likeliest, and how likely it is, the steps before it
    given: where the conversation begins with the question, where another one was before, and each of the two with the
    question and the answer routed as in the other; at the same positions."""
    number, worked = case
    wording, steps = worked.wording, worked.slip.problem.steps()
    begun = begun_after(worked, number, config)
    answer = wording.after(worked.asked, "answer", wording.steps(steps))
    text = (worked.asked + answer)[len(begun.opening) :].shifted(begun.turn.positions[0])
    ends = [len(wording.ids(wording.stated(steps[: place + 1]))) - 1 for place in range(len(steps))]
    caches = {
        "cold": model.prefill(begun.opening) if len(begun.opening) else None,
        "warm": model.prefill(begun.earlier[0]),
    }
    kept = len(answer) + 1
    runs = {name: read(model, text, cache, logits=kept) for name, cache in caches.items()}
    for name, other in (("cold", "warm"), ("warm", "cold")):
        routing = runs[other].routing
        runs[f"{name}, routed {other}"] = read(model, text, caches[name], routing=routing, logits=kept)
    rows: list[dict[str, object]] = []
    for name, run in runs.items():
        scores = run.logits[0, ends].float().log_softmax(-1)
        values = [answer.ids[end] for end in ends]
        for place, (value, score) in enumerate(zip(values, scores, strict=True)):
            right, log_probability = float(int(score.argmax()) == value), float(score[value])
            rows.append({"run": name, "step": place + 1, "right": right, "log_probability": log_probability})
    return pd.DataFrame(rows).assign(sample=number)
