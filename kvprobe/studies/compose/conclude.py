"""From readings to findings: what joining loses, and which slots to read again."""

from collections.abc import Iterator

from kvprobe.experiments.estimands import Difference, Estimand, Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.findings import Findings
from kvprobe.stats import POSITIVE, SHARE
from kvprobe.studies.compose import Config
from kvprobe.studies.compose.collect import ALONE, DEVIATING, FIRST, JOINT, RANDOM, WAYS
from kvprobe.studies.compose.documents import IN_FIRST, JUDGED, KNOWN, pairs, second_is_right
from kvprobe.tidy import Rows, chosen
from kvprobe.wording import few_clusters

ROUNDING = 1e-3
"""The most nats by which the second document read again as a whole may be off one prefill."""
KNOWN_BY = 0.2
"""By how much more often the first document's facts must be known where it was read."""


def estimands(config: Config) -> tuple[Estimand, ...]:
    each, both = ("kind", "way", "share"), (0, *config.shares, 100)
    return (
        Mean(name="right", of="right", by=each, where={"way": WAYS}, within=SHARE),
        Mean(name="flips", of="flipped", by=each, where={"way": WAYS}, within=SHARE),
        Mean(name="apart", of="kl", by=each, where={"way": WAYS}, within=POSITIVE, unit="nats"),
        Mean(
            name="over_kinds",
            of="kl",
            by=("way", "share"),
            where={"way": WAYS, "share": both},
            within=POSITIVE,
            unit="nats",
        ),
        Mean(name="joint", of="right", by=("kind",), where={"way": JOINT}, within=SHARE),
        Mean(
            name="second",
            of="names_second",
            by=("way", "share"),
            where={"kind": JUDGED, "way": (JOINT, FIRST)},
            within=SHARE,
        ),
        Mean(name="alone", of="right", by=("kind",), where={"way": ALONE}, within=SHARE),
        Difference(
            name="lost", of="right", by=("kind",), where={"way": FIRST, "share": 0}, less={"way": JOINT}, together=()
        ),
        *(
            Difference(
                name="beside_random",
                of="kl",
                by=("share",),
                where={"way": way, "share": config.shares},
                less={"way": RANDOM, "share": config.shares},
                keys={"way": way},
                unit="nats",
                together=(),
            )
            for way in (FIRST, DEVIATING)
        ),
    )


IN_BOTH_ORDERS: tuple[Estimand, ...] = (
    Mean(name="both_orders", of="right", by=("way", "share"), within=SHARE),
    Mean(name="truth", of="margin", by=("way", "share"), unit="nats"),
    Difference(name="judgement", of="right", where={"way": FIRST, "share": 0}, less={"way": JOINT}, together=()),
)
"""What is judged, of facts that stood in both orders."""


def conclude(rows: Rows, config: Config, model: Model) -> Conclusion:
    return concluded(rows, config)


def concluded(rows: Rows, config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    true_second = rows["sample"].map(second_is_right)
    # Of two answers, the second is named where it is true and found, or not true and missed.
    rows = rows.assign(names_second=((rows["right"] == 1) == true_second).astype(float))
    facts = in_both_orders(rows)
    findings = measure(rows, estimands(config), (facts, IN_BOTH_ORDERS if len(facts) else ()))
    again: Rows = chosen(rows, {"way": FIRST, "share": 100})
    findings.number("exact", again["kl"].max(), "nats")
    house, judged = pairs(0, config.facts, config.seed)
    shown = {
        "documents": [house.first, house.second, judged.first, judged.second],
        "asked": [[one.kind, one.text.strip(), one.options[0]] for pair in (house, judged) for one in pair.asked],
        "shares": list(config.shares),
        "in_both_orders": len(facts) > 0,
    }
    return Conclusion(
        findings,
        [*controls_of(findings)],
        shown,
        few_clusters(findings.at("joint", kind=IN_FIRST).clusters, "pairs of documents"),
    )


def in_both_orders(rows: Rows) -> Rows:
    """A row for each fact that was judged in both orders, by `way` and `share`.

    Whether the true answer was found in both (`right`), which a preference for a place never does, and the mean
    `margin`, from which such a preference falls out.
    """
    judged = chosen(rows, {"kind": JUDGED})
    by = [judged["sample"] % len(KNOWN), judged["way"], judged["share"]]
    facts = judged.groupby(by).agg(right=("right", "min"), margin=("margin", "mean"), orders=("right", "size"))
    return chosen(facts.reset_index(), {"orders": 2})


def controls_of(findings: Findings) -> Iterator[Control]:
    most = findings.at("exact").mean
    yield Control(
        f"With all of the second document read again, no question is more than {most:.1e} nats from one prefill.",
        most <= ROUNDING,
    )
    known, guessed = (findings.at(name, kind=IN_FIRST).mean for name in ("joint", "alone"))
    yield Control(
        f"Facts of the first document are known to {known:.0%} where it was read, and to {guessed:.0%} where it was "
        "not.",
        known >= guessed + KNOWN_BY,
    )
