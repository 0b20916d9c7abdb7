"""From readings to findings: does an edit do the same in both engines, beyond what llama.cpp's rounding does anyway?

llama.cpp rounds activations to 8 bits where weights have 4. So two readings of one text differ a little: by KL `apart`
from transformers even where nothing was edited. A condition is `beyond` that by what it is further apart than the
visible text read anew. A KL between two conditions is raised by the rounding of both, by how much cannot be said: KL
does not add up, and in a distance that obeys the triangle inequality (Hellinger's), what both readings are apart bounds
any difference between the engines, whatever an edit does. So the `gap` between the engines is given beside the KL
between two ways to one cache, and no verdict on it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import Estimand, Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import POSITIVE, SHARE
from kvprobe.studies.engines import Config
from kvprobe.studies.engines.collect import CLOSED, CONTROL, FULL, HERE, HIDDEN, MASKED, NAIVE, PAIRS, RESTART, SHIFTED
from kvprobe.tasks.facts import conversation, facts
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters

EXACT = 1e-5
"""The most nats between the engines where neither rounds."""
SAME_SHIFT = {"exact": 1e-5, "f32": 1e-5, "f16": 1e-3, "q8_0": 2e-2}
"""How far keys may be off after two ways to rotate them, relative to their length: rounding of the cache's type."""
WITHOUT = (MASKED, CLOSED, SHIFTED, NAIVE)
"""Conditions in which the turn was taken out after it was read."""
ROUNDING = ("f32", "f16", "q8_0")
BETWEEN = tuple(name for name in PAIRS if name != "rounding")

OF_READINGS: tuple[Estimand, ...] = (
    Mean(name="margin", of="margin", by=("engine", "condition"), unit="nats"),
    Mean(name="answered", of="answered", by=("engine", "condition"), within=SHARE),
    Mean(name="apart", of="kl", by=("engine", "condition"), within=POSITIVE, unit="nats"),
    Mean(name="agrees", of="agrees", by=("engine", "condition"), within=SHARE),
    Mean(
        name="known", of="known", by=("engine", "condition"), where={"condition": WITHOUT, "engine": (HERE, *ROUNDING)},
        unit="nats", together=(),
    ),
    Mean(
        name="beyond", of="beyond", by=("engine", "condition"), where={"condition": WITHOUT, "engine": ROUNDING},
        unit="nats", together=(),
    ),
    Mean(
        name="carried", of="carried", by=("engine", "condition"), where={"condition": WITHOUT, "engine": ROUNDING},
        unit="nats", together=(),
    ),
)  # fmt: skip
OF_PAIRS: tuple[Estimand, ...] = (
    Mean(name="distance", of="kl", by=("engine", "pair"), within=POSITIVE, unit="nats"),
    Mean(name="gap", of="gap", by=("engine", "pair"), where={"pair": BETWEEN, "engine": ROUNDING}, unit="nats"),
)  # fmt: skip


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    return concluded(tables, config)


def concluded(tables: Mapping[str, pd.DataFrame], config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    findings = findings_of(tables)
    fact = facts(config.kinds[:1])[0]
    shown: dict[str, Any] = {
        "chat": chat_record(conversation(fact, fact.values[0]), masked=(HIDDEN,)),
        "engines": [engine for engine in config.engines if engine in ROUNDING],
        "exact": "exact" in config.engines,
    }
    count = findings.at("margin", engine=HERE, condition=FULL).clusters
    return Conclusion(findings, [*controls_of(findings, config)], shown, few_clusters(count, "conversations"))


def findings_of(tables: Mapping[str, Rows]) -> Findings:
    """All numbers of a run, from the tables of `collect`."""
    readings = with_differences(tables["samples"])
    findings = measure(readings, OF_READINGS, (with_gaps(tables["pairs"]), OF_PAIRS))
    there = readings[readings["engine"] != HERE]
    for engine, rows in there.groupby("engine", sort=False):
        findings.number("largest", rows["kl"].max(), "nats", engine=str(engine))
        findings.number("off", rows["off"].max(), engine=str(engine))
    return findings


def with_differences(readings: Rows) -> Rows:
    """Readings, with what the engine still knows of the fact beside the restart (`known`), how much further from
    transformers they are than the restart (`beyond`), and the change of the margin from the full view less that in
    transformers (`carried`)."""
    by_engine = ("sample", "engine")
    rows = readings.assign(
        same=readings["condition"].replace({SHIFTED: CLOSED}),
        known=readings["margin"] - beside(readings, "margin", {"condition": RESTART}, by_engine),
        beyond=readings["kl"] - beside(readings, "kl", {"condition": RESTART}, by_engine),
        moved=readings["margin"] - beside(readings, "margin", {"condition": FULL}, by_engine),
    )
    return rows.assign(carried=rows["moved"] - beside(rows, "moved", {"engine": HERE}, ("sample", "same")))


def with_gaps(pairs: Rows) -> Rows:
    """KL between conditions, with its `gap` to that in transformers."""
    return pairs.assign(gap=pairs["kl"] - beside(pairs, "kl", {"engine": HERE}, ("sample", "pair")))


def controls_of(findings: Findings, config: Config) -> Iterator[Control]:
    if "exact" in config.engines:
        most = findings.at("largest", engine="exact").mean
        yield Control(
            "With weights and cache in f32, which neither engine rounds, llama.cpp is at most "
            f"{most:.1e} nats from transformers under any condition (allowed: {EXACT:g}).",
            most <= EXACT,
        )
    off = {engine: findings.at("off", engine=engine).mean for engine in config.engines}
    yield Control(
        "llama.cpp's own context shift leaves K and V as eviction and re-indexing do, relative to their length: "
        f"{', '.join(f'{number:.1e} off ({engine})' for engine, number in off.items())}.",
        all(number <= SAME_SHIFT[engine] for engine, number in off.items()),
    )
    engines = (HERE, *config.engines)
    left = min(findings.at("margin", engine=engine, condition=CONTROL).mean for engine in engines)
    gone = max(findings.at("margin", engine=engine, condition=MASKED).mean for engine in engines)
    yield Control(
        f"Masking another turn leaves the fact at least {left:.2f} nats ahead of its stand-in in every engine, masking "
        f"its own at most {gone:.2f}.",
        left > gone,
    )
