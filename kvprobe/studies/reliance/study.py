"""The reliance study: its estimands and its declaration."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, Mean, measure
from kvprobe.experiments.study import Claim, Conclusion, Control, Study
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.reliance import Config
from kvprobe.studies.reliance.collect import collect
from kvprobe.studies.reliance.stated_twice import LEAD, stated_twice
from kvprobe.tidy import Rows
from kvprobe.wording import few_clusters

OF_GAINS: dict[str, Any] = {"of": "gain", "cluster": "context", "unit": "nats"}


def beside_unrelated(name: str, word: str, source: str) -> Difference:
    """How much more retaining gains where the turns spoke of this than where they spoke of something else."""
    where, less = ({"word": word, "source": turns} for turns in (source, "unrelated"))
    return Difference(name=name, where=where, less=less, **OF_GAINS, **HEADLINE)


GAINS: tuple[Estimand, ...] = (
    Mean(name="worse", where={"word": "own", "source": "own"}, **OF_GAINS, **HEADLINE),
    beside_unrelated("relies", "margin", "own"),
    beside_unrelated("poisoned", "margin", "other"),
    beside_unrelated("general", "other", "own"),
    Mean(name="gain", by=("source", "word"), **OF_GAINS),
)
"""`gain`: log-probability of an answer after the retained summary less that after the recomputed one. The `margin` is
that of the summary's answer less that of the other one: what they have in common, such as how readily the model answers
at all, is not in it."""
LEVELS: tuple[Estimand, ...] = (
    Mean(name="logprob", of="logprob", by=("source", "state", "word"), cluster="context", unit="nats"),
)


UNDONE: tuple[Estimand, ...] = (
    Mean(name="undone", of="undone", by=("band", "part"), cluster="context", unit="nats", together=()),
)
"""What is added to the log-probability of the summary's answer where the turns stated it too."""


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    rows, exchanged = tables["samples"], tables["exchanged"]
    first = stated_twice(config.contexts)[0]
    shown = {
        "chat": chat_record(first.talk("own", "own", config.turns), masked=HIDDEN_SEGMENTS),
        "own_leads": int(rows.groupby("context")["lead"].first().ne(LEAD).sum()),
        **first.answers,
        "contexts": int(rows["context"].nunique()),
    }
    findings = measure(rows, LEVELS, (gains(rows), GAINS), (exchanged, UNDONE))
    controls = [same_alone(rows, model), whole_exchanged(rows, exchanged, model)]
    return Conclusion(findings, controls, shown, few_clusters(shown["contexts"], "conversations"))


def same_alone(rows: Rows, model: Model) -> Control:
    """Summaries that are computed again have seen neither turns, so they do not depend on them."""
    again = rows[(rows["state"] == "recomputed") & (rows["source"] != "other")]
    one, other = (again[again["source"] == source]["logprob"].to_numpy() for source in ("own", "unrelated"))
    off = float(abs(one - other).max() / abs(one).max())
    return Control(
        f"Computed again, the summaries are the same whatever was hidden: log-probabilities differ by at most "
        f"{off:.1e} of the largest (allowed: {model.round_off:.1e}).",
        off <= model.round_off,
    )


def whole_exchanged(rows: Rows, exchanged: Rows, model: Model) -> Control:
    """Where K and V of all layers are exchanged, the retained summaries are the recomputed ones."""
    whole = exchanged[(exchanged["band"] == EVERY_LAYER) & (exchanged["part"] == "KV")].set_index("context")["undone"]
    asked = rows[(rows["source"] == "own") & (rows["word"] == "own")].set_index(["state", "context"])["logprob"]
    off = float((whole + asked["retained"] - asked["recomputed"]).abs().max() / asked.abs().max())
    return Control(
        f"Exchanged in all layers, K and V give what the recomputed summaries give: log-probabilities differ by at "
        f"most {off:.1e} of the largest (allowed: {10 * model.round_off:.1e}).",
        off <= 10 * model.round_off,
    )


def gains(rows: Rows) -> pd.DataFrame:
    """What each answer, and the margin between them, gains where the summary is retained instead of recomputed."""
    keys = ["context", "source", "word"]
    by_state = rows.pivot(index=keys, columns="state", values="logprob")
    by_word = (by_state["retained"] - by_state["recomputed"]).unstack("word")
    by_word["margin"] = by_word["own"] - by_word["other"]
    return by_word.stack().rename("gain").reset_index()


STUDY = Study(
    name="reliance",
    title="Does a summary rely on its source, or is it poisoned by it?",
    question=(
        "A summary that was read with its source in view gives fewer right answers, once the source is hidden, than "
        "the same words read alone. Because it left out what the source held (reliance), because what the source said "
        "still shows (poison), or neither?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="answers_by_source",
            finding="gain",
            x="source",
            x_label="what the hidden turns said",
            y_label="gain by retaining (nats)",
            line="word",
            styles={"own": Style("#0072b2"), "other": Style("#d55e00", "s"), "margin": Style("#009e73", "D")},
            caption="Log-probability of an answer, and the margin between the two, after the retained summary less "
            "those after the recomputed one. 95 % intervals over conversations.",
        ),
        Lines(
            file="undone_by_band",
            finding="undone",
            x="band",
            x_label="layers",
            y_label="gain by the exchange (nats)",
            line="part",
            styles={"K": Style("#0072b2"), "V": Style("#d55e00", "s"), "KV": Style("#009e73", "D")},
            caption="Log-probability of the summary's answer, where the hidden turns stated it too, after K or V of "
            "some layers of the retained summaries was exchanged for what was computed again, less that before. 95 % "
            "intervals over conversations.",
        ),
    ),
    claims=(
        Claim("worse", above="raises", below="lowers", unclear="does not detectably change"),
        Claim(
            "relies",
            above="rises, the opposite of reliance",
            below="falls, as reliance would have it",
            unclear="does not detectably change, so no reliance was detected",
        ),
        Claim(
            "poisoned",
            above="rises, the opposite of poison",
            below="falls, as poison would have it",
            unclear="does not detectably change, so no poison was detected",
        ),
        Claim(
            "general",
            above="gains",
            below="loses too, so that something is at work that is neither",
            unclear="does not detectably lose",
        ),
        Claim("undone", above="gives back", below="takes more"),
    ),
    labels={
        "source": {"own": "the same answer", "other": "another answer", "unrelated": "something else"},
        "word": {"own": "the summary's answer", "other": "the other answer", "margin": "the margin"},
        "band": {EVERY_LAYER: "all"},
        "part": {"KV": "K and V"},
        "state": {"view": "in view", "retained": "hidden, summary retained", "recomputed": "hidden, recomputed"},
    },
)
