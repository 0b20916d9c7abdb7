"""From scores to findings: who sees what, each detector at the same rate of false alarms.

A detector reports what scores above its threshold: the largest score on sound caches of the prompts set aside for this,
or below it as far as the rate of false alarms allows. What is reported is of the other prompts.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binom

from kvprobe.detection.reports import REPORTS
from kvprobe.experiments.estimands import Estimand, Mean, Pooled, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE, conformal_rank
from kvprobe.studies.detection import COARSE, ROUNDING, Config
from kvprobe.tidy import Rows
from kvprobe.wording import few_clusters

ON_OUTPUT = ("text", "surprise", "logprob")
BY_TEXT = ("text", "surprise")
"""Detectors that need no log-probabilities: what most tests of engines look at."""
DETECTORS = ("hash", *ON_OUTPUT)
"""Columns of scores."""
PAIRS = {"rounding": ROUNDING, "8 bits too": (*ROUNDING, *COARSE)}
"""Which sound caches must not be reported."""
SILENT = 0.05
"""Nats by which a log-probability must move for a fault to matter."""
BENCHMARKS = (100, 1319)
"""Items of a benchmark whose score is compared with the sound one; GSM8K has 1,319."""


def threshold(scores: pd.Series, alarms: float) -> float:
    """The score that a new sound cache exceeds in at most `alarms` percent of the cases."""
    return float(np.sort(scores.to_numpy(float))[conformal_rank(len(scores), alarms / 100) - 1])


def verdicts(table: Rows, config: Config) -> Rows:
    """A row per cache of the prompts that are reported, detector and kind of pairs: whether it is reported (`seen`)."""
    even = table["sample"] % 2 == 0
    told: list[Rows] = []
    for pairs, ways in PAIRS.items():
        for detector in DETECTORS:
            calibrating = table[even & table["bug"].isin(ways)][detector]
            limit = threshold(calibrating, config.alarms)
            known = table[~even & ((table["size"] != "") | table["bug"].isin(ways))]
            seen = (known[detector] > limit).astype(float)
            told.append(known.assign(detector=detector, pairs=pairs, limit=limit, seen=seen))
    return pd.concat(told, ignore_index=True)


ALARMS: tuple[Estimand, ...] = (
    Pooled(name="alarms", of="seen", by=("detector", "pairs"), within=SHARE),
    Pooled(name="alarms_by_way", of="seen", by=("detector", "pairs", "bug"), within=SHARE),
)
SEEN: tuple[Estimand, ...] = (
    Pooled(name="seen", of="seen", by=("detector", "pairs", "size"), within=SHARE),
    Pooled(name="seen_by_kind", of="seen", by=("detector", "pairs", "size", "kind"), within=SHARE),
    Pooled(name="seen_by_bug", of="seen", by=("detector", "pairs", "size", "bug"), within=SHARE),
    Pooled(name="seen_where_it_matters", of="seen", by=("detector", "pairs", "size"), where={"matters": True},
           within=SHARE),
)  # fmt: skip
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
    Mean(name="accuracy", of="right", by=("size",), within=SHARE),
    Mean(name="accuracy_by_bug", of="right", by=("size", "bug"), within=SHARE),
)


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    return concluded(table, config)


def concluded(table: Rows, config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    table = table.assign(matters=(table["logprob"] > SILENT).astype(float), right=table["right"].astype(float))
    judged = verdicts(table, config)
    wrong, sound = judged[judged["size"] != ""], judged[judged["size"] == ""]
    caches = wrong[(wrong["detector"] == "hash") & (wrong["pairs"] == "rounding")]
    by_text = wrong[wrong["detector"].isin(BY_TEXT) & (wrong["pairs"] == "rounding")]
    noticed = by_text.groupby(["sample", "bug", "size"])["seen"].max()
    keys = pd.MultiIndex.from_frame(caches[["sample", "bug", "size"]])
    caches = caches.assign(silent=caches["matters"] * (1 - noticed.reindex(keys).to_numpy()))
    findings = measure(sound, ALARMS, (wrong, (*SEEN, *AHEAD)), (caches, OF_CACHES))
    correct = float(table.groupby("sample")["was_right"].first().mean())
    findings.number("sound", correct)
    findings.number("planted", len(caches))
    asked = len(config.bugs or [bug for bug in REPORTS.values() if not bug.benign]) * len(config.sizes)
    findings.number("left_out", asked * caches["sample"].nunique() - len(caches))
    findings.number("silent_nats", SILENT)
    for items in BENCHMARKS:
        add_benchmark(findings, caches, correct, items, config.alarms)
    for (pairs, detector), limits in judged.groupby(["pairs", "detector"], sort=False)["limit"]:
        findings.number("limit", float(limits.iloc[0]), detector=str(detector), pairs=str(pairs))
    facts: dict[str, Any] = {
        "detectors": list(DETECTORS),
        "bugs": list(dict.fromkeys(caches["bug"])),
        "sizes": list(dict.fromkeys(caches["size"])),
        "slots": [int(table["slots"].min()), int(table["slots"].max())],
    }
    unstruck = caches[(caches["struck"] == 0) | (caches["hash"] == 0)]
    control = Control(
        f"Of {len(caches)} planted bugs {len(caches) - len(unstruck)} change the bytes of the cache.", not len(unstruck)
    )
    return Conclusion(findings, [control], facts, [*few_clusters(config.samples // 2, "prompts that are reported")])


def add_benchmark(findings: Findings, caches: Rows, correct: float, items: int, alarms: float) -> None:
    """The loss of right answers that a score over so many items shows, and the share of bugs that cost as much.

    A score is reported where it is lower than chance takes a sound cache's in `alarms` percent of the cases.
    """
    needed = correct - (binom.ppf(alarms / 100, items, correct) - 1) / items
    findings.number("needed", needed, items=items)
    lost = caches.assign(lost=caches["was_right"].astype(float) - caches["right"])
    for size, rows in lost.groupby("size", sort=False):
        by_bug = rows.groupby("bug")["lost"].mean()
        findings.number("seen_by_score", float((by_bug >= needed).mean()), size=str(size), items=items)
