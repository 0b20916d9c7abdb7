"""The reliance study: its estimands and its declaration."""

from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import Difference, Estimand, Mean, measure
from kvprobe.experiments.study import Claim, Conclusion, Control, Study
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.reliance import Config
from kvprobe.studies.reliance.collect import cases_of, collect, talk
from kvprobe.tidy import Rows
from kvprobe.wording import few_clusters

HEADLINE: dict[str, Any] = {
    "of": "gain",
    "together": (),
    "family": "headline",
    "cluster": "context",
    "unit": "nats",
}
OWN, OTHER, UNRELATED = ({"source": source, "word": "own"} for source in ("own", "other", "unrelated"))
GAINS: tuple[Estimand, ...] = (
    Mean(name="worse", where=OWN, **HEADLINE),
    Mean(name="masking", where=UNRELATED, **HEADLINE),
    Difference(name="relies", where=OWN, less=UNRELATED, **HEADLINE),
    Difference(name="poisoned", where={**OTHER, "word": "other"}, less={**UNRELATED, "word": "other"}, **HEADLINE),
    Difference(name="contradicted", where=OTHER, less=UNRELATED, of="gain", cluster="context", unit="nats"),
    Mean(name="gain", of="gain", by=("source", "word"), cluster="context", unit="nats"),
)
"""`gain`: log-probability of an answer after the retained summary less that after the recomputed one."""
LEVELS: tuple[Estimand, ...] = (
    Mean(name="logprob", of="logprob", by=("source", "state", "word"), cluster="context", unit="nats"),
)


def conclude(rows: Rows, config: Config, model: Model) -> Conclusion:
    """Findings and facts of a run."""
    context, compaction = cases_of(config)[0]
    shown = {
        "chat": chat_record(talk(context, compaction, "own"), masked=HIDDEN_SEGMENTS),
        "own": compaction.summary_answer,
        "other": compaction.summary_other,
        "contexts": int(rows["context"].nunique()),
    }
    findings = measure(rows, LEVELS, (gains(rows), GAINS))
    return Conclusion(findings, [same_alone(rows, model)], shown, few_clusters(shown["contexts"], "conversations"))


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


def gains(rows: Rows) -> pd.DataFrame:
    """What each answer gains where the summary is retained instead of recomputed, by conversation and source."""
    keys = ["context", "source", "word"]
    by_state = rows.pivot(index=keys, columns="state", values="logprob")
    return (by_state["retained"] - by_state["recomputed"]).rename("gain").reset_index()


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
            styles={"own": Style("#0072b2"), "other": Style("#d55e00", "s")},
            caption="Log-probability of an answer after the retained summary less that after the recomputed one. 95 % "
            "intervals over conversations.",
        ),
    ),
    claims=(
        Claim("worse", above="raises", below="lowers", unclear="does not detectably change"),
        Claim("masking", above="raises it", below="lowers it", unclear="was not detected to change it"),
        Claim(
            "relies",
            above="gains more (or loses less), the opposite of reliance",
            below="gains less (or loses more), as reliance would have it",
            unclear="gains no detectably different amount, so no reliance was detected",
        ),
        Claim(
            "poisoned",
            above="gains more, as poison would have it",
            below="gains less, the opposite of poison",
            unclear="gains no detectably different amount, so no poison was detected",
        ),
    ),
    labels={
        "source": {"own": "the same answer", "other": "another answer", "unrelated": "something else"},
        "word": {"own": "the summary's answer", "other": "the other answer"},
        "state": {"view": "in view", "retained": "hidden, summary retained", "recomputed": "hidden, recomputed"},
    },
)
