"""From answers and probes to findings; each text is a cluster, for the models as they were trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, HeldOut, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.collect import ANSWERS, HEADS, PROBES, REACH
from kvprobe.studies.ghost_state.reading import (
    AT_ONCE,
    BOTH,
    ERASED,
    IN_VIEW,
    LATER,
    OF_STAND_IN,
    PAIR_SLOTS,
    RESTART,
    RIVALS,
    SLOTS,
    STATE,
    TIMELESS,
    WRITES,
    nouns_of,
)
from kvprobe.studies.ghost_state.turns import READ, RIGHT, SHIFT, TURNS
from kvprobe.studies.layer_readers import LINEAR
from kvprobe.tasks.mementos import DIGITS, accuracy_given_sum
from kvprobe.tasks.recall import BASE, PAIRS, recall_text
from kvprobe.tidy import Rows, chosen

MODEL = ("model", "memory")
ANSWERING = "the model's answers"


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    findings = findings_of(tables, config)
    digits, talk = [(7 * place + 3) % BASE for place in range(config.pairs)], [*range(min(config.distance, 8))]
    facts = {
        "chat": chat_record(recall_text(digits, talk, config.pairs - 1, nouns=nouns_of(model)), masked=(PAIRS,)),
        "main": config.model,
        "half_lives": {
            name: half_life(findings, name, sorted({*config.distances, config.distance}))
            for name in findings.values("kept", "model")
        },
        "chance": 1 / BASE,
        "bound": accuracy_given_sum(DIGITS),
    }
    return Conclusion(findings, controls(tables, findings, model), facts)


def findings_of(tables: Mapping[str, Rows], config: Config) -> Findings:
    """All numbers of a run."""
    answers, probes = (
        table.assign(main=(table["pairs"] == config.pairs) & (table["distance"] == config.distance))
        for table in (tables[ANSWERS], tables[PROBES])
    )
    best = probes[probes["layer"] < 0]
    # The answers know one digit of each text, a probe reads all.
    asked = answers.assign(bits=answers["bits"] * answers["pairs"], reader=ANSWERING, part=ANSWERING)
    known = pd.concat([best, asked], ignore_index=True)
    known = known.assign(per_byte=known["bits"] / known["bytes"], share=known["bits"] / known["pairs"])
    first = chosen(best, {"distance": min({*config.distances, config.distance}), "pairs": config.pairs})
    keys = [*MODEL, "when", "arm", "part", "reader", "text"]
    beside = chosen(best, {"pairs": config.pairs}).merge(
        first[[*keys, "bits"]].rename(columns={"bits": "first"}), on=keys
    )
    toys = tables.get(TURNS, pd.DataFrame(columns=["kind", "arm", "turn", "text", "value", *MODEL]))
    return measure(
        answers,
        of_answers(),
        (best, of_probes()),
        (known, of_reach(config)),
        (beside, [_kept()]),
        (probes[probes["layer"] >= 0], [_by_layer()]),
        (tables.get(HEADS, probes[:0]), [_by_head()]),
        (toys, of_turns()),
    )


def of_answers() -> Iterator[Estimand]:
    """Of answers to questions."""
    claimed: dict[str, Any] = {"by": MODEL, "cluster": "text", **HEADLINE}
    keys, main = (*MODEL, "when", "arm"), {"main": True}
    erased, closed = ({**main, "when": LATER, "arm": arm} for arm in (ERASED, TIMELESS))
    yield Mean(name="answered", of="right", by=keys, where=main, cluster="text", within=SHARE)
    yield Mean(name="taken", of="follows", by=keys, where=main, cluster="text", within=SHARE)
    yield Mean(name="margin", of="margin", by=keys, where=main, cluster="text", unit="nats")
    yield Difference(name="ghost", of="right", where=erased, less=closed, within=DIFFERENCE, **claimed)
    swapped = {**main, "when": LATER, "arm": OF_STAND_IN}
    yield Mean(name="follows", of="follows", where=swapped, within=SHARE, **claimed)
    yield Difference(
        name="rivals",
        of="follows",
        where={**swapped, "arm": RIVALS},
        less={**main, "when": LATER, "arm": IN_VIEW},
        within=DIFFERENCE,
        **claimed,
    )


def of_probes() -> Iterator[Estimand]:
    """Of what probes read in the layer that the inner fold chose."""
    claimed: dict[str, Any] = {"by": MODEL, "cluster": "text", "of": "right", "within": DIFFERENCE, **HEADLINE}
    linear = {"main": True, "reader": LINEAR}

    def leak(name: str, part: str, arm: str, when: str) -> Estimand:
        there = {**linear, "part": part}
        less = {**there, "when": LATER, "arm": RESTART}
        return Difference(name=name, where={**there, "when": when, "arm": arm}, less=less, **claimed)

    yield HeldOut(
        name="read",
        of="right",
        by=(*MODEL, "when", "arm", "part", "reader"),
        where={"main": True},
        cluster="text",
        within=SHARE,
    )
    yield HeldOut(
        name="floor",
        of="right",
        by=(*MODEL, "part", "reader"),
        where={"main": True, "when": LATER, "arm": RESTART},
        cluster="text",
        within=SHARE,
        together=(),
    )
    yield leak("leak", STATE, ERASED, LATER)
    yield leak("time", STATE, BOTH, AT_ONCE)
    yield leak("carried_by_writes", WRITES, TIMELESS, LATER)
    yield leak("carried_by_slots", SLOTS, TIMELESS, LATER)


def of_reach(config: Config) -> Iterator[Estimand]:
    """How much is held, over distances and numbers of pairs; and beside the memory that it takes."""
    erased: dict[str, Any] = {"when": LATER, "arm": ERASED}
    held: dict[str, Any] = {"cluster": "text", "unit": "bits"}
    readers = {"part": (STATE, ANSWERING), "reader": (LINEAR, ANSWERING)}
    # Seeds together; each is listed where the layers are.
    by = ("memory", "reader")
    yield Mean(
        name="by_distance",
        of="share",
        by=(*by, "distance"),
        where={**erased, **readers, "pairs": config.pairs},
        **held,
    )
    yield Mean(
        name="by_pairs", of="bits", by=(*by, "pairs"), where={**erased, **readers, "distance": config.distance}, **held
    )
    for arm, part in ((ERASED, STATE), (IN_VIEW, PAIR_SLOTS)):
        where = {"main": True, "when": LATER, "arm": arm, "part": part, "reader": LINEAR}
        yield Mean(name="held", of="bits", by=(*MODEL, "part"), where=where, **held)
        yield Mean(
            name="per_byte",
            of="per_byte",
            by=(*MODEL, "part", "bytes"),
            where=where,
            cluster="text",
            unit="bits per byte",
        )


def _kept() -> Estimand:
    """The share of the bits at the shortest distance."""
    where = {"when": LATER, "arm": ERASED, "part": STATE, "reader": LINEAR}
    return Ratio(name="kept", of="bits", over="first", by=(*MODEL, "distance"), where=where, cluster="text")


def _by_layer() -> Estimand:
    where = {"main": True, "reader": LINEAR, "when": LATER}
    return HeldOut(
        name="by_layer", of="right", by=(*MODEL, "arm", "part", "layer"), where=where, cluster="text", within=SHARE
    )


def _by_head() -> Estimand:
    return HeldOut(name="by_head", of="right", by=(*MODEL, "layer", "head"), cluster="text", within=SHARE)


def of_turns() -> Iterator[Estimand]:
    """Of the toys."""
    keys = (*MODEL, "arm", "turn")
    claimed: dict[str, Any] = {"by": MODEL, "cluster": "text", **HEADLINE}
    yield Mean(name="mementos", of="value", by=keys, where={"kind": RIGHT}, cluster="text", within=SHARE)
    yield Mean(name="shift", of="value", by=keys, where={"kind": SHIFT}, cluster="text", unit="nats")
    yield HeldOut(name="of_block", of="value", by=keys, where={"kind": READ}, cluster="text", within=SHARE)
    second = {"kind": SHIFT, "turn": 2}
    yield Mean(name="poison", of="value", where={**second, "arm": ERASED}, unit="nats", **claimed)
    yield Difference(
        name="cure",
        of="value",
        where={**second, "arm": ERASED},
        less={**second, "arm": BOTH},
        unit="nats",
        **claimed,
    )


def half_life(findings: Findings, model: str, distances: Sequence[int]) -> str:
    """Between which distances half of what is read at the shortest is lost; empty where nothing is read there."""
    kept = {distance: findings.where("kept", model=model, distance=distance) for distance in distances}
    means = {distance: found[0].value.mean for distance, found in kept.items() if found}
    if not any(finding.value.above() for finding in findings.where("leak", model=model)):
        return ""
    after = next((distance for distance in distances if means.get(distance, 1.0) < 0.5), None)
    if after is None:
        return f"beyond {distances[-1]} words"
    return f"between {distances[distances.index(after) - 1]} and {after} words"


def controls(tables: Mapping[str, Rows], findings: Findings, model: Model) -> list[Control]:
    """What cannot know the digits does not, and who is asked knows them in full view."""
    varies = float(tables[REACH]["varies"].max())
    floor = [finding.value for finding in findings.where("floor")]
    worst = min(finding.value.mean for finding in findings.where("answered", arm=IN_VIEW))
    return [
        Control(
            "Where the pairs were hidden from everything at once, without decay, and after a restart, states, writes, "
            f"K and V are the same whatever the digits are, to {varies:.1e} of their size (allowed for round-off: "
            f"{model.round_off:.1e}).",
            varies <= model.round_off,
        ),
        Control(
            f"After a restart no reader detectably reads the digits: the most is {max(v.mean for v in floor):.1%}.",
            not any(value.above(1 / BASE) for value in floor),
        ),
        Control(
            f"With the pairs in view, {worst:.1%} of the questions are answered right at the least (90 % wanted): what "
            "is not answered once they are hidden is not for want of understanding the question.",
            worst >= 0.9,
        ),
    ]
