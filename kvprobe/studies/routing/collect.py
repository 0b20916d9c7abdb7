"""Reading the same later tokens after a sound draft, a slip and a harmless change; the same beginning cold and warm.

All three drafts have as many tokens, so that the later tokens stand at the same positions. The harmless change states
the value of the slip, but there it is right, because another amount was asked for.
"""

import numpy as np
import pandas as pd

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.patching.metrics import LogitDiff
from kvprobe.routing import Routing, agreement, mediate_each, read
from kvprobe.studies.routing import Config
from kvprobe.tasks.steps import LONGEST, Draft, Slip, draw_problem, draw_slip
from kvprobe.tasks.worded_steps import Wording
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

ALL = -1
"""Stands for all layers at once."""
PAIRS: dict[str, tuple[Draft, Draft]] = {
    "sound, slip": ("sound", "slip"),
    "sound, harmless": ("sound", "harmless"),
    "slip, harmless": ("slip", "harmless"),
}
"""Of drafts after which the routing of later tokens is compared. The last two state the same value, the first two not.
They differ in one token (the value), three (the amount twice, the value) and two (the amount twice)."""


def slips(model: Model, config: Config) -> list[Slip]:
    """The problems of a run: for a language model, sums that never pass 9 or 0."""
    wraps = Wording.of(model).words
    return [draw_slip(np.random.default_rng([config.seed, number]), wraps) for number in range(config.problems)]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """How alike the routing is by layer and token, what exchanging it does, and where experts are used."""
    _ = model.lanes.routers  # refuses a model without them before anything is read
    cases = list(enumerate(slips(model, config)))

    def slipped(case: tuple[int, Slip]) -> pd.DataFrame:
        return after_a_slip(model, *case)

    def begun(case: tuple[int, Slip]) -> pd.DataFrame:
        return cold_and_warm(model, *case, config)

    return {
        "samples": table_of_parts(run, cases, "slips", slipped, doing="Reading after a slip", unit="problem"),
        "starts": table_of_parts(run, cases, "starts", begun, doing="Reading cold and warm", unit="problem"),
    }


def after_a_slip(model: Model, number: int, slip: Slip) -> pd.DataFrame:
    """Rows of four kinds: `token` (of a layer, for a pair of drafts), `exchange` (the routing of layers), `load` (of an
    expert) and `own` (a read that follows its own routing)."""
    wording = Wording.of(model)
    before = wording.drafts(slip)
    caches = {name: model.prefill(tokens) for name, tokens in before.items()}
    suffix, right, wrong = wording.suffix(slip, before["sound"])
    margin = LogitDiff(right, wrong)
    free = {name: read(model, suffix, cache) for name, cache in caches.items()}
    rows = [tokens_of(free[one].routing, free[other].routing).assign(pair=pair) for pair, (one, other) in PAIRS.items()]
    for name in ("slip", "harmless"):
        rows.append(exchanges(model, caches["sound"], caches[name], suffix, margin).assign(draft=name))
    used = free["sound"].routing.members[:, 0].double().mean(1)
    rows.append(
        pd.DataFrame(
            {"kind": "load", "layer": layer, "expert": expert, "share": float(share)}
            for layer, shares in zip(free["sound"].routing.layers, used, strict=True)
            for expert, share in enumerate(shares)
        )
    )
    for name, cache in caches.items():
        again = read(model, suffix, cache, routing=free[name].routing).logits - free[name].logits
        off = float(again.abs().max() / free[name].logits.abs().max())
        rows.append(pd.DataFrame([{"kind": "own", "draft": name, "off": off}]))
    likeliest = {name: int(routed.logits[0, -1].argmax()) for name, routed in free.items()}
    by_case = {f"margin_{name}": float(margin(routed.logits[0])) for name, routed in free.items()}
    by_case["as_stated"] = float(likeliest["sound"] == margin.right and likeliest["slip"] == margin.wrong)
    return pd.concat(rows, ignore_index=True).assign(case=number, **by_case)


def tokens_of(one: Routing, other: Routing) -> pd.DataFrame:
    """How alike two routings are, by layer and token."""
    return agreement(one, other).drop(columns=["row", "position"]).assign(kind="token")


def exchanges(model: Model, sound: KVCache, changed: KVCache, suffix: Tokens, margin: LogitDiff) -> pd.DataFrame:
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
            "kept": float(int(exchanged.restored[-1].argmax()) == margin.wrong),
        }
        for layer, exchanged in zip(groups, mediations, strict=True)
    ).assign(kind="exchange")


def cold_and_warm(model: Model, number: int, slip: Slip, config: Config) -> pd.DataFrame:
    """How alike the routing of a question's first tokens is at the beginning of a conversation and after another one,
    after nothing at all and after another one, and after two different conversations; at the same positions."""
    wording = Wording.of(model)
    rng = np.random.default_rng([config.seed, number, 1])
    asked = {"role": "user", "content": wording.question(slip.problem)}
    warm: list[tuple[Tokens, Tokens]] = []
    for other in (draw_problem(LONGEST, rng), draw_problem(LONGEST, rng)):
        answer = {"role": "assistant", "content": wording.steps(other.steps()).strip()}
        chat = [{"role": "user", "content": wording.question(other)}, answer, asked]
        tokens = Transcript.from_messages(chat, ["earlier", "answer", "question"]).tokens(wording.tokenizer)
        start = tokens.span("question").start
        warm.append((tokens[:start], tokens[start:]))
    question = warm[0][1]
    alone = Transcript.from_messages([asked], ["question"]).tokens(wording.tokenizer)
    opening = alone[: len(alone) - len(question)]
    if opening.ids + question.ids != alone.ids:
        raise UserError("The chat template writes a question differently after a conversation than at its beginning.")
    where = max(text.positions[0] for _, text in warm)
    text = question[: config.start].shifted(where)

    def routed_after(before: Tokens) -> Routing:
        past = model.prefill(before.shifted(where - len(before))) if len(before) else None
        return read(model, text, past).routing

    first, second = (routed_after(before) for before, _ in warm)
    pairs = {"cold": routed_after(opening), "warm": second}
    if len(opening):
        pairs["nothing"] = routed_after(alone[:0])
    rows = [tokens_of(other, first).assign(pair=name) for name, other in pairs.items()]
    return pd.concat(rows, ignore_index=True).assign(case=number)
