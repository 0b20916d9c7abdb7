"""From tables to findings: how far a slip moves the routing, what exchanging it undoes, and cold starts."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.routing import chance_overlap
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.routing import Config
from kvprobe.studies.routing.collect import ALL, sums
from kvprobe.tasks.worded_steps import Wording
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters

BY_CASE: tuple[Estimand, ...] = (
    Difference(
        name="alike",
        of="overlap",
        where={"pair": "slip, harmless"},
        less={"pair": "sound, slip"},
        within=DIFFERENCE,
        **HEADLINE,
    ),
    Mean(name="overlap_all", of="overlap", by=("pair",), within=SHARE),
    Mean(name="overlap_last", of="overlap", by=("pair",), where={"last": True}, within=SHARE),
)
"""How alike the routing of later tokens is after two drafts, all layers and tokens together. If the slip is routed like
the harmless change, which states the same value, rather than like the sound draft, routing goes by the value."""
BY_LAYER: tuple[Estimand, ...] = (
    Mean(name="overlap", of="overlap", by=("pair", "layer"), within=SHARE),
    Mean(name="jsd", of="jsd", by=("pair", "layer"), unit="bits", within=SHARE),
)
BY_TOKEN: tuple[Estimand, ...] = (Mean(name="token", of="overlap", by=("pair", "layer", "place"), within=SHARE),)
EXCHANGES: tuple[Estimand, ...] = (
    Ratio(name="undone", of="undone", over="damage", where={"layer": ALL, "draft": "slip"}, **HEADLINE),
    Ratio(name="undone_by", of="undone", over="damage", by=("draft",), where={"layer": ALL}),
    Ratio(name="done_by", of="caused", over="damage", by=("draft",), where={"layer": ALL}),
    Ratio(name="undone_layer", of="undone", over="damage", by=("draft", "layer"), where={"one": True}),
    Mean(name="kept", of="kept", by=("draft",), where={"layer": ALL}, within=SHARE),
    Mean(name="damage", of="damage", by=("draft",), where={"layer": ALL}, unit="nats"),
)
"""The share of the damage to the last prediction that the sound routing undoes, and that the other routing does."""
STARTS: tuple[Estimand, ...] = (
    Difference(name="cold", of="overlap", where={"pair": "warm"}, less={"pair": "cold"}, within=DIFFERENCE, **HEADLINE),
    Mean(name="start_all", of="overlap", by=("pair",), within=SHARE),
    Mean(name="entropy", of="entropy", by=("pair",), within=SHARE),
)
START_PLACES: tuple[Estimand, ...] = (Mean(name="start", of="overlap", by=("pair", "place"), within=SHARE),)
"""Of the tokens of a beginning, the first included, which all others leave out."""
COURSES: tuple[Estimand, ...] = (
    Difference(
        name="slower", of="log_probability", where={"run": "warm"}, less={"run": "cold"}, unit="nats", **HEADLINE
    ),
    Difference(name="first", of="lost", where={"first": True}, less={"first": False}, unit="nats", **HEADLINE),
    Difference(
        name="warmed",
        of="log_probability",
        where={"run": "cold, routed warm"},
        less={"run": "cold"},
        unit="nats",
        **HEADLINE,
    ),
    Mean(name="course", of="right", by=("run", "step"), within=SHARE),
    Mean(name="course_all", of="right", by=("run",), within=SHARE),
    Mean(name="log_probability", of="log_probability", by=("run", "step"), unit="nats", within=(-np.inf, 0.0)),
    Mean(name="log_probability_all", of="log_probability", by=("run",), unit="nats", within=(-np.inf, 0.0)),
)
"""`lost`: how much likelier the right value of a step is in a warm start, of rows of the cold one."""
LOADS: tuple[Estimand, ...] = (Mean(name="load", of="share", by=("layer", "expert"), within=SHARE),)
MARGINS: tuple[Estimand, ...] = tuple(
    Mean(name="margin", of=f"margin_{name}", keys={"draft": name}, unit="logits")
    for name in ("sound", "slip", "harmless")
)


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    rows, starts = tables["samples"], tables["starts"]
    kinds = dict(iter(rows.groupby("kind")))
    tokens, loads, exchanged = kinds["token"], kinds["load"].astype({"expert": int}), kinds["exchange"]
    lengths = tokens.groupby("sample")["token"].transform("max")
    places = tokens["token"].astype(int).map(Wording.of(model).place)
    tokens = tokens.assign(place=places, last=tokens["token"] == lengths)
    by_token = BY_TOKEN if len(set(lengths)) == 1 else ()  # else the tokens of one number are not alike
    exchanged = exchanged.assign(one=exchanged["layer"] >= 0)
    later = starts[starts["token"] > 0]
    findings = measure(
        tokens,
        (*BY_CASE, *BY_LAYER, *by_token),
        (exchanged, EXCHANGES),
        (later, STARTS),
        (starts.assign(place=starts["token"]), START_PLACES),
        (beside_warm(tables["courses"]), COURSES),
        (loads, LOADS),
        (rows.drop_duplicates("sample"), MARGINS),
    )
    experts, layers = (len(set(loads[column])) for column in ("expert", "layer"))
    chosen = round(np.mean(loads["share"]) * experts)
    findings.number("chance", chance_overlap(experts, chosen))
    findings.number("as_stated", np.mean(rows.drop_duplicates("sample")["as_stated"]))
    findings.number("off", np.max(kinds["own"]["off"]))
    first = sums(model, config)[0]
    shown = {
        "chat": chat_record(first.shown().chat, marked=first.shown().marked),
        "right": first.slip.right,
        "wrong": first.slip.wrong,
        "experts": experts,
        "chosen": chosen,
        "layers": layers,
    }
    return Conclusion(findings, controls_of(findings, model), shown, few_clusters(config.problems, "problems"))


def beside_warm(rows: Rows) -> Rows:
    """Each row of the cold start with what it loses to the warm one, and whether it is of the first step."""
    lost = beside(rows, "log_probability", {"run": "warm"}, ("sample", "step")) - rows["log_probability"]
    return rows.assign(lost=lost.where(rows["run"] == "cold"), first=rows["step"] == 1)


def controls_of(findings: Findings, model: Model) -> list[Control]:
    """What must hold exactly, and what the study rests on."""
    off, share = findings.at("off").mean, findings.at("as_stated").mean
    return [
        Control(
            f"A read that is routed as it was changes nothing: logits are off by at most {off:.1e} of the largest "
            f"(allowed: {model.round_off:.1e}).",
            off <= model.round_off,
        ),
        Control(
            f"The slip matters: the likeliest value is right after a sound draft and the wrong one after a slip in "
            f"{share:.0%} of the problems (expected: at least half).",
            share >= 0.5,
        ),
    ]
