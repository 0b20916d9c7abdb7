"""From answers and probes to findings; each text is a cluster, for the models as they were trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import (
    HEADLINE,
    Difference,
    Estimand,
    HeldOut,
    HeldOutDifference,
    Mean,
    Ratio,
    measure,
)
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.collect import ANSWERS, HEADS, PROBES, REACH, RULES, UNTRAINED
from kvprobe.studies.ghost_state.reading import (
    AT_ONCE,
    BOTH,
    ERASED,
    IN_VIEW,
    LATER,
    OF_STAND_IN,
    OWN_SLOTS,
    RESTART,
    RIVALS,
    STATE,
    TIMELESS,
    nouns_of,
)
from kvprobe.studies.ghost_state.turns import READ, RIGHT, SHIFT, TURNS
from kvprobe.studies.layer_readers import LINEAR
from kvprobe.tasks.mementos import DIGITS, accuracy_given_sum
from kvprobe.tasks.recall import BASE, PAIRS, recall_text
from kvprobe.tidy import Rows, chosen

MODEL = ("model", "memory")
TWO_KINDS = {"memory": tuple(f"{rule} and attention" for rule in RULES.values())}
ANSWERING, SEEING = "answers after an engine's erase", "answers with the turn in view"


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    findings = findings_of(tables, config)
    digits, talk = [(7 * place + 3) % BASE for place in range(config.pairs)], [*range(min(config.distance, 8))]
    facts = {
        "chat": chat_record(recall_text(digits, talk, config.pairs - 1, nouns=nouns_of(model)), masked=(PAIRS,)),
        "main": config.model,
        "lasting": {
            str(name): lasting(findings, str(name), sorted({*config.distances, config.distance}))
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
    asked = answers.assign(part=STATE, reader=answers["arm"].map({ERASED: ANSWERING, IN_VIEW: SEEING}))
    asked = asked[asked["reader"].notna() & (asked["when"] == LATER)].assign(arm=ERASED)
    of_state = chosen(best, {"part": STATE, "arm": ERASED, "when": LATER})
    first = chosen(of_state, {"distance": min({*config.distances, config.distance}), "pairs": config.pairs})
    keys = [*MODEL, "reader", "text"]
    beside = chosen(of_state, {"pairs": config.pairs}).merge(
        first[[*keys, "bits"]].rename(columns={"bits": "first"}), on=keys
    )
    nothing = pd.DataFrame(columns=["outcome", "arm", "turn", "text", "value", "layer", "head", "right", *MODEL])
    return measure(
        answers,
        of_answers(),
        (best, of_probes(config)),
        (pd.concat([of_state, asked], ignore_index=True), of_reach(config)),
        (beside, [_kept()]),
        (probes[probes["layer"] >= 0], [_by_layer()]),
        (tables.get(HEADS, nothing), [_by_head()]),
        (tables.get(TURNS, nothing), of_turns()),
    )


def of_answers() -> Iterator[Estimand]:
    """Of answers to questions. Where all layers keep states, nothing is hidden by hiding from attention, and where none
    does nothing is left, so claims are of models that have both."""
    claimed: dict[str, Any] = {"by": MODEL, "cluster": "text", **HEADLINE}
    keys, main = (*MODEL, "when", "arm"), {"main": True}
    both: dict[str, Any] = {**main, "when": LATER, **TWO_KINDS}
    yield Mean(name="answered", of="right", by=keys, where=main, cluster="text", within=SHARE)
    yield Mean(name="taken", of="follows", by=keys, where=main, cluster="text", within=SHARE)
    yield Mean(name="margin", of="margin", by=keys, where=main, cluster="text", unit="nats")
    erased, folded = ({**both, "arm": arm} for arm in (ERASED, BOTH))
    yield Difference(name="ghost", of="right", where=erased, less=folded, within=DIFFERENCE, **claimed)
    yield Mean(name="follows", of="follows", where={**both, "arm": OF_STAND_IN}, within=SHARE, **claimed)
    own = {**both, "arm": IN_VIEW}
    yield Difference(name="rivals", of="follows", where={**both, "arm": RIVALS}, less=own, within=DIFFERENCE, **claimed)


def of_probes(config: Config) -> Iterator[Estimand]:
    """Of what probes read in the layer that the inner fold chose."""
    claimed: dict[str, Any] = {"by": MODEL, "cluster": "text", "of": "right", "within": DIFFERENCE, **HEADLINE}
    linear = {"main": True, "reader": LINEAR}

    def leak(name: str, part: str, arm: str, when: str) -> Estimand:
        there = {**linear, "part": part}
        less = {**there, "when": LATER, "arm": RESTART}
        return HeldOutDifference(name=name, where={**there, "when": when, "arm": arm}, less=less, **claimed)

    read: dict[str, Any] = {"of": "right", "cluster": "text", "within": SHARE}
    yield HeldOut(name="read", by=(*MODEL, "when", "arm", "part", "reader"), where={"main": True}, **read)
    floor = {"main": True, "when": LATER, "arm": RESTART}
    yield HeldOut(name="floor", by=(*MODEL, "part", "reader"), where=floor, together=(), **read)
    yield leak("leak", STATE, ERASED, LATER)
    state = {"main": True, "part": STATE, "when": LATER, "arm": ERASED}
    untrained = {**state, "reader": UNTRAINED}
    yield HeldOutDifference(name="learned", where={**state, "reader": LINEAR}, less=untrained, **claimed)
    yield leak("time", STATE, BOTH, AT_ONCE)
    yield leak("carried_by_writes", "values written later", TIMELESS, LATER)
    yield leak("carried_by_slots", "V of later slots", TIMELESS, LATER)
    most = {"pairs": max((config.pairs, *config.capacities)), "distance": config.distance, "when": LATER}
    parts = ((ERASED, STATE), *((IN_VIEW, part) for part in OWN_SLOTS))
    for arm, part in parts:
        where = {**most, "reader": LINEAR, "arm": arm, "part": part}
        yield Mean(name="held", of="bits", by=(*MODEL, "part", "bytes"), where=where, cluster="text", unit="bits")


def of_reach(config: Config) -> Iterator[Estimand]:
    """How much is known after an engine's erase, over distances and numbers of pairs. Models of one kind together; each
    is listed by itself where the layers are."""
    known: dict[str, Any] = {"of": "right", "cluster": "text", "within": SHARE}
    for name, by, same in (("by_distance", "distance", "pairs"), ("by_pairs", "pairs", "distance")):
        where = {same: getattr(config, same), "reader": (SEEING, ANSWERING, LINEAR, UNTRAINED)}
        yield HeldOut(name=name, by=("kind", "reader", by), where=where, **known)


def _kept() -> Estimand:
    """The share of the bits at the shortest distance."""
    where = {"reader": LINEAR}
    return Ratio(name="kept", of="bits", over="first", by=(*MODEL, "distance"), where=where, cluster="text")


def _by_layer() -> Estimand:
    where = {"main": True, "reader": (LINEAR, UNTRAINED), "when": LATER}
    return HeldOut(
        name="by_layer",
        of="right",
        by=(*MODEL, "arm", "part", "reader", "layer"),
        where=where,
        cluster="text",
        within=SHARE,
    )


def _by_head() -> Estimand:
    return HeldOut(name="by_head", of="right", by=(*MODEL, "layer", "head"), cluster="text", within=SHARE)


def of_turns() -> Iterator[Estimand]:
    """Of the toys."""
    keys = (*MODEL, "arm", "turn")
    claimed: dict[str, Any] = {"by": MODEL, "cluster": "text", "of": "value", "unit": "nats", **HEADLINE}
    yield Mean(name="mementos", of="value", by=keys, where={"outcome": RIGHT}, cluster="text", within=SHARE)
    yield Mean(name="shift", of="value", by=keys, where={"outcome": SHIFT}, cluster="text", unit="nats")
    yield HeldOut(name="of_block", of="value", by=keys, where={"outcome": READ}, cluster="text", within=SHARE)
    second: dict[str, Any] = {"outcome": SHIFT, "turn": 2, **TWO_KINDS}
    yield Mean(name="poison", where={**second, "arm": ERASED}, **claimed)
    yield Difference(name="cure", where={**second, "arm": ERASED}, less={**second, "arm": BOTH}, **claimed)


def lasting(findings: Findings, model: str, distances: Sequence[int]) -> str:
    """Between which distances half of what is read at the shortest is lost, by the intervals; empty where nothing is
    read."""
    if not any(finding.value.above() for finding in findings.where("leak", model=model)):
        return ""
    kept = {distance: findings.where("kept", model=model, distance=distance) for distance in distances}
    known = {distance: found[0].value for distance, found in kept.items() if found}
    more = max(distance for distance in known if distance == distances[0] or known[distance].above(0.5))
    less = min((distance for distance in known if known[distance].below(0.5)), default=None)
    return f"beyond {more} words" if less is None else f"between {more} and {less} words"


def controls(tables: Mapping[str, Rows], findings: Findings, model: Model) -> list[Control]:
    """What cannot know the digits does not, and the model knows them in view."""
    varies = float(tables[REACH]["varies"].max())
    floor = [finding.value for finding in findings.where("floor")]
    worst = min(finding.value.mean for finding in findings.where("answered", arm=IN_VIEW))
    return [
        Control(
            "Where the pairs were hidden from everything at once, without decay, each layer holds what a restart does, "
            f"whatever the digits are, to {varies:.1e} of its size (allowed for round-off: {model.round_off:.1e}).",
            varies <= model.round_off,
        ),
        Control(
            f"After a restart no reader detectably reads the digits: the most is {max(v.mean for v in floor):.1%}.",
            not any(value.above(1 / BASE) for value in floor),
        ),
        Control(
            f"With the pairs in view, {worst:.1%} of the questions are answered right at the least (90 % wanted): what "
            "is not answered once they are hidden is not because the question was not understood.",
            worst >= 0.9,
        ),
    ]
