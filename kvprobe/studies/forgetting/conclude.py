"""From readings to findings: what each way leaves beside everything in view, and what it costs beside a restart."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvprobe.experiments.estimands import Estimand, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import POSITIVE, SHARE, UNBOUNDED
from kvprobe.studies.forgetting import Config
from kvprobe.studies.forgetting.cases import TURN, cases
from kvprobe.studies.forgetting.collect import holds, ways
from kvprobe.studies.forgetting.ways import CLEAN, MASK, NOTHING, OTHER, RESTART
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters

EXACT = 1e-4
"""How far a way done for many secrets at once may be from the same way done for one, by rounding."""
POWER = 0.5
"""The share of the places that probes must read with everything in view."""
COSTS = {"cost": "tokens", "computation": "flops", "duration": "time"}
"""What a way costs, as a share of a restart's, and the column that has it."""


def estimands(partial: Sequence[str]) -> tuple[Estimand, ...]:
    """What is estimated.

    Args:
        partial: ways after which something is left.
    """
    others = tuple(way for way in partial if way != MASK and holds(way) is None)
    edited = (NOTHING, *(way for way in partial if way.startswith(OTHER)))
    return (
        *(Mean(name=name, of=name, by=("way",), within=SHARE) for name in ("read", "whole", "tried", "said", "same")),
        Mean(name="decided", of="decided", by=("way",), where={"way": edited}, within=SHARE),
        *(Mean(name=name, of=name, by=("way",), within=SHARE) for name in ("chance", "chance_whole", "chance_tried")),
        *(
            Mean(name=f"{name}_by_kind", of=name, by=("kind", "way"), within=SHARE)
            for name in ("read", "chance", "said")
        ),
        Mean(name="bits", of="bits", by=("way",), within=UNBOUNDED),
        Mean(name="bits_by_kind", of="bits", by=("kind", "way"), within=UNBOUNDED),
        Mean(name="beyond", of="beyond", by=("way",), where={"way": others}, within=UNBOUNDED, together=()),
        Mean(name="use", of="use", by=("way",), unit="nats", together=()),
        Mean(name="use_by_kind", of="use", by=("kind", "way"), unit="nats"),
        Mean(name="used", of="used", by=("way",), within=UNBOUNDED),
        *(Mean(name=name, of=name, by=("way",), within=POSITIVE, unit="nats") for name in ("kl", "restarted", "moved")),
        Mean(name="cosine", of="cosine", by=("way",), within=(-1.0, 1.0)),
        Mean(name="spread", of="spread", by=("way",), within=UNBOUNDED),
        Mean(name="tokens", of="tokens", by=("way",), unit="tokens"),
        *(Ratio(name=name, of=of, over=f"{of}_anew", by=("way",), within=UNBOUNDED) for name, of in COSTS.items()),
        Mean(name="flops", of="flops", by=("way",), unit="GFLOP"),
        Mean(name="time", of="time", by=("way",), unit="seconds"),
    )


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    chat = cases(config.kinds[0], 1, model.tokenizer, config.seed)[0]
    words = tuple(among[0] for among in chat.places)
    return concluded(table, config, chat_record(chat.chat(words), masked=(TURN,)), chat.ask)


def concluded(table: Rows, config: Config, chat: Any, ask: str) -> Conclusion:
    """What `conclude` gives, without the model."""
    on = ("sample",)
    full = beside(table, "use", {"way": NOTHING}, on)
    rows = table.assign(
        beyond=table["bits"] - beside(table, "bits", {"way": MASK}, on),
        # Each conversation by its own measure: what one kind of secret is used by is ten times what another is.
        used=table["use"] / full.where(full > 0),
        flops=table["flops"] / 1e9,
    )
    rows = rows.assign(**{f"{of}_anew": beside(rows, of, {"way": RESTART}, on) for of in COSTS.values()})
    partial = tuple(way for way in ways(config) if way not in (*CLEAN, NOTHING))
    findings = measure(rows, estimands(partial))
    facts: dict[str, Any] = {"chat": chat, "ask": ask, "ways": list(ways(config))}
    facts["partial"] = [place for place, way in enumerate(findings.values("use", "way")) if way in partial]
    facts["kinds"] = list(config.kinds)
    return Conclusion(
        findings,
        [*controls(rows, findings)],
        facts,
        few_clusters(int(table["sample"].nunique()), "conversations"),
    )


def controls(rows: Rows, findings: Findings) -> Iterator[Control]:
    clean = rows[rows["way"].isin(CLEAN)]
    differing = int(clean["differs"].sum())
    yield Control(
        f"The text that stays is the same whatever the secret in all {rows['sample'].nunique()} conversations, and of "
        f"{len(clean)} caches that were read anew from it {differing} differ between secrets.",
        not differing and bool((rows["kept"] == 1).all()),
    )
    full = findings.at("read", way=NOTHING).mean
    yield Control(
        f"With everything in view probes read {full:.1%} of the places of the secrets (at least {POWER:.0%}).",
        full >= POWER,
    )
    apart = float(rows["apart"].max())
    yield Control(
        f"A way done for many secrets at once is at most {apart:.1e} of a layer's size from the same done for one.",
        apart <= EXACT,
    )
    said, unsaid = (findings.at("said", way=way).mean for way in (NOTHING, RESTART))
    yield Control(
        f"Asked for it, the model says the secret in {said:.1%} of the cases with everything in view, in {unsaid:.1%} "
        "after a restart.",
        said > unsaid,
    )
