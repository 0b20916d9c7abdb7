"""From tables to findings: what the slip costs, where it sits, what cures it, and what may be said of each claim."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, POSITIVE, SHARE
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.collect import ALL, EXAMPLES, drawn, has_remarks, problems_of
from kvprobe.tasks.steps import LATER
from kvprobe.tasks.worked_answers import HISTORY
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters, plain


def gained(name: str, by: str, beside: str = "continue") -> Difference:
    """How many more answers are right after the slip."""
    where, less = ({"arm": arm, "draft": "slip", "main": True} for arm in (by, beside))
    return Difference(name=name, of="right", where=where, less=less, within=DIFFERENCE, **HEADLINE)


ANSWERS: tuple[Estimand, ...] = (
    gained("restart", "fresh"),
    gained("handed", "handed", beside="ordered"),
    gained("alone", "alone"),
    gained("wait", "wait"),
    *(
        Mean(name=name, of=name, by=("arm", "draft"), where={"main": True}, within=SHARE)
        for name in ("right", "handed_on", "restated", "local", "ends")
    ),
    Mean(name="delayed", of="right", by=("delay", "draft"), where={"arm": "wait"}, within=SHARE),
)
LOSSES: tuple[Estimand, ...] = (
    Mean(name="poisons", of="lost", where={"arm": "continue"}, within=DIFFERENCE, **HEADLINE),
    Mean(name="critique", of="lost", where={"arm": "review"}, within=DIFFERENCE, **HEADLINE),
    Difference(
        name="blind", of="lost", where={"arm": "review"}, less={"arm": "other's"}, within=(-2.0, 2.0), **HEADLINE
    ),
)
"""`lost`: whether the last value is right after the sound draft, less whether it is after the slip."""
EDITS: tuple[Estimand, ...] = (
    Mean(name="poison", of="poison", where={"edit": "slip"}, unit="logits"),
    Ratio(name="ghost", of="ghost", over="poison", **HEADLINE),
    Mean(name="margin", of="margin", by=("edit",), where={"layer": ALL}, unit="logits"),
    Mean(name="kl", of="kl", by=("edit",), where={"layer": ALL}, within=POSITIVE, unit="nats"),
    Mean(name="prefers_right", of="right", by=("edit",), where={"layer": ALL}, within=SHARE),
    Ratio(name="undone", of="undone", over="poison", by=("edit",), where={"layer": ALL}),
    Ratio(name="undone_layer", of="undone", over="poison", by=("layer",), where={"one": True}),
)
"""`poison` is the margin of the sound run less that of the slip's, `ghost` what is left of it where later tokens no
longer see the wrong step."""
ATTENTION: tuple[Estimand, ...] = (
    Mean(name="mass", of="mass", by=("draft", "layer"), within=SHARE),
    *(
        Difference(
            name="lift",
            of="mass",
            by=("layer",),
            where={"draft": "slip"},
            less={"draft": draft},
            keys={"over": draft},
            within=DIFFERENCE,
        )
        for draft in ("sound", "harmless")
    ),
)
REMARKS: tuple[Estimand, ...] = (
    Difference(
        name="notices",
        of="wait",
        where={"draft": "slip", "delay": 0},
        less={"draft": "sound", "delay": 0},
        within=DIFFERENCE,
        **HEADLINE,
    ),
    Mean(name="wait_chance", of="wait", by=("draft", "delay"), within=SHARE),
    Mean(name="standing", of="standing", by=("draft", "delay"), within=SHARE),
    Ratio(name="left", of="standing", over="sound", by=("delay",), where={"draft": "slip"}),
)
"""`standing`: the probability that no remark so far was `wait`; `left`: as a share of that after a sound draft, so
that false alarms do not count."""
HISTORIES: tuple[Estimand, ...] = (
    Mean(name="right_after", of="right", by=("wrong",), within=SHARE),
    Mean(name="log_probability", of="log_probability", by=("wrong",), unit="nats"),
)
SLOPES: tuple[Estimand, ...] = (Mean(name="conditioned", of="slope", within=(-3.0, 3.0), **HEADLINE),)


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    remarks = [(standing(tables["remarks"]), REMARKS)] if "remarks" in tables else []
    answers = tables["answers"]
    findings = measure(
        answers,
        ANSWERS,
        (losses(answers), LOSSES),
        (beside_poison(tables["samples"]), EDITS),
        (tables["attention"], ATTENTION),
        (tables["histories"], HISTORIES),
        (slopes(tables["histories"]), SLOPES),
        *remarks,
    )
    if remarks:
        left = {delay: findings.at("left", delay=delay).mean for delay in range(LATER + 1)}
        findings.number("half_life", next((delay for delay, share in left.items() if share <= 0.5), np.nan))
    controls = controls_of(findings, margins(tables["samples"]), model)
    return Conclusion(findings, controls, facts(config, model, tables), few_clusters(config.problems, "problems"))


def losses(rows: Rows) -> pd.DataFrame:
    """By problem and arm, whether the answer is right after the sound draft less whether it is after the slip."""
    by_draft = rows[rows["main"]].pivot(index=["sample", "arm"], columns="draft", values="right")
    return (by_draft["sound"] - by_draft["slip"]).rename("lost").reset_index()


def margins(rows: Rows) -> pd.DataFrame:
    """The margin of each problem, with all layers edited."""
    return rows[rows["layer"] == ALL].pivot(index="sample", columns="edit", values="margin")


def beside_poison(rows: Rows) -> Rows:
    """Each row with the damage of its problem, what its edit undoes of it, and what is left with the step masked."""
    whole = margins(rows)
    of_problem = pd.DataFrame(
        {
            "poison": whole["sound"] - whole["slip"],
            "ghost": whole["masked sound"] - whole["masked slip"],
            "slipped": whole["slip"],
        }
    )
    rows = rows.join(of_problem, on="sample")
    return rows.assign(undone=rows["margin"] - rows["slipped"], one=rows["layer"] != ALL)


def standing(rows: Rows) -> Rows:
    """Each row with the probability that no remark up to it is `wait`, also for the sound draft."""
    rows = rows.sort_values(["sample", "draft", "delay"])
    rows = rows.assign(standing=(1 - rows["wait"]).groupby([rows["sample"], rows["draft"]]).cumprod())
    return rows.assign(sound=beside(rows, "standing", {"draft": "sound"}, ("sample", "delay")))


def slopes(rows: Rows) -> pd.DataFrame:
    """By problem, how fast errors become likelier with the share of wrong steps before (least squares)."""
    share = rows["wrong"] / HISTORY
    apart = share - share.groupby(rows["sample"]).transform("mean")
    top = ((1 - rows["right"]) * apart).groupby(rows["sample"]).sum()
    return (top / (apart**2).groupby(rows["sample"]).sum()).rename("slope").reset_index()


def facts(config: Config, model: Model, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """The first problem, as it was put and answered."""
    shown, answers = drawn(model, config, 0, problems_of(config)).shown(), tables["answers"]
    first = answers[(answers["sample"] == 0) & (answers["draft"] == "slip") & (answers["arm"] != "alone")]
    return {
        "chat": chat_record(shown.chat, marked=shown.marked),
        "right": shown.right,
        "wrong": shown.wrong,
        "words": has_remarks(model, config),
        "examples": EXAMPLES,
        "answers": [list(row) for row in zip(first["arm"], first["delay"].astype(int), first["text"], strict=True)],
    }


def controls_of(findings: Findings, whole: pd.DataFrame, model: Model) -> list[Control]:
    """What must hold exactly, and what the study rests on."""
    off = float((whole["restarted sound"] - whole["restarted slip"]).abs().max() / whole.abs().max().max())
    sound = findings.at("right", arm="continue", draft="sound").mean
    fresh = findings.at("right", arm="fresh", draft="slip").mean
    ends = min(finding.value.mean for finding in findings.where("ends") if finding.keys["arm"] != "erratum")
    poison = findings.at("poison")
    return [
        Control(
            f"Where the wrong step is left out and all else is computed again, nothing of it is left: margins after "
            f"the slip and after the sound draft differ by at most {off:.1e} of the largest (allowed: "
            f"{model.round_off:.1e}).",
            off <= model.round_off,
        ),
        Control(
            f"The model can do the task: it ends {sound:.0%} of the sound drafts rightly (expected: at least half), "
            f"and {fresh:.0%} of the problems that it works from the beginning.",
            sound >= 0.5,
        ),
        Control(
            f"The slip does damage, of which shares can be taken: the margin falls by {plain(poison, 1)} logits.",
            poison.above(),
        ),
        Control(
            f"Answers come to an end: in the arm where fewest do, {ends:.0%} state the last step in the form that is "
            "read (expected: at least half; more tokens, `new`, may help). Of errata nothing is claimed.",
            ends >= 0.5,
        ),
    ]
