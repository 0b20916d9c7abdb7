"""From scores to findings: who sees what, each detector at the same rate of false alarms.

A detector reports what scores above its threshold: the largest score on sound caches of other prompts, or below it as
far as the rate of false alarms allows. Sound caches of its own prompts show how many it gives.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binom

from kvprobe.detection.reports import REPORTS
from kvprobe.experiments.estimands import Estimand, Mean, Pooled, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import DIFFERENCE, SHARE, binomial, conformal_rank
from kvprobe.studies.detection import COARSE, ROUNDING, Config
from kvprobe.tidy import Rows
from kvprobe.wording import few_clusters

BY_TEXT = ("text", "surprise")
"""Detectors that need no log-probabilities: what most tests of engines look at."""
DETECTORS = ("hash", *BY_TEXT, "logprob", "canary", "audit", "diff")
"""Columns of scores."""
PLACING = ("audit", "diff")
"""Detectors that name a layer and a block."""
PAIRS = {"rounding": ROUNDING, "8 bits too": (*ROUNDING, *COARSE)}
"""Which sound caches must not be reported."""
SILENT = 0.05
"""Nats by which a log-probability must move for a fault to matter."""
MOVED = (0.001, 0.01, SILENT, 0.2, 1.0)
"""Nats between which the severity of a fault is counted."""
MOVES = ("< 0.001", "0.001 to 0.01", "0.01 to 0.05", "0.05 to 0.2", "0.2 to 1", "> 1")
BENCHMARKS = (100, 1319)
"""Items of a benchmark whose score is compared with the sound one; GSM8K has 1,319."""


def threshold(scores: pd.Series, alarms: float) -> float:
    """The score that a new sound cache exceeds in at most `alarms` percent of the cases."""
    return float(np.sort(scores.to_numpy(float))[conformal_rank(len(scores), alarms / 100) - 1])


def verdicts(table: Rows, config: Config) -> Rows:
    """A row per cache, detector and kind of pairs: whether it is reported (`seen`). The threshold of prompts of even
    number comes from sound caches of the odd ones, and the reverse."""
    judged: list[Rows] = []
    for pairs, ways in PAIRS.items():
        if pairs != "rounding":  # where 8 bits are meant, what a diff calls quantisation is no report
            table = table.assign(diff=table["diff"].where(table["diff_kind"] != "quantisation", 0.0))
        sound = table["bug"].isin(ways)
        for detector in DETECTORS:
            for odd in (0, 1):
                own = table["sample"] % 2 == odd
                limit = threshold(table[~own & sound][detector], config.alarms)
                known = table[own & (sound | (table["size"] != ""))]
                seen = (known[detector] > limit).astype(float).where(known[detector].notna())
                judged.append(known.assign(detector=detector, pairs=pairs, limit=limit, seen=seen))
    return pd.concat(judged, ignore_index=True)


def placed(wrong: Rows) -> Rows:
    """For detectors that name places, and caches that they report: whether layer (the first) and block are right."""
    rows = [
        wrong[(wrong["detector"] == detector) & (wrong["seen"] == 1)].assign(
            layer_right=lambda some, by=detector: (some[f"{by}_layer"] == some["layer"]).astype(float),
            block_right=lambda some, by=detector: (
                (some[f"{by}_block"] >= some["block"]) & (some[f"{by}_block"] < some["block"] + some["blocks"])
            ).astype(float),
        )
        for detector in PLACING
    ]
    canary = wrong[(wrong["detector"] == "canary") & (wrong["seen"] == 1)]
    return pd.concat([*rows, canary.assign(layer_right=np.nan, block_right=canary["canary_right"])], ignore_index=True)


def beside_others(wrong: Rows) -> Rows:
    """Whether a detector alone reports a wrong cache (`alone`), none does (`nobody`), or it matters and neither its
    text nor its perplexity is reported (`silent`)."""
    by_cache = ["pairs", "sample", "bug", "size"]
    others = wrong.assign(by_text=wrong["seen"].where(wrong["detector"].isin(BY_TEXT), 0.0)).groupby(by_cache)
    seeing, by_text = others["seen"].transform("sum"), others["by_text"].transform("sum")
    return wrong.assign(
        alone=wrong["seen"] * (seeing == 1),
        nobody=(seeing == 0).astype(float),
        silent=wrong["matters"] * (by_text == 0),
    )


ALARMS: tuple[Estimand, ...] = (
    Pooled(name="alarms", of="seen", by=("detector", "pairs"), within=SHARE),
    Pooled(name="alarms_by_way", of="seen", by=("detector", "pairs", "bug"), within=SHARE),
)
OWN = (Pooled(name="own_alarms", of="diff_alarm", by=("bug",), within=SHARE),)
SEEN: tuple[Estimand, ...] = (
    Pooled(name="seen", of="seen", by=("detector", "pairs", "size"), within=SHARE),
    Pooled(name="seen_by_kind", of="seen", by=("detector", "pairs", "size", "kind"), within=SHARE),
    Pooled(name="seen_by_bug", of="seen", by=("detector", "pairs", "size", "bug"), within=SHARE),
    Pooled(name="seen_by_base", of="seen", by=("detector", "pairs", "base"), within=SHARE),
    Pooled(name="seen_where_it_matters", of="seen", by=("detector", "pairs", "size"), where={"matters": True},
           within=SHARE),
    Pooled(name="seen_in_silence", of="seen", by=("detector", "pairs"), where={"silent": True}, within=SHARE),
)  # fmt: skip
BY_MOVE = (Pooled(name="seen_by_move", of="seen", by=("detector", "pairs", "moved"), within=SHARE),)
PLACED: tuple[Estimand, ...] = (
    Pooled(name="layer_right", of="layer_right", by=("detector", "pairs", "size"), within=SHARE),
    Pooled(name="block_right", of="block_right", by=("detector", "pairs", "size"), within=SHARE),
)
ALONE: tuple[Estimand, ...] = (
    Pooled(name="alone", of="alone", by=("detector", "size"), within=SHARE),
    Pooled(name="alone_by_bug", of="alone", by=("detector", "bug"), within=SHARE),
    Pooled(name="alone_where_it_matters", of="alone", by=("detector",), where={"matters": True}, within=SHARE),
)
AHEAD: tuple[Estimand, ...] = tuple(
    Pooled(
        name="ahead", of="seen", by=("size",), keys={"detector": detector}, within=DIFFERENCE, together=(),
        where={"detector": detector, "pairs": "rounding"}, less={"detector": "text", "pairs": "rounding"},
    )
    for detector in DETECTORS if detector != "text"
)  # fmt: skip
OF_CACHES: tuple[Estimand, ...] = (
    Pooled(name="matters", of="matters", by=("size",), within=SHARE),
    Pooled(name="matters_by_bug", of="matters", by=("size", "bug"), within=SHARE),
    Pooled(name="silent", of="silent", by=("size",), within=SHARE),
    Pooled(name="silent_by_bug", of="silent", by=("size", "bug"), within=SHARE),
    Pooled(name="nobody", of="nobody", by=("size",), within=SHARE),
    Pooled(name="nobody_by_bug", of="nobody", by=("bug",), within=SHARE),
    Pooled(name="kind_right", of="kind_right", by=("size",), within=SHARE),
    Mean(name="accuracy", of="right", by=("size",), within=SHARE),
    Mean(name="accuracy_by_bug", of="right", by=("size", "bug"), within=SHARE),
)


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    return concluded(table, config)


def concluded(table: Rows, config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    table = table.assign(
        matters=(table["logprob"] > SILENT).astype(float),
        moved=np.array(MOVES)[np.digitize(table["logprob"], MOVED)],
        right=table["right"].astype(float),
        kind_right=(table["diff_kind"] == table["kind"]).astype(float),
    )
    judged = verdicts(table, config)
    wrong, sound = beside_others(judged[judged["size"] != ""]), judged[judged["size"] == ""]
    rounding = wrong[wrong["pairs"] == "rounding"]
    caches = rounding[rounding["detector"] == "hash"]
    own = sound[(sound["detector"] == "hash") & (sound["pairs"] == "8 bits too")]
    findings = measure(
        sound, ALARMS, (own, OWN), (wrong, (*SEEN, *AHEAD)), (wrong.sort_values("logprob", kind="stable"), BY_MOVE),
        (placed(wrong), PLACED), (rounding, ALONE), (caches, OF_CACHES),
    )  # fmt: skip
    for name in MOVES:
        findings.number("moves", (caches["moved"] == name).sum(), moved=name)
    for (kind, called), rows in caches.groupby(["kind", "diff_kind"], sort=False):
        findings.number("called", len(rows), kind=str(kind), called=str(called))
    known = table[table["sample"] < config.samples]
    correct = float(known.groupby("sample")["was_right"].first().mean())
    findings.number("sound", correct)
    findings.number("planted", len(caches))
    findings.number("held_out", len(sound[(sound["detector"] == "hash") & (sound["pairs"] == "rounding")]))
    asked = len(config.bugs or [bug for bug in REPORTS.values() if not bug.benign]) * len(config.sizes)
    findings.number("left_out", asked * caches["sample"].nunique() - len(caches))
    findings.number("silent_nats", SILENT)
    for items in BENCHMARKS:
        add_benchmark(findings, caches, correct, items, config.alarms)
    for (pairs, detector), limits in judged.groupby(["pairs", "detector"], sort=False)["limit"]:
        findings.number("limit", float(limits.max()), detector=str(detector), pairs=str(pairs))
    facts: dict[str, Any] = {
        "detectors": list(DETECTORS),
        "bugs": list(dict.fromkeys(caches["bug"])),
        "sizes": list(dict.fromkeys(caches["size"])),
        "slots": [int(table["slots"].min()), int(table["slots"].max())],
    }
    unstruck = caches[(caches["blocks"] == 0) | (caches["hash"] == 0)]
    control = Control(
        f"Of {len(caches)} planted bugs {len(caches) - len(unstruck)} change the bytes of the cache.", not len(unstruck)
    )
    return Conclusion(findings, [control], facts, [*few_clusters(config.samples, "prompts in which bugs are planted")])


def add_benchmark(findings: Findings, caches: Rows, correct: float, items: int, alarms: float) -> None:
    """The loss of right answers that a score over so many items shows, and the share of bugs that cost as much, with
    its interval over bugs.

    A score is reported where it is lower than chance takes a sound cache's in `alarms` percent of the cases.
    """
    needed = correct - (binom.ppf(alarms / 100, items, correct) - 1) / items
    findings.number("needed", needed, items=items)
    lost = caches.assign(lost=caches["was_right"].astype(float) - caches["right"])
    for size, rows in lost.groupby("size", sort=False):
        seen = rows.groupby("bug")["lost"].mean() >= needed
        share = binomial(int(seen.sum()), len(seen))
        findings.add(Finding("seen_by_score", {"size": str(size), "items": items}, share))
