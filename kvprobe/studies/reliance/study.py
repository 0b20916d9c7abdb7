"""The reliance study: its estimands and its declaration."""

from collections.abc import Mapping
from typing import Any

import numpy as np
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
from kvprobe.wording import few_clusters, percent, points

OF_GAINS: dict[str, Any] = {"of": "gain", "cluster": "context", "unit": "nats"}
BY_WHEN: dict[str, Any] = {**OF_GAINS, "by": ("when",), **HEADLINE}
NATURAL = {"lead": "model"}
"""The headline's answers follow the model's own lead, where it has one: after ours they may be very unlikely."""


def beside_unrelated(name: str, word: str, source: str) -> Difference:
    """How much more retaining gains where the turns spoke of this than where they spoke of something else."""
    where, less = ({**NATURAL, "word": word, "source": turns} for turns in (source, "unrelated"))
    return Difference(name=name, where=where, less=less, **BY_WHEN)


GAINS: tuple[Estimand, ...] = (
    Mean(name="worse", where={**NATURAL, "word": "own", "source": "own"}, **BY_WHEN),
    beside_unrelated("relies", "margin", "own"),
    beside_unrelated("poisoned", "margin", "other"),
    beside_unrelated("general", "other", "own"),
    beside_unrelated("reworded", "own", "reworded"),
    Mean(name="gain", by=("turns", "lead", "source", "word"), **OF_GAINS),
)
"""`gain`: log-probability of an answer after the retained summary less that after the recomputed one. The `margin` is
that of the summary's answer less that of the other one: what they have in common, such as how readily the model answers
at all, is not in it."""
LEVELS: tuple[Estimand, ...] = (
    Mean(name="logprob", of="logprob", by=("turns", "lead", "source", "state", "word"), cluster="context", unit="nats"),
)
UNDONE: tuple[Estimand, ...] = (
    Mean(
        name="undone", of="undone", by=("when", "band", "part"), where=NATURAL, cluster="context", unit="nats",
        together=(),
    ),
)  # fmt: skip
"""What is added to the log-probability of the summary's answer where the turns stated it too."""
REPLIES: tuple[Estimand, ...] = (
    Mean(name="right", of="right", by=("turns", "source", "state"), cluster="context"),
    Difference(
        name="price", of="gain", by=("when",), where={"source": "own"}, less={"source": "unrelated"},
        cluster="context", within=(-1.0, 1.0), **HEADLINE,
    ),
    Mean(name="price_by_turns", of="gain", by=("turns", "source"), cluster="context", within=(-1.0, 1.0)),
)  # fmt: skip
"""`price`: the share of right replies with the retained summary less that with the recomputed one, beside the same
where the turns spoke of something else."""


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    rows, exchanged, replies = (with_when(tables[name]) for name in ("samples", "exchanged", "replies"))
    first = stated_twice(config.contexts)[0]
    natural = rows[(rows["lead"] == "model") & (rows["words"] != LEAD)]
    shown = {
        "chat": chat_record(first.talk("own", "own", max(config.turns)), masked=HIDDEN_SEGMENTS),
        "own_leads": {turns: len(set(natural.loc[natural["turns"] == turns, "context"])) for turns in config.turns},
        **first.answers,
        "contexts": len(set(rows["context"])),
    }
    findings = measure(
        rows, LEVELS, (gains(rows), GAINS), (exchanged, UNDONE), (reply_gains(replies), REPLIES[1:]),
        (replies, REPLIES[:1]),
    )  # fmt: skip
    controls = [same_alone(rows, model), whole_exchanged(rows, exchanged, model)]
    return Conclusion(findings, controls, shown, few_clusters(shown["contexts"], "conversations"))


def with_when(rows: Rows) -> pd.DataFrame:
    """Whether the question came `at once` or `later`."""
    return rows.assign(when=np.where(rows["turns"] > 0, "later", "at once"))


def same_alone(rows: Rows, model: Model) -> Control:
    """Summaries that are computed again have seen neither turns, so they do not depend on them."""
    again = rows[(rows["state"] == "recomputed") & rows["source"].isin(["own", "unrelated"])]
    one, other = (again[again["source"] == source]["logprob"].to_numpy() for source in ("own", "unrelated"))
    off = float(abs(one - other).max() / abs(one).max())
    return Control(
        f"Computed again, the summaries are the same whatever was hidden: log-probabilities differ by at most "
        f"{off:.1e} of the largest (allowed: {model.round_off:.1e}).",
        off <= model.round_off,
    )


def whole_exchanged(rows: Rows, exchanged: Rows, model: Model) -> Control:
    """Where K and V of all layers are exchanged, the retained summaries are the recomputed ones."""
    cell = ["context", "turns", "lead"]
    whole = exchanged[(exchanged["band"] == EVERY_LAYER) & (exchanged["part"] == "KV")].set_index(cell)["undone"]
    asked = rows[(rows["source"] == "own") & (rows["word"] == "own")].set_index(["state", *cell])["logprob"]
    off = float((whole + asked["retained"] - asked["recomputed"]).abs().max() / asked.abs().max())
    return Control(
        f"Exchanged in all layers, K and V give what the recomputed summaries give: log-probabilities differ by at "
        f"most {off:.1e} of the largest (allowed: {10 * model.round_off:.1e}).",
        off <= 10 * model.round_off,
    )


def gains(rows: Rows) -> pd.DataFrame:
    """What each answer, and the margin between them, gains where the summary is retained instead of recomputed."""
    keys = ["context", "when", "turns", "lead", "source", "word"]
    by_state = rows.pivot(index=keys, columns="state", values="logprob")
    by_word = (by_state["retained"] - by_state["recomputed"]).unstack("word")
    by_word["margin"] = by_word["own"] - by_word["other"]
    return by_word.stack().rename("gain").reset_index()


def reply_gains(replies: Rows) -> pd.DataFrame:
    """What right replies gain where the summary is retained instead of recomputed."""
    by_state = replies.pivot(index=["context", "when", "turns", "source"], columns="state", values="right")
    return (by_state["retained"] - by_state["recomputed"]).rename("gain").reset_index()


STUDY = Study(
    name="reliance",
    title="The price of having seen: is a summary that was read with its source in view a worse source without it?",
    question=(
        "A summary that was read with its source in view may give fewer right answers, once the source is hidden, than "
        "the same words read alone. At once, or later? Because it left out what the source held (reliance), because "
        "what the source said still shows (poison), or neither?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="answers_by_source",
            finding="gain",
            x="turns",
            x_label="exchanges between summary and question",
            y_label="gain by retaining (nats)",
            line="source",
            panel="word",
            where=NATURAL,
            styles={
                "own": Style("#0072b2"),
                "reworded": Style("#56b4e9", "v"),
                "other": Style("#d55e00", "s"),
                "unrelated": Style("#7f7f7f", "D"),
            },
            caption="Log-probability of an answer, and the margin between the two, after the retained summary less "
            "those after the recomputed one, by what the hidden turns said; after the model's own lead. 95 % intervals "
            "over conversations.",
        ),
        Lines(
            file="right_by_turns",
            finding="right",
            x="turns",
            x_label="exchanges between summary and question",
            y_label="right replies",
            line="state",
            panel="source",
            limits=(0.0, 1.0),
            styles={
                "view": Style("#000000", "D"),
                "retained": Style("#d55e00", "s"),
                "recomputed": Style("#0072b2"),
            },
            caption="Greedy replies that hold the right words. 95 % intervals over conversations.",
        ),
        Lines(
            file="undone_by_band",
            finding="undone",
            x="band",
            x_label="layers",
            y_label="gain by the exchange (nats)",
            line="part",
            panel="when",
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
            unclear="does not detectably change",
        ),
        Claim(
            "poisoned",
            above="rises, the opposite of poison",
            below="falls, as poison would have it",
            unclear="does not detectably change",
        ),
        Claim("general", above="gains", below="loses too", unclear="does not detectably lose"),
        Claim("reworded", above="raises", below="lowers", unclear="does not detectably change"),
        Claim("price", above="raises", below="lowers", unclear="does not detectably change"),
        Claim("undone", above="gives back", below="takes more"),
    ),
    labels={
        "n": "{} conversations".format,
        "source": {
            "own": "the same answer",
            "reworded": "the same in other words",
            "other": "another answer",
            "unrelated": "something else",
        },
        "word": {"own": "the summary's answer", "other": "the other answer", "margin": "the margin"},
        "lead": {"ours": f"after “{LEAD}”", "model": "after the model's own lead"},
        "band": {EVERY_LAYER: "all"},
        "part": {"KV": "K and V"},
        "state": {"view": "in view", "retained": "hidden, summary retained", "recomputed": "hidden, recomputed"},
    },
    written={"right": percent, "price": points, "price_by_turns": points},
)
