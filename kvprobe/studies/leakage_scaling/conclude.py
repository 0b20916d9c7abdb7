"""From what readers make of the codes to findings."""

from collections.abc import Iterator
from math import log2
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Difference, Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.leakage_scaling import Config
from kvprobe.studies.leakage_scaling.collect import GRAMMAR, worlds_of
from kvprobe.studies.leakage_scaling.curves import Point, asymptote, points
from kvprobe.studies.leakage_scaling.readers import CLASSES
from kvprobe.studies.leakage_scaling.reading import HIDDEN, RESTART, RETAINED
from kvprobe.tidy import Rows
from kvprobe.wording import few_clusters

CURVE = ["world", "reader", "arm", "held_out"]
KNOWN_WORDING, STRICT = "subject", "both"
"""The kinds of hold-out that claims are about: codes and subjects are new; or the wording, too."""
ENOUGH = 0.9
"""Of the digits in full view a reader must read so many before what it does not find elsewhere is called a null."""
HALF = 2e-3
"""How far averages that are kept in float16 may differ by rounding, of their size."""
BITS = "bits per digit"
MOST = log2(CLASSES)
"""Bits of a digit."""


def conclude(tables: dict[str, Rows], config: Config, model: Model) -> Conclusion:
    samples, findings = tables["samples"], Findings()
    curves = curves_of(samples)
    for (world, reader, arm, held_out, state), (counts, read, bits) in curves.items():
        keys = {"world": world, "reader": reader, "arm": arm, "held_out": held_out, "state": state}
        for name, curve, within, unit in (("read", read, SHARE, ""), ("bits", bits, (-np.inf, MOST), BITS)):
            for count, value in zip(counts, points(curve, within), strict=True):
                findings.add(Finding(name, {**keys, "conversations": count}, value, unit))
        limit = asymptote(counts, bits, MOST)
        if limit is not None:
            findings.add(Finding("limit", keys, limit, BITS))
    add_leaks(findings, curves)
    grammar = samples[samples["world"] == GRAMMAR]
    last = grammar[grammar["conversations"] == grammar.groupby("reader")["conversations"].transform("max")]
    by_digit = Mean(
        name="by_digit", of="right", by=("reader", "arm", "state", "held_out", "digit"), cluster="cluster", within=SHARE
    )
    floor = Mean(
        name="floor",
        of="right",
        by=("arm", "held_out"),
        where={"state": RESTART, "world": GRAMMAR},
        cluster="cluster",
        within=SHARE,
    )
    findings.extend(measure(last, [by_digit], (samples, [floor])))
    findings.number("chance", 1 / CLASSES)
    if len(tables["use"]):
        findings.extend(use_of(tables["use"]))
    full = {
        reader: read[-1].mean()
        for (world, reader, arm, held_out, _), (_, read, _) in curves.items()
        if (world, arm, held_out) == (GRAMMAR, "turn", STRICT)
    }
    weak = [reader for reader in config.readers if full.get(reader, 0.0) < ENOUGH]
    world = worlds_of(config)[0]
    first = world.conversations[0]
    facts = {
        "chat": chat_record(first.transcript(), masked=(HIDDEN,), marked=first.code, only_in=(HIDDEN,)),
        "words": {test.held_out: len(set(test.clusters)) for test in world.tests},
        "most": max(config.conversations),
        "fewest": min(config.conversations),
        "prompted": world.up_to(config.prompted).training,
        "readers": list(config.readers),
    }
    warnings = few_clusters(min(facts["words"].values()), "held-out ways of stating the code")
    if weak:
        warnings.append(
            f"In full view these readers read less than {100 * ENOUGH:.0f} % of the digits: {', '.join(weak)}. What "
            "they do not find elsewhere is no null; upper ends of intervals bound it."
        )
    return Conclusion(findings, [*controls_of(tables, curves, model)], facts, warnings)


Curves = dict[tuple[str, ...], tuple[list[int], list[Point], list[Point]]]


def curves_of(samples: Rows) -> Curves:
    """By world, reader, arm, hold-out and state: the numbers of conversations, and the points of shares and of bits."""
    curves: Curves = {}
    means = samples.groupby([*CURVE, "state", "conversations", "draw", "cluster"], sort=False)[["right", "bits"]].mean()
    for keys, rows in means.groupby(level=[*CURVE, "state"], sort=False):
        wide = rows.droplevel([*CURVE, "state"]).unstack("cluster")
        counts = sorted(wide.index.unique("conversations"))
        at = [wide.xs(count, level="conversations") for count in counts]
        read, bits = ([table[of].to_numpy() for table in at] for of in ("right", "bits"))
        curves[keys] = (counts, read, bits)
    return curves


def add_leaks(findings: Findings, curves: Curves) -> None:
    """What is read of the retained slots beyond what is read of the recomputed ones, with the most conversations. The
    shares of digits hold together, and may be claimed (`leak`); bits are for bounds, since a reader that was calibrated
    on other wording may mislead."""
    both = [keys[:4] for keys in curves if keys[4] == RETAINED and (*keys[:4], RESTART) in curves]
    claimed = [keys for keys in both if keys[0] == GRAMMAR and keys[3] in (KNOWN_WORDING, STRICT)]
    for keys in both:
        retained, restart = (curves[*keys, state][1:] for state in (RETAINED, RESTART))
        read, bits = (
            [one - other for one, other in zip(*curve, strict=True)] for curve in zip(retained, restart, strict=True)
        )
        named = dict(zip(CURVE, keys, strict=True))
        findings.add(Finding("excess", named, points(bits)[-1], BITS))
        if keys in claimed:
            value = points(read, DIFFERENCE, len(claimed))[-1]
            findings.add(Finding("leak", {key: named[key] for key in CURVE[1:]}, value, comparisons=len(claimed)))


def use_of(use: Rows) -> Findings:
    """What a retained cache adds to the log-probability of the right code, over that of a restart."""
    known: dict[str, Any] = {"of": "logprob", "by": ("arm",), "cluster": "cluster", "unit": "nats"}
    rows = use[use["held_out"] != "subject"]
    return measure(
        rows,
        [
            Mean(name="said", **{**known, "by": ("arm", "state")}),
            Difference(name="used", where={"state": RETAINED}, less={"state": RESTART}, together=(), **known),
        ],
    )


def controls_of(tables: dict[str, Rows], curves: Curves, model: Model) -> Iterator[Control]:
    """Nothing is read of a restart, and the first layers cannot know."""
    read = [curve[1] for keys, curve in curves.items() if keys[4] == RESTART]
    values = [value for curve in read for value in points(curve, SHARE, sum(map(len, read)))]
    above = sum(value.above(1 / CLASSES) for value in values)
    most = max((value.mean for value in values), default=0.0)
    yield Control(
        f"Restart: of {len(values)} points of curves of recomputed slots, {above} are above chance with intervals that "
        f"hold together; the highest mean is {100 * most:.1f} % of the digits.",
        above == 0,
    )
    reach = tables["reach"]
    early = reach[reach["arm"].isin(["masked", "later"])]
    if len(early):
        near = float(early[early["layer"] < 2]["differs"].max())
        far = float(early[early["layer"] >= 2]["differs"].max()) if (early["layer"] >= 2).any() else 0.0
        allowed = max(model.round_off, HALF)
        yield Control(
            "Light cone: in turns that never saw the hidden one, K and V of the first two layers are the same retained "
            f"and computed again, to {near:.1e} of their size (allowed: {allowed:.1e}, as averages are kept in "
            f"float16); those of later layers differ by up to {far:.1e}.",
            near <= allowed,
        )
