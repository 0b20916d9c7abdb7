"""From rows to findings: drift by turn, by cause and by distance, each with its interval over sessions."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Difference, Mean, Pooled, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import POSITIVE, SHARE, UNBOUNDED
from kvprobe.studies.idle_rebuild import Config
from kvprobe.studies.idle_rebuild.collect import CONTROLS
from kvprobe.studies.idle_rebuild.removals import AFTER, REMOVALS, Removal
from kvprobe.tasks.sessions import sessions
from kvprobe.tidy import Rows, Where, beside, chosen
from kvprobe.wording import few_clusters

SHOWN = ("kept", "compacted", "in_place", "rebuilt", "control")
"""Runs in tables and figures: `compacted` is the running one, `rebuilt` went idle after the removal, `control` last
before it."""
TURNS = {"all": AFTER, "new": AFTER[:1], "back": AFTER[1:]}
"""Turns after the removal: all, the one that opens a new topic, those that ask back."""
ENOUGH = 0.75
"""Share of replies that must be long enough for a token's place in the reply to be shown."""

COMPACTED: Where = {"reference": "compacted"}
ANSWER: dict[str, Any] = {"together": ("turns",), "family": "answer", "unit": "nats"}
"""Drift, cost, cause and healing: the answer claims all four, so their intervals hold together."""


def _less(name: str, of: str, first: Where, second: Where, **more: Any) -> Difference:
    """One run less another, by turns; from the compacted run, unless another reference is named."""
    return Difference(
        name=name, of=of, by=("turns",), where={**COMPACTED, **first}, less={**COMPACTED, **second}, **more
    )


OF_TURNS = (
    _less("drift", "kl", {"run": "rebuilt"}, {"run": "control"}, **ANSWER),
    _less("cost", "nll", {"run": "rebuilt"}, {"run": "compacted"}, **ANSWER),
    _less("cause", "kl", {"run": "in_place"}, {"run": "rebuilt", "reference": "in_place"}, **ANSWER),
    *(
        _less("surprise_over", "nll", {"run": run}, {"run": than}, keys={"run": run, "than": than}, unit="nats")
        for run, than in (
            ("in_place", "compacted"),
            ("rebuilt", "in_place"),
            ("compacted", "kept"),
            ("rebuilt", "kept"),
        )
    ),
    _less(
        "nearer_to_kept", "kl", *({"run": run, "reference": "kept"} for run in ("rebuilt", "compacted")), unit="nats"
    ),
    Mean(name="kl", of="kl", by=("turns", "reference", "run"), within=POSITIVE, unit="nats"),
    Mean(name="agreement", of="agrees", by=("turns", "reference", "run"), within=SHARE),
    Mean(name="surprise", of="nll", by=("turns", "run"), where=COMPACTED, unit="nats"),
)
OF_EACH_TURN = (
    *(
        Mean(
            name="by_turn",
            of=of,
            by=("run", "turn"),
            where={"reference": of_what},
            keys={"measure": measure},
            within=within,
            unit="nats",
        )
        for measure, of, of_what, within in (
            ("from_compacted", "kl", "compacted", POSITIVE),
            ("from_kept", "kl", "kept", POSITIVE),
            ("added", "added", "compacted", UNBOUNDED),
        )
    ),
    Mean(name="surprise_by_turn", of="nll", by=("run", "turn"), where=COMPACTED, unit="nats"),
)
OF_REBUILDS = (
    Mean(
        name="matrix",
        of="kl",
        by=("before", "turn"),
        where=COMPACTED,
        keys={"run": "rebuilt"},
        within=POSITIVE,
        unit="nats",
    ),
)
ASKED: Where = {"turn": AFTER[1:]}
OF_EARLY = (
    Ratio(name="healing", of="kl_by_read", over="spread", keys={"turns": "all"}, **ANSWER),
    Ratio(name="cost_healing", of="added_by_read", over="spread", unit="nats"),
    Mean(name="asked", of="kl", by=("turn", "read"), keys={"run": "rebuilt"}, within=POSITIVE, unit="nats"),
    Mean(
        name="asked_at",
        of="kl",
        by=("place",),
        where={**ASKED, "place": ("summary", "own")},
        within=POSITIVE,
        unit="nats",
    ),
    Difference(
        name="change", of="kl", where={**ASKED, "place": "own"}, less={**ASKED, "place": "summary"}, unit="nats"
    ),
)
OF_OWN = (
    Mean(name="own_kl", of="kl", by=("reference", "run"), within=POSITIVE, unit="nats"),
    Mean(name="own_agreement", of="agrees", by=("reference", "run"), within=SHARE),
    Mean(name="own_alike", of="alike", by=("reference", "run"), unit="tokens"),
    Mean(name="own_identical", of="identical", by=("reference", "run"), within=SHARE),
)
ALONG: Where = {
    **COMPACTED,
    "run": ("kept", "in_place", "rebuilt"),
    "reply": ("scripted", "own"),
    "turn": AFTER,
}
OF_TOKENS = (Pooled(name="along", of="kl", by=("reply", "run", "token"), within=POSITIVE, unit="nats"),)
# Where K and V cannot differ, all distances are 0: not shares, of which 0 would leave up to a fifth open.
OF_LAYERS = (Mean(name="distance", of="distance", by=("family", "layer", "segment"), within=UNBOUNDED),)


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    removal = REMOVALS[config.removed]
    findings = findings_of(tables, removal)
    findings.number("allowed", model.round_off)
    chat = chat_record(removal.conversation(sessions()[0]), masked=removal.hidden(AFTER[1]))
    facts = {
        "chat": list(takewhile(lambda passage: passage["segment"] != f"T{AFTER[2]}", chat)),
        "layers": model.geometry.n_layers,
        "window": model.geometry.shortest_window or 0,
    }
    few = few_clusters(int(findings.at("sessions").mean), "sessions")
    return Conclusion(findings, list(controls_of(findings, removal)), facts, few)


def findings_of(tables: Mapping[str, Rows], removal: Removal) -> Findings:
    """All numbers of a run, from the tables of `collect`."""
    samples, tokens = (tables[name].assign(run=run_of(tables[name])) for name in ("samples", "tokens"))
    scripted, early, unscripted = (samples[samples["reply"] == reply] for reply in ("scripted", "early", "own"))
    shown = over_compacted(scripted[scripted["run"].isin(SHOWN)])
    early = by_read(over_compacted(early))
    rebuilds = scripted.assign(before=rebuilt_before(scripted)).dropna(subset="before").astype({"before": int})
    grouped = [shown[shown["turn"].isin(turns)].assign(turns=name) for name, turns in TURNS.items()]
    findings = measure(
        pd.concat(grouped, ignore_index=True),
        OF_TURNS,
        (shown, OF_EACH_TURN),
        (rebuilds, OF_REBUILDS),
        (early, OF_EARLY),
        (unscripted.assign(identical=unscripted["alike"] >= unscripted["tokens"]), OF_OWN),
        (often(chosen(tokens, ALONG)), OF_TOKENS),
        (tables["layers"], OF_LAYERS),
    )
    add_checks(findings, tokens, scripted, tables["layers"], removal)
    count = samples["sample"].nunique()
    findings.number("sessions", count)
    findings.number("replies", count * len(AFTER))
    return findings


def run_of(rows: Rows) -> Rows:
    """The arm as SHOWN names it; other rebuilds keep their own name. `rebuilt` is the run last rebuilt by a turn."""
    before = rebuilt_before(rows)
    last = before == before.groupby(rows["turn"]).transform("max")
    return rows["arm"].mask(last & rows["turn"].isin(AFTER), "rebuilt").replace(f"rebuilt{CONTROLS[-1]}", "control")


def rebuilt_before(rows: Rows) -> Rows:
    """The turn before which an arm was rebuilt; NaN for one that was not, and for `rebuilt`, which does not say."""
    return rows["arm"].str.extract(r"^rebuilt(\d+)$", expand=False).astype(float)


def over_compacted(rows: Rows) -> Rows:
    """With the surprise that a run adds to the compacted one's."""
    compacted: Where = {**COMPACTED, "run": "compacted"}
    return rows.assign(added=rows["nll"] - beside(rows, "nll", compacted, ("sample", "turn", "read")))


def by_read(early: Rows) -> Rows:
    """The rebuilt run asked early, with what makes a slope: by least squares within each question, so that no two
    questions are compared."""
    rows = early[early["run"] == "rebuilt"]
    read = rows["read"] - rows.groupby(["sample", "turn"])["read"].transform("mean")
    place = np.select([rows["read"] == 0, rows["read"] == rows["turn"] - AFTER[0]], ["summary", "own"], "between")
    return rows.assign(place=place, kl_by_read=read * rows["kl"], added_by_read=read * rows["added"], spread=read**2)


def often(tokens: Rows) -> Rows:
    """The tokens at places that most replies reach."""
    replies = tokens["sample"].nunique() * len(AFTER)
    return tokens[tokens.groupby(["reply", "run", "token"])["kl"].transform("size") >= ENOUGH * replies]


def add_checks(findings: Findings, tokens: Rows, scripted: Rows, layers: Rows, removal: Removal) -> None:
    """What must be zero but for round-off, at its largest (`off`), and what it is to be compared with."""

    def largest(turns: Sequence[int] | None, reference: str) -> float:
        rows = before[before["reference"] == reference]
        return float((rows if turns is None else rows[rows["turn"].isin(turns)])["kl"].max())

    def distance(segments: tuple[str, ...], *at: int) -> float:
        return float(chosen(layers, {"segment": segments, "layer": at or every})["distance"].max())

    before = chosen(tokens, {"reply": "scripted", "arm": tuple(f"rebuilt{turn}" for turn in CONTROLS)})
    rebuilt: Where = {**COMPACTED, "turn": AFTER, "arm": tuple(f"rebuilt{turn}" for turn in AFTER)}
    whenever = chosen(scripted, rebuilt).groupby(["sample", "turn"])["kl"]
    spoken = tokens[(tokens["reply"] == "own") & (tokens["arm"] == tokens["reference"])]
    every = tuple(range(layers["layer"].max() + 1))
    off = {
        "from compacted": largest(None, "compacted"),
        "from kept": largest(CONTROLS, "kept"),
        **({"whenever": float((whenever.max() - whenever.min()).max())} if removal.once else {}),
        "system": distance(("system",)),
        "summary, layer 0": distance(removal.saw, 0),
        "turns, layers 0 and 1": distance(removal.later, 0, 1),
    }
    for check, value in off.items():
        findings.number("off", value, check=check)
    findings.number("deepest", distance(removal.saw, every[-1]), segment="summary")
    findings.number("deepest", distance(removal.later, every[-1]), segment="turns")
    findings.number("same_before", chosen(before, COMPACTED)["agrees"].mean())
    findings.number("said_again", spoken["agrees"].mean())


def controls_of(findings: Findings, removal: Removal) -> Iterator[Control]:
    allowed = findings.at("allowed").mean

    def control(seen: str, *checks: str) -> Control:
        off = [findings.at("off", check=check).mean for check in checks]
        return Control(seen.format(*(f"{value:.1e}" for value in off)), max(off) <= allowed)

    yield control(
        "Rebuilt before the removal, when everything was in view: at no token of any turn is the run further than {} "
        "nats from the running one, and before the removal {} from the kept one (allowed for round-off: "
        f"{allowed:.1e}); the same token is likeliest in {findings.at('same_before').mean:.2%} of places.",
        "from compacted",
        "from kept",
    )
    if removal.once:
        yield control(
            "Whenever rebuilt: runs rebuilt before different turns after the removal differ, at any turn, by at most "
            "{} nats per token.",
            "whenever",
        )
    deepest = [findings.at("deepest", segment=segment).mean for segment in ("summary", "turns")]
    yield control(
        "Light cone: rebuilt in place, K and V of the system prompt cannot differ from the running ones at any layer, "
        f"those of what saw the hidden text ({', '.join(removal.saw)}) not at layer 0, those of what came later not at "
        "layers 0 and 1. They do by {}, {} and {} of their size; at the last layer the latter two differ by up to "
        f"{deepest[0]:.2f} and {deepest[1]:.2f}.",
        "system",
        "summary, layer 0",
        "turns, layers 0 and 1",
    )
