"""From tables to findings: how far a slip moves the routing, what exchanging it undoes, how other a cold start is."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Difference, Estimand, Mean, Ratio, Rows, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.routing import chance_overlap
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.routing import Config
from kvprobe.studies.routing.collect import ALL, NONE, Wording, slips
from kvprobe.tasks.steps import SLIPPED
from kvprobe.text.transcript import Transcript
from kvprobe.wording import few_clusters

HEADLINE: dict[str, Any] = {"together": (), "family": "headline", "cluster": "case"}
BY_CASE: tuple[Estimand, ...] = (
    Difference(
        name="moved", of="overlap", where={"draft": "harmless"}, less={"draft": "slip"}, within=DIFFERENCE, **HEADLINE
    ),
    Mean(name="overlap_all", of="overlap", by=("draft",), cluster="case", within=SHARE),
    Mean(name="overlap_last", of="overlap", by=("draft",), where={"last": True}, cluster="case", within=SHARE),
)
"""How alike the routing of later tokens is, all layers and tokens together."""
BY_LAYER: tuple[Estimand, ...] = (
    Mean(name="overlap", of="overlap", by=("draft", "layer"), cluster="case", within=SHARE),
    Mean(name="jsd", of="jsd", by=("draft", "layer"), cluster="case", unit="bits", within=SHARE),
    Mean(name="token", of="overlap", by=("draft", "layer", "place"), cluster="case", within=SHARE),
)
EXCHANGES: tuple[Estimand, ...] = (
    Ratio(name="undone", of="undone", over="damage", where={"layer": ALL, "draft": "slip"}, **HEADLINE),
    Ratio(name="undone_by", of="undone", over="damage", by=("draft",), where={"layer": ALL}, cluster="case"),
    Ratio(name="done_by", of="caused", over="damage", by=("draft",), where={"layer": ALL}, cluster="case"),
    Ratio(name="undone_layer", of="undone", over="damage", by=("draft", "layer"), where={"one": True}, cluster="case"),
    Mean(name="damage", of="damage", by=("draft",), where={"layer": ALL}, cluster="case", unit="nats"),
)
"""The share of the damage to the last prediction that the sound routing undoes, and that the other routing does."""
STARTS: tuple[Estimand, ...] = (
    Difference(name="cold", of="overlap", where={"pair": "warm"}, less={"pair": "cold"}, within=DIFFERENCE, **HEADLINE),
    Mean(name="start_all", of="overlap", by=("pair",), cluster="case", within=SHARE),
    Mean(name="entropy", of="entropy", by=("pair",), cluster="case", within=SHARE),
)
START_PLACES: tuple[Estimand, ...] = (
    Mean(name="start", of="overlap", by=("pair", "place"), cluster="case", within=SHARE),
)
"""Of the tokens of a beginning, the first included, which all others leave out."""
LOADS: tuple[Estimand, ...] = (Mean(name="load", of="share", by=("layer", "expert"), cluster="case", within=SHARE),)
MARGINS: tuple[Estimand, ...] = tuple(
    Mean(name="margin", of=f"margin_{name}", keys={"draft": name}, cluster="case", unit="logits")
    for name in ("sound", "slip", "harmless")
)
ALLOWED = 1e-5
"""Nats by which a routing that is exchanged nowhere may change the damage."""


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    """Findings, controls and facts of a run."""
    rows, starts = tables["samples"], tables["starts"]
    kinds = dict(iter(rows.groupby("kind")))
    tokens, loads, exchanged = kinds["token"], kinds["load"].astype({"expert": int}), kinds["exchange"]
    places = tokens.drop_duplicates("token")
    texts = {token: f"{token:.0f} {text}" for token, text in zip(places["token"], places["text"], strict=True)}
    last = tokens.groupby("case")["token"].transform("max")
    tokens = tokens.assign(place=[texts[number] for number in tokens["token"]], last=tokens["token"] == last)
    exchanged = exchanged.assign(one=exchanged["layer"] >= 0)
    later = starts[starts["token"] > 0]
    findings = measure(
        tokens,
        (*BY_CASE, *BY_LAYER),
        (exchanged, EXCHANGES),
        (later, STARTS),
        (starts.assign(place=starts["token"]), START_PLACES),
        (loads, LOADS),
        (rows.drop_duplicates("case"), MARGINS),
    )
    experts, layers = (len(set(loads[column])) for column in ("expert", "layer"))
    chosen = round(np.mean(loads["share"]) * experts)
    findings.number("chance", chance_overlap(experts, chosen))
    findings.number("followed", followed(rows))
    slip, wording = slips(model, config)[0], Wording(model)
    problem, draft = slip.drafts["slip"]
    said = wording.steps(draft).strip() + wording.steps(slip.later)
    chat = [{"role": "user", "content": wording.question(problem)}, {"role": "assistant", "content": said}]
    transcript = Transcript.from_messages(chat, ["question", "answer"])
    shown = {
        "chat": chat_record(transcript, marked=wording.steps(draft[SLIPPED:]).strip()),
        "right": slip.right,
        "wrong": slip.wrong,
        "experts": experts,
        "chosen": chosen,
        "layers": layers,
    }
    return Conclusion(findings, controls_of(findings, exchanged), shown, few_clusters(config.problems, "problems"))


def followed(rows: Rows) -> float:
    """The share of problems in which the model prefers the right value after a sound draft, and the wrong one after a
    slip: it goes by what was stated."""
    margins = rows.drop_duplicates("case")
    return float(np.mean((margins["margin_sound"] > 0) & (margins["margin_slip"] < 0)))


def controls_of(findings: Findings, exchanged: Rows) -> list[Control]:
    """What must hold exactly."""
    nowhere = float(exchanged[exchanged["layer"] == NONE]["undone"].abs().max())
    share = findings.at("followed").mean
    return [
        Control(
            f"A routing that is exchanged at no layer changes nothing: the damage moves by at most {nowhere:.1e} nats "
            f"(allowed: {ALLOWED:g}).",
            nowhere <= ALLOWED,
        ),
        Control(
            f"The slip matters: the model states the right value after a sound draft and the wrong one after a slip in "
            f"{share:.0%} of the problems (expected: at least half).",
            share >= 0.5,
        ),
    ]
