"""From swaps to findings: what share of the hidden turn's effect each group of slots carries.

Each conversation is a cluster. Shares are pooled: the sum of effects over the sum of the ways from base to donor, so
that a question on which the two caches hardly differ does not count the most. Shares of groups need not add up to one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Estimand, Mean, Ratio, Share, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings, Key
from kvprobe.stats import POSITIVE
from kvprobe.studies.carriers import Config
from kvprobe.studies.carriers.collect import CODES, DIRECTIONS, QUESTIONS
from kvprobe.studies.carriers.groups import BEFORE, GROUPS, HIDDEN, SELF, TOKEN
from kvprobe.tasks.compaction import compacted_conversation, compactions
from kvprobe.tasks.passcode import contexts, draw_codes
from kvprobe.tidy import Rows, beside, chosen
from kvprobe.wording import few_clusters

BOTH = "both"
"""The two questions together."""
HEADLINE = 5
"""Claims of the answer, whose intervals hold together: that the summary carries more than later turns, in two
directions; V against K, which is claimed only if four gaps agree; which band leads; and the code."""
COMPARED = (
    ("group", "summary", "later turns", (BOTH,)),
    ("group", "summary text", "summary delimiters", ()),
    ("part", "V", "K", QUESTIONS),
)
"""Pairs of what is swapped at all layers, and the questions of which the answer speaks."""
NEGLIGIBLE = 1e-3
"""Nats per token below which there is hardly an effect to carry."""
CLOSE = 0.01
"""Share of the largest KL that a control may move."""
NATS = {"kl": "nats", "logprob": "nats", "logit_diff": "logits"}

SWAP = ("question", "direction", "metric", "group", "part")
ALL_AFTER: Mapping[str, Key] = {"group": "all after", "part": "KV"}
ONCE: Mapping[str, Key] = {**ALL_AFTER, "direction": DIRECTIONS[0], "band": EVERY_LAYER}
"""One row for each conversation, question and metric."""
KL, LOGPROB = {"metric": "kl"}, {"metric": "logprob", "question": QUESTIONS}

ESTIMANDS: tuple[Estimand, ...] = (
    Ratio(name="share", of="effect", over="way", by=SWAP, where={"band": EVERY_LAYER}),
    Mean(name="effect", of="effect", by=SWAP, where={"band": EVERY_LAYER}, unit="nats"),
    Ratio(
        name="band_share",
        of="effect",
        over="way",
        by=("direction", "group", "part", "band"),
        where={**KL, "question": BOTH, "banded": True},
    ),
    Mean(name="distance", of="base", by=("question",), where={**ONCE, **KL}, within=POSITIVE, unit="nats per token"),
    *(
        Mean(name="logprob", of=of, by=("question",), where={**ONCE, **LOGPROB}, keys={"cache": cache}, unit="nats")
        for cache, of in (("full", "full"), ("retained", "donor"), ("recomputed", "base"))
    ),
    Mean(name="gain", of="way", by=("question",), where={**ONCE, **LOGPROB}, unit="nats"),
    Share(name="foretold", of="right", by=("question",), where={**ONCE, **LOGPROB}),
)
"""Of swaps between the two caches, and of the caches themselves."""
OF_CODES: tuple[Estimand, ...] = (
    Mean(name="code_in_view", of="way", where=ALL_AFTER, unit="logits"),
    Mean(name="code_masked", of="masked", where=ALL_AFTER, unit="logits", claims=HEADLINE),
    Mean(name="code_effect", of="effect", by=("group", "part", "direction"), unit="logits"),
    Ratio(name="code_share", of="effect", over="way", by=("group",)),
)
"""Of logit(own code) − logit(other code), where the model can tell the two with everything in view."""


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    table, findings = table.assign(sample=table["context"]), Findings()
    swaps = chosen(table, {"question": QUESTIONS, "group": GROUPS})
    rows: Rows = pd.concat([swaps, swaps.assign(question=BOTH)], ignore_index=True)
    rows["banded"] = rows["band"] != EVERY_LAYER
    findings.extend(measure(rows, ESTIMANDS))
    add_sizes(findings, swaps)
    add_gaps(findings, chosen(rows, {**KL, "banded": False}))
    add_leads(findings, chosen(rows, {**KL, **ALL_AFTER, "question": BOTH, "banded": True}))
    add_codes(findings, chosen(table, {"question": CODES, "group": GROUPS}))
    add_checks(findings, table)
    tokens = chosen(table, {"group": TOKEN, **KL}).sort_values("slot")
    for slot, effect, way in zip(tokens["slot"], tokens["effect"], tokens["way"], strict=True):
        findings.number("token_share", effect / way if way else 0.0, slot=int(slot))
    code = draw_codes(1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0]
    chat = compacted_conversation(contexts()[0], compactions()[0], code)
    facts = {
        "chat": chat_record(chat, masked=(HIDDEN,), marked=code, only_in=(HIDDEN, "ask")),
        "summary": [compactions()[0].summary_question, compactions()[0].summary_answer],
        "layers": model.geometry.n_layers,
        "negligible": NEGLIGIBLE,
        "hidden": HIDDEN,
        "tokens": [str(token) for token in tokens["token"]],
    }
    controls = list(controls_of(findings, model.round_off))
    return Conclusion(findings, controls, facts, few_clusters(config.contexts, "conversations"))


def add_sizes(findings: Findings, swaps: Rows) -> None:
    """How many slots a group has, and how much of the distance between the caches one conversation makes up."""
    sizes = swaps.groupby("group", sort=False)["slots"].mean()
    for group, size in sizes.items():
        findings.number("size", size, group=str(group))
        findings.number("size_share", size / sizes["all after"], group=str(group))
    for question, kl in chosen(swaps, {**ONCE, **KL}).groupby("question", sort=False)["base"]:
        findings.number("largest_distance", kl.max(), "nats per token", question=str(question))
        findings.number("heaviest", kl.max() / kl.sum() if kl.sum() else 1.0, question=str(question))


def add_gaps(findings: Findings, rows: Rows) -> None:
    """By how much one share exceeds another of the same sweeps. Those of the answer hold together with all that it
    claims; of the others, those of one comparison hold together over directions and questions."""
    for key, first, second, answered in COMPARED:
        ahead = ahead_of(rows, {**ALL_AFTER, key: second})
        others = tuple(question for question in (*QUESTIONS, BOTH) if question not in answered)
        known: dict[str, Any] = {"of": "ahead", "over": "way", "by": SWAP[:2]}
        known["keys"] = {"first": first, "second": second}
        for questions, family in ((answered, {"claims": HEADLINE}), (others, {"together": ()})):
            where = {**ALL_AFTER, key: first, "question": questions}
            findings.extend(measure(ahead, [Ratio(name="gap", where=where, **family, **known)]))


def add_leads(findings: Findings, rows: Rows) -> None:
    """By how much the band with the largest share exceeds each other one.

    `lead` is claimed: the gap to the band that it exceeds least clearly. It is above zero only if all gaps are, so it
    counts once in what the answer claims.
    """
    for direction in DIRECTIONS:
        shares = findings.where("band_share", direction=direction, **ALL_AFTER)
        known = [finding for finding in shares if not finding.value.unknown]
        first = max(known, key=lambda finding: finding.value.mean).keys["band"] if known else None
        for other in (finding.keys["band"] for finding in known if finding.keys["band"] != first):
            where, ahead = {"direction": direction, "band": first}, ahead_of(rows, {"band": other})
            gap = Ratio(
                name="ahead", of="ahead", over="way", where=where, keys={**where, "other": other}, claims=HEADLINE
            )
            findings.extend(measure(ahead, [gap]))
        if gaps := findings.where("ahead", direction=direction):
            nearest = min(gaps, key=lambda finding: finding.value.ends[0])
            findings.add(replace(nearest, name="lead"))


def ahead_of(rows: Rows, where: Mapping[str, Key]) -> Rows:
    """Rows with what their effect exceeds that of these swaps by, in the same sweep."""
    return rows.assign(ahead=rows["effect"] - beside(rows, "effect", where, ("sample", "question", "direction")))


def add_codes(findings: Findings, rows: Rows) -> None:
    """What the masked turn still decides of the code, and what each group of slots does."""
    able = rows[(rows["full"] > 0) & (rows["full_other"] < 0)]
    findings.number("able", able["sample"].nunique())
    # Over the whole swing in view: what turning the code from the one to the other could move.
    way = able["full"] - able["full_other"]
    swung = able.assign(effect=-able["effect"], masked=able["base"] - able["donor"], way=way)
    findings.extend(measure(swung, OF_CODES))


def add_checks(findings: Findings, table: Rows) -> None:
    """The most by which anything differs that must not."""
    findings.number("apart", table["apart"].max())
    whole = chosen(table, {**ALL_AFTER, "band": EVERY_LAYER, "direction": DIRECTIONS})
    missed = whole.assign(effect=whole["value"] - whole["donor"])
    for check in (missed, chosen(table, {"group": BEFORE}), chosen(table, {"group": SELF})):
        for (group, metric), effects in check.groupby(["group", "metric"])["effect"]:
            findings.number("off", effects.abs().max(), NATS[metric], group=group, metric=metric)


def controls_of(findings: Findings, round_off: float) -> Iterator[Control]:
    """What must be zero, and what must be everything."""
    slack = CLOSE * max(finding.value.mean for finding in findings.where("largest_distance"))
    apart = findings.at("apart").mean
    before, itself, missed = (findings.at("off", group=group, **KL).mean for group in (BEFORE, SELF, "all after"))
    logprob = findings.at("off", group="all after", metric="logprob").mean
    yield Control(
        f"Light cone: slots before {HIDDEN} cannot know of it. Their K and V differ between the caches by at most "
        f"{apart:.1e} of the largest; swapping them all moves the KL by at most {before:.1e} nats.",
        apart <= round_off and before <= slack,
    )
    yield Control(f"Every slot swapped for its own K and V moves the KL by at most {itself:.1e} nats.", itself <= slack)
    yield Control(
        f"With every slot after {HIDDEN} swapped at all layers, the KL from the donor is at most {missed:.1e} nats; "
        f"log p of the answer differs from the donor's by at most {logprob:.1e}.",
        missed <= slack,
    )
