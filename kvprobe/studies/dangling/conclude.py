"""From patterns and outcomes to findings: where attention went, what heads brought back, and what memos follow."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Mean, Ratio, Share, Total, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView, chat_record
from kvprobe.report.findings import Findings
from kvprobe.report.views.patterns import patterns_view
from kvprobe.stats import DIFFERENCE, POSITIVE, SHARE
from kvprobe.studies.dangling import Config
from kvprobe.studies.dangling.collect import CLOSED, FULL, HIDDEN, MASKED, RANDOM, SHARED, TOP, arms_of, pairs_of, read
from kvprobe.tasks.facts import conversation, facts
from kvprobe.tasks.ordinal import COLOURS, ITEMS, VERBS, draw
from kvprobe.tasks.ordinal import PLACES as ORDINALS
from kvprobe.tidy import Rows, Where, beside, chosen
from kvprobe.wording import few_clusters

PLACES = ("sink", "later", "local", "elsewhere")
"""Where attention can go: the first slot; the later turn; the suffix itself; other slots."""
EXACT = 1e-4
"""How far attention gained may be from attention lost."""
WANTED = 0.9
"""Share of memos that the trained model must answer rightly."""
SHOWN = 4
"""Layers of the example: those that hold the heads of which most attention dangles."""

LOST: Where = {"arm": MASKED}
OF_HEADS = (
    Mean(name="mass", of="dangling", where=LOST, within=SHARE),
    Ratio(name="went", of="gained", over="dangling", by=("arm", "place")),
    Ratio(name="beyond", of="beyond", over="dangling", by=("place",), where=LOST, together=()),
    *(
        Ratio(name="lead", of=f"over_{keys['second']}", over="dangling", where=where, keys=keys, together=())
        for first, second in combinations(PLACES, 2)
        for keys, where in [({"first": first, "second": second}, {**LOST, "place": first})]
    ),
    Ratio(name="moved", of="moved", over="dangling", where={"arm": CLOSED}),
    Mean(name="head_mass", of="dangling", by=("layer", "head"), where=LOST, within=SHARE),
    Mean(name="layer_gained", of="gained", by=("arm", "layer", "place")),
)
OF_ARMS = (
    Mean(name="margin", of="margin", by=("arm",), unit="logits"),
    *(Mean(name=name, of=name, by=("arm",), within=POSITIVE, unit="nats") for name in ("kl", "kl_masked")),
    Mean(name="closing", of="regained", where={"arm": CLOSED}, unit="logits", together=()),
    Total(name="able", of="able", by=("arm",)),
)
ANSWER: dict[str, Any] = {"together": ("measure",), "family": "rescue"}
"""What hiding the turn costs, and what heads bring back beyond random ones: the answer picks one of these, so their
intervals hold together."""
OF_RESCUES = (
    Mean(name="way", of="way", by=("measure",), where={"measure": "margin"}, unit="logits", **ANSWER),
    Ratio(name="rescued", of="back", over="way", by=("measure", "size", "sort")),
    Ratio(name="gap", of="over_random", over="way", by=("measure", "size"), where={"sort": TOP}, **ANSWER),
)
OF_MEMOS = (
    Share(name="followed", of="said", by=("reference", "memo", "follows")),
    Mean(name="leans", of="leans", by=("reference",), where={"memo": "crossed"}, within=DIFFERENCE, together=()),
)


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    findings, fact = findings_of(tables), facts(config.kinds[:1])[0]
    shown = {
        "chat": chat_record(conversation(fact, fact.values[0]), masked=(HIDDEN,)),
        "layers": model.geometry.n_layers,
        "views": [vars(example(model, config, findings))],
    }
    return concluded(findings, shown)


def concluded(findings: Findings, shown: Mapping[str, Any]) -> Conclusion:
    """What `conclude` gives, from its findings and from the facts that take the model."""
    memo = draw("held_out", np.random.default_rng(0))
    guesses = {"list": 1 / len(ORDINALS), "nothing": (1 / len(ITEMS) + 1 / len(COLOURS)) / 2}
    known = {**shown, "memo": " ".join(memo.texts()), "guesses": guesses}
    return Conclusion(findings, list(controls_of(findings)), known, list(warnings_of(findings)))


def findings_of(tables: Mapping[str, Rows]) -> Findings:
    """All numbers of a run, from the tables of `collect`."""
    table = tables["samples"].rename(columns={"prompt": "sample"})
    arms, heads = (table[table["grid"] == grid] for grid in ("arms", "heads"))
    rescues = tables["rescues"].rename(columns={"prompt": "sample"})
    arms = by_arm(arms)
    memos = [(by_word(tables["memos"]), OF_MEMOS)] if "memos" in tables else []
    findings = measure(by_place(heads), OF_HEADS, (arms, OF_ARMS), (by_measure(rescues, arms), OF_RESCUES), *memos)
    lost = chosen(heads, LOST)
    findings.number("balance", (lost[list(PLACES)].sum(axis=1) - lost["dangling"]).abs().max())
    return findings


def by_place(heads: Rows) -> Rows:
    """A row for each place, with what it gained: beyond what the softmax alone gives it, beyond each other place
    (`over_sink`), and how far from the masked run (`moved`, whose mean over places is that of the attention moved)."""
    head = ("sample", "layer", "head")
    heads = heads.astype({"layer": int, "head": int, **dict.fromkeys(PLACES, float)})
    rows = heads.melt([*head, "arm", "dangling"], list(PLACES), "place", "gained")

    def over(where: Where, on: str) -> Rows:
        return rows["gained"] - beside(rows, "gained", where, (*head, on))

    others = {f"over_{place}": over({"place": place}, "arm") for place in PLACES}
    moved = over(LOST, "place").abs() * len(PLACES) / 2
    return rows.assign(beyond=over({"arm": SHARED}, "place"), moved=moved, **others)


def by_arm(arms: Rows) -> Rows:
    """Outcomes, with whether the right value has the larger logit, and the margin beyond the masked run's."""
    return arms.assign(able=arms["margin"] > 0, regained=arms["margin"] - beside(arms, "margin", LOST, ("sample",)))


def by_measure(rescues: Rows, arms: Rows) -> Rows:
    """A row for each measure: the way from the turn hidden from all heads to the turn in view of all, and how much of
    it is `back`, also beyond random heads."""
    hidden, full = (chosen(arms, {"arm": arm}).set_index("sample") for arm in (MASKED, FULL))
    goals = {"margin": rescues["sample"].map(full["margin"]), "kl": 0.0}
    tables = []
    for name, goal in goals.items():
        start = rescues["sample"].map(hidden[name])
        tables.append(rescues.assign(measure=name, way=goal - start, back=rescues[name] - start))
    rows: Rows = pd.concat(tables, ignore_index=True)
    return rows.assign(over_random=rows["back"] - beside(rows, "back", {"sort": RANDOM}, ("sample", "measure", "size")))


def by_word(memos: Rows) -> Rows:
    """A row for each word that an answer may follow. Where nothing is crossed, the two words are one."""
    rows = memos.rename(columns={"memo": "sample", "arm": "memo"})
    rows = rows.assign(leans=rows["payload"].astype(float) - rows["pointer"])
    rows = rows.melt(["sample", "reference", "memo", "leans"], ["payload", "pointer"], "follows", "said")
    return rows[(rows["memo"] == "crossed") | (rows["follows"] == "payload")]


def controls_of(findings: Findings) -> Iterator[Control]:
    off = findings.at("balance").mean
    yield Control(
        "Attention is neither made nor lost: what other slots gain is what was spent on the turn, but for "
        f"{off:.1e} (allowed: {EXACT:g}).",
        off <= EXACT,
    )
    if "followed" in findings:
        right = {
            verb: findings.at("followed", reference=name, memo="seen", follows="payload").mean
            for name, verb in VERBS.items()
        }
        shares = ", ".join(f"{100 * share:.0f} % ({verb})" for verb, share in right.items())
        yield Control(
            f"The trained model answers memos that it has not seen: {shares} are right ({100 * WANTED:.0f} % wanted).",
            min(right.values()) >= WANTED,
        )


def warnings_of(findings: Findings) -> Iterator[str]:
    count, able = findings.at("margin", arm=FULL).clusters, findings.at("able", arm=FULL).mean
    yield from few_clusters(count, "conversations")
    if able < 0.75 * count:
        yield (
            f"The model says the right value in {able:g} of {count} conversations even with everything in view, so "
            "there is little to bring back."
        )


def example(model: Model, config: Config, findings: Findings) -> AttentionView:
    """One conversation before and after, in the layers with the most dangling heads."""
    pair = pairs_of(config, model)[0]
    mass = findings.heads("head_mass", SHOWN)
    caches = arms_of(model, pair)
    before, after = (read(model, caches[arm], pair).of_layers(list(mass.index)) for arm in (FULL, MASKED))
    return patterns_view(
        before,
        after,
        caption=f"Conversation {pair.id} with everything in view, and with the turn hidden: struck through, and seen "
        "by no token of the question and the reply.",
        index=mass.to_numpy(float),
        index_name="attention on the hidden turn, mean over conversations",
    )
