"""From tables to findings: what a wrong answer costs, what fixes are, what is seen of it, and what each route takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, HeldOut, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.code_poisoning import Config
from kvprobe.studies.code_poisoning.answers import FIXES
from kvprobe.studies.code_poisoning.drafts import CRITIQUE, REVIEW, SUSPECT, WRONG
from kvprobe.studies.code_poisoning.noticing import HASH, TEXT
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters, percent

PAIRS = (("own wrong", "own right"), ("planted", "sound"))
"""Wrong answers, and the right ones that they are compared with."""
ASKED = ("review", "critique", "failing")
"""Arms in which the model is asked, in the same conversation, to mend its answer."""
OVER_TEMPLATES: Mapping[str, Any] = {"cluster": "template"}


def gained(name: str, by: str, beside: str = "review") -> Difference:
    """How many more answers are right after a wrong first one."""
    where, less = ({"arm": arm, "draft": WRONG} for arm in (by, beside))
    return Difference(
        name=name, of="right", by=("draft",), where=where, less=less, within=DIFFERENCE, **HEADLINE, **OVER_TEMPLATES
    )


def lost(name: str, arm: str) -> list[Difference]:
    """How many more answers are right after a right first one."""
    return [
        Difference(
            name=name,
            of="right",
            where={"arm": arm, "draft": right},
            less={"arm": arm, "draft": wrong},
            keys={"draft": wrong},
            within=DIFFERENCE,
            **HEADLINE,
            **OVER_TEMPLATES,
        )
        for wrong, right in PAIRS
    ]


ANSWERS: tuple[Estimand, ...] = (
    *lost("poisons", "review"),
    *lost("spreads", "next"),
    gained("restart", "fresh"),
    gained("warned", "warned", beside="failing"),
    gained("handed", "other's"),
    gained("masked", "masked"),
    gained("cleared", "recomputed", beside="masked"),
    Mean(
        name="left",
        of="wrong",
        by=("arm", "draft"),
        where={"arm": ASKED, "draft": WRONG},
        within=SHARE,
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    Mean(
        name="breaks",
        of="wrong",
        by=("draft",),
        where={"arm": "review", "draft": ("own right", "sound")},
        within=SHARE,
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    Mean(name="right", of="right", by=("arm", "draft"), within=SHARE, **OVER_TEMPLATES),
    Mean(name="code", of="code", by=("arm",), within=SHARE, **OVER_TEMPLATES),
)
FIRST: tuple[Estimand, ...] = (Mean(name="first", of="right", by=("how",), within=SHARE, **OVER_TEMPLATES),)
KINDS: tuple[Estimand, ...] = (
    Mean(name="fix", of="share", by=("draft", "arm", "fix"), within=SHARE, **OVER_TEMPLATES),
)
SUSPICIONS: tuple[Estimand, ...] = (
    Mean(name="suspicion", of="suspects", by=("draft", "asked"), within=SHARE, **OVER_TEMPLATES),
    *(
        Difference(
            name="suspects",
            of="suspects",
            by=("asked",),
            where={"draft": wrong},
            less={"draft": right},
            keys={"draft": wrong},
            within=DIFFERENCE,
            **HEADLINE,
            **OVER_TEMPLATES,
        )
        for wrong, right in PAIRS
    ),
)
ROUTES: tuple[Estimand, ...] = (
    Difference(
        name="builds",
        of="right",
        where={"route": "steps"},
        less={"route": "single"},
        within=DIFFERENCE,
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    Difference(
        name="outdoes",
        of="right",
        where={"route": "steps"},
        less={"route": "loop"},
        within=DIFFERENCE,
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    Difference(
        name="costs",
        of="tokens",
        where={"route": "steps"},
        less={"route": "loop"},
        unit="tokens",
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    Mean(name="arrives", of="right", by=("route",), within=SHARE, **OVER_TEMPLATES),
    *(
        Mean(name=name, of=name, by=("route",), unit=unit, **OVER_TEMPLATES)
        for name, unit in (("tokens", "tokens"), ("generated", "tokens"), ("seconds", "seconds"), ("cache", "bytes"))
    ),
    Ratio(name="price", of="tokens", over="right", by=("route",), unit="tokens", **OVER_TEMPLATES),
)
"""`price`: tokens for each right answer."""
PROBES: tuple[Estimand, ...] = (
    HeldOut(
        name="seen",
        of="right",
        by=("place", "reader"),
        where={"place": ("at", "after"), "reader": "residual"},
        within=SHARE,
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    HeldOut(
        name="beyond",
        of="beyond",
        where={"place": "at", "reader": "residual"},
        within=DIFFERENCE,
        **HEADLINE,
        **OVER_TEMPLATES,
    ),
    HeldOut(name="read", of="right", by=("place", "reader"), within=SHARE, **OVER_TEMPLATES),
)
"""`beyond`: what the residual stream gives more than the tokens of the line."""


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    answers = standing(tables["samples"])
    findings = measure(
        answers,
        ANSWERS,
        (tables["first"], FIRST),
        (kinds(answers), KINDS),
        (tables["suspicions"], SUSPICIONS),
        (tables["routes"], ROUTES),
        (beyond_text(tables["probes"]), PROBES),
    )
    findings.number("chance", 0.5)
    templates = len(set(answers["template"]))
    controls = controls_of(findings, tables)
    return Conclusion(findings, controls, facts(answers), few_clusters(templates, "templates"))


def standing(rows: Rows) -> pd.DataFrame:
    """What is right and wrong in the end: a critique that holds no code, as of an answer that it calls correct, leaves
    the first answer as it was."""
    silent = (rows["arm"] == "critique") & (rows["code"] == 0)
    right = rows["right"].where(~silent, (~rows["draft"].isin(WRONG)).astype(float))
    return rows.assign(right=right, wrong=1 - right)


def kinds(rows: Rows) -> pd.DataFrame:
    """A row for each fix and each kind that it may be of."""
    fixes = rows[rows["fix"] != ""]
    return pd.concat([fixes.assign(share=(fixes["fix"] == fix).astype(float), fix=fix) for fix in FIXES])


def beyond_text(rows: Rows) -> Rows:
    """Each row with what its reader gives more than the tokens of the line."""
    return rows.assign(beyond=rows["right"] - beside(rows, "right", {"reader": TEXT}, ("sample",)))


def facts(rows: Rows) -> dict[str, Any]:
    """What was said after the first planted bug."""
    first = rows[rows["draft"] == "planted"]
    first = first[first["sample"] == first["sample"].min()]
    return {
        "draft": first["first"].iloc[0],
        "answers": [list(row) for row in zip(first["arm"], first["text"], strict=True)],
        "asks": {"review": REVIEW, "critique": CRITIQUE, "suspect": SUSPECT},
        "counts": {kind: int(rows[rows["draft"] == kind]["sample"].nunique()) for kind in dict.fromkeys(rows["draft"])},
    }


def controls_of(findings: Findings, tables: Mapping[str, pd.DataFrame]) -> list[Control]:
    """What must hold exactly, and what the study rests on."""
    before = [
        finding.value.mean for finding in findings.where("read", place="before") if finding.keys["reader"] != HASH
    ]
    control = findings.at("read", place="at", reader=HASH)
    first = findings.at("first", how="likeliest")
    code = min(finding.value.mean for finding in findings.where("code") if finding.keys["arm"] != "critique")
    tasks = len(set(tables["samples"]["sample"]))
    return [
        Control(
            "Before the wrong line both solutions have the same tokens, so a probe there is right in half of the "
            f"cases: {', '.join(f'{mean:.1%}' for mean in before)} (allowed: two points off, by rounding).",
            bool(np.allclose(before, 0.5, atol=0.02, rtol=0)),
        ),
        Control(
            f"Labels that can only be memorised are read at chance on templates never seen: {percent(control)} "
            "(expected: an interval that holds 50 %).",
            not control.differs(0.5),
        ),
        Control(
            f"The tasks leave room for errors and for fixes: {percent(first)} of the likeliest first answers to "
            f"{tasks} tasks are right (expected: a fifth to nine tenths).",
            0.2 <= first.mean <= 0.9,
        ),
        Control(
            f"Answers hold code that can be read: in the arm where fewest do, critiques aside, {code:.0%} (expected: "
            "at least three quarters; more tokens, `new`, may help).",
            code >= 0.75,
        ),
    ]
