"""From tables to findings: what every arm does, and what of it is provenance, position and delimiters."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import Difference, Estimand, Mean, measure
from kvprobe.experiments.light_cone import light_cone
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, EFFECTS, FACTORS, HIDDEN_SEGMENTS, MASK, RESTART
from kvprobe.studies.compaction.factorial import contrast
from kvprobe.studies.compaction.reading import CONDITIONS, LOOKED_AT, PAIRS
from kvprobe.tasks.compaction import KINDS, compacted_conversation, compactions
from kvprobe.tasks.passcode import CODE, contexts
from kvprobe.tidy import Rows, Where, beside
from kvprobe.wording import few_clusters

OUTCOMES = {
    "kl": "KL from full context (nats)",
    "agreement": "next tokens as with full context",
    "margin": "margin of the code (nats)",
    "logprob": "log-probability of code (nats)",
    "leave-context-out": "digits read, new conversations",
    "paired": "digits read, centred",
    "prefix_summary": "answer kept: summary",
    "prefix_hidden": "answer kept: hidden turns",
    "prefix_neither": "answer kept: nowhere",
    "right_summary": "right answers: summary",
    "right_hidden": "right answers: hidden turns",
}
"""What is measured for every arm. An answer is kept as far as its tokens are those given with the full context."""
NATS = {"kl": "nats per token", "margin": "nats", "logprob": "nats"}
"""Units of all but shares."""
HEADLINE = {
    "gap": ("kl", "right_summary", "leave-context-out", "paired", "margin"),
    "beyond": ("right_summary",),
    "effect": ("kl",),
}
"""Outcomes of which the answer speaks, by finding; of effects the main ones. Their intervals hold together."""
LEVEL = ("outcome", "condition")
HIDDEN = "hidden turns"


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    findings = measure(prepared(tables), estimands(), (attended(tables["attention"]), ATTENTION))
    conversations = tables["conversations"]
    findings.number("chance", CODE.chance)
    findings.number("reply_tokens", conversations["tokens"][conversations["condition"] == "full"].mean(), "tokens")
    cannot = "where slots are retained, K and V of T3 at layers 0 and 1 cannot depend on the code"
    control = light_cone(findings, "variation", tables["variation"], model.round_off, cannot)
    first = conversations[conversations["context"] == 0].set_index("condition")
    chat = compacted_conversation(contexts()[0], compactions()[0], code := str(tables["samples"]["code"][0]))
    facts: dict[str, Any] = {
        "chat": chat_record(chat, masked=HIDDEN_SEGMENTS, marked=code, only_in=("T2", "ask")),
        "questions": {kind: compactions()[0].question(kind) for kind in KINDS},
        "answers": {name: {kind: str(first[f"answer_{kind}"][name]) for kind in KINDS} for name in CONDITIONS},
        "layers": model.geometry.n_layers,
    }
    return Conclusion(findings, [control], facts, few_clusters(config.contexts, "conversations"))


def prepared(tables: Mapping[str, Rows]) -> Rows:
    """A row for each conversation, condition and outcome.

    `beyond` is what it is more than where what was hidden does not matter; the mean over arms of a column of `EFFECTS`
    is that contrast.
    """
    codes = tables["samples"].groupby(["context", "condition"])
    codes = codes[["logprob", "margin", "leave-context-out", "paired"]].mean().reset_index()
    rows = tables["conversations"].merge(codes, "left", on=["context", "condition"])
    rows = rows.melt(["context", "condition"], [*OUTCOMES, "between"], "outcome")
    unrelated = [beside(rows, "value", {"condition": name}, ("context", "outcome")) for name in PAIRS[1]]
    rows["beyond"] = rows["value"] - unrelated[0].where(rows["condition"] == MASK.name, unrelated[1])
    for effect in EFFECTS:
        rows[effect] = rows["condition"].map({arm.name: contrast(effect, arm.high) for arm in ARMS}) * rows["value"]
    return rows


def estimands() -> Iterator[Estimand]:
    """Of every outcome: each condition, masking less restarting, and the effects of the factors."""
    for outcome in OUTCOMES:
        known: dict[str, Any] = {"by": ("outcome",), "cluster": "context", "unit": NATS.get(outcome, "")}
        of_level, within, twice = (UNBOUNDED,) * 3 if outcome in NATS else (SHARE, DIFFERENCE, (-2.0, 2.0))
        where = {"outcome": outcome}
        yield Mean(name="outcome", of="value", where=where, within=of_level, **{**known, "by": LEVEL})
        for name, of, pair, within_pair in (
            ("gap", "value", PAIRS[0], within),
            ("gap_irrelevant", "value", PAIRS[1], within),
            ("beyond", "beyond", PAIRS[0], twice),
        ):
            masked, restarted = ({**where, "condition": condition} for condition in pair)
            family: dict[str, Any] = {
                "together": (),
                "family": "headline" if outcome in HEADLINE.get(name, ()) else name,
            }
            joined = known if name == "gap_irrelevant" else {**known, **family}
            yield Difference(name=name, of=of, where=masked, less=restarted, within=within_pair, **joined)
        for effect in EFFECTS:
            headline = outcome in HEADLINE["effect"] and effect in FACTORS
            family = {"together": () if headline else ("outcome",), "family": "headline" if headline else "effect"}
            yield Mean(name="effect", of=effect, where=where, keys={"effect": effect}, within=within, **family, **known)
    between: dict[str, Any] = {"of": "value", "cluster": "context", "unit": NATS["kl"]}
    masked, irrelevant = ({"outcome": "between", "condition": pair[0]} for pair in PAIRS)
    for where in (masked, irrelevant):
        yield Mean(name="between", by=("condition",), where=where, **between)
    yield Difference(name="between_beyond", where=masked, less=irrelevant, **between)


def attended(table: Rows) -> Rows:
    """A row for each conversation, head and place: what T3's queries spend there with everything in view, how much more
    after masking, and how far that is from what they spend after a restart."""
    keys = ["context", "layer", "head", "place"]
    long = table.melt(["condition", *keys[:-1]], list(LOOKED_AT), "place").set_index([*keys, "condition"])["value"]
    wide = long.unstack("condition")
    full, masked, restarted = (wide[name] for name in ("full", MASK.name, RESTART.name))
    return pd.DataFrame({"spent": full, "went": masked - full, "moved": (masked - restarted).abs()}).reset_index()


SPENT: Where = {"place": HIDDEN}
WENT: Where = {"place": tuple(place for place in LOOKED_AT if place != HIDDEN)}
ATTENTION: tuple[Estimand, ...] = (
    Mean(name="spent", of="spent", where=SPENT, cluster="context"),
    Mean(name="spent_by_head", of="spent", by=("layer", "head"), where=SPENT, cluster="context"),
    Mean(name="went", of="went", by=("place",), where=WENT, cluster="context"),
    Mean(name="went_by_layer", of="went", by=("layer", "place"), cluster="context"),
    Mean(name="moved", of="moved", by=("place",), where=WENT, cluster="context"),
)
