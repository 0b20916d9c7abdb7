"""From what was read, exchanged and closed to findings; each trace is a cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Difference, Estimand, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.changing import DONOR, OTHER_DIGITS, OTHER_SUM, OWN
from kvprobe.studies.memento_toy.closing import ERASED, OPEN, STAND_IN
from kvprobe.studies.memento_toy.collect import CHECKPOINT, MAIN, SEED
from kvprobe.studies.memento_toy.probes import BOTH, LINEAR, RESTART, RETAINED
from kvprobe.tasks.mementos import BASE, bayes_accuracy, block_name, draw_trace, hidden_blocks
from kvprobe.tidy import Rows, beside

PUBLISHED = (
    {"layer": 0, "distance": 1, "paper": 0.131},
    {"layer": 3, "distance": 1, "paper": 0.262},
    {"layer": 3, "distance": 2, "paper": 0.214},
    {"layer": 3, "distance": 7, "paper": 0.13},
)
"""Accuracy per digit from K and V of mementos, one to seven blocks after the block was hidden (arXiv 2604.09852)."""
ANSWER: dict[str, Any] = {"together": (), "family": "answer", "cluster": "trace"}
ROLES = (MAIN, SEED)


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    """Findings, controls and facts of a run."""
    layers = model.geometry.n_layers
    findings = findings_of(tables, config, layers)
    rng = np.random.default_rng([config.seed, 1])
    trace = draw_trace(rng, config.content, config.blocks)
    shown = replace(trace, blocks=trace.blocks[: config.hidden_from]).conversation()
    masked = tuple(map(block_name, hidden_blocks(config.hidden_from, config.keep)))
    facts = {
        "chat": chat_record(shown, masked=masked),
        "layers": layers,
        "first": config.hidden_from,
        "last": config.blocks,
        "parameters": sum(parameter.numel() for parameter in model.lanes.plain.parameters()),
        "published": published(config, layers),
    }
    return Conclusion(findings, [light_cone(tables["reach"], model)], facts)


def published(config: Config, layers: int) -> list[dict[str, int | float]]:
    """The cells of the paper, where the run is of its design."""
    design = (config.content, config.keep, config.blocks, config.block, layers)
    return list(PUBLISHED) if design == ("sum", 0, 10, 2, 4) else []


def text_of(config: Config, distance: int) -> float:
    """How often a digit of the block can be guessed from all that is in view of a memento so many blocks later."""
    number = config.block + distance
    if config.content == "copy":
        return 1.0 if 0 <= distance <= config.keep else 1 / BASE
    seen = range(max(1, number - config.keep), number + 1)
    return bayes_accuracy(config.block, range(number + 1), seen)


def findings_of(tables: Mapping[str, Rows], config: Config, layers: int) -> Findings:
    """All numbers of a run."""
    samples, answers, closing = tables["samples"], tables["answers"], tables["closing"]
    by_model = answers[answers["arm"] == RETAINED].groupby("model")["right"].mean().round(4)
    bounds = {distance: text_of(config, distance) for distance in samples["distance"].unique().tolist()}
    bound = samples["distance"].map(bounds)
    samples = samples.assign(
        hidden=samples["right"] - samples["alike"],
        over=samples["right"] - bound,
        accuracy=samples["model"].map(by_model),
    )
    probed = closing[closing["measure"] == "probe"]
    findings = measure(
        samples,
        of_samples(config, layers),
        (samples.sort_values("accuracy", kind="stable"), (over_training(config, layers),)),
        (answers[answers["memento"] >= config.hidden_from], OF_ANSWERS),
        (answers, (BY_MEMENTO,)),
        (ways(tables["changed"]), OF_CHANGED),
        (probed.assign(hidden=probed["right"] - probed["alike"]), OF_PROBED),
        (closing[(closing["measure"] == "answer") & (closing["memento"] >= config.hidden_from)], OF_CLOSED),
    )
    for state, layer, rank in closing[closing["measure"] == "rank"][["state", "layer", "rank"]].itertuples(index=False):
        findings.number("rank", rank, state=state, layer=int(layer))
    for distance, share in bounds.items():
        findings.number("text", share, distance=distance)
    findings.number("own_text", own_text(config))
    findings.number("visible_text", text_of(config, config.hidden_from - config.block))
    return findings


def own_text(config: Config) -> float:
    """The same from the first memento that is written while the block is hidden, by itself."""
    return 1 / BASE if config.content == "copy" else bayes_accuracy(config.block, [config.hidden_from])


def of_samples(config: Config, layers: int) -> Iterator[Estimand]:
    """Of what probes read."""
    right: dict[str, Any] = {"of": "right", "cluster": "trace", "within": SHARE}
    last = {"layer": layers - 1, "part": BOTH}
    hidden = config.hidden_from - config.block
    here = {"distance": hidden, **last}
    shown, later = tuple(range(-1, hidden)), tuple(range(hidden, config.blocks))
    keys = ("model", "probe", "arm")
    yield Mean(name="by_layer", by=(*keys, "layer"), where={"distance": hidden, "part": BOTH}, **right)
    yield Mean(name="by_distance", by=(*keys, "distance"), where={**last, "distance": later}, **right)
    yield Mean(name="shown", by=("model", "probe", "distance"), where={**last, "distance": shown}, **right)
    yield Mean(name="direct", by=("model", "probe", "layer"), where={"distance": 0, "part": BOTH}, **right)
    yield Mean(
        name="by_part", by=("model", "part", "arm", "layer"), where={"distance": hidden, "probe": LINEAR}, **right
    )
    beyond: dict[str, Any] = {"of": "hidden", "cluster": "trace", "within": DIFFERENCE}
    linear = {"part": BOTH, "probe": LINEAR, "arm": RETAINED}
    yield Mean(name="hidden_by_layer", by=("model", "layer"), where={**linear, "distance": hidden}, **beyond)
    far = {**linear, "layer": layers - 1, "distance": later}
    yield Mean(name="hidden_by_distance", by=("model", "distance"), where=far, **beyond)
    retained: dict[str, Any] = {"where": {**here, "arm": RETAINED, "probe": LINEAR, "role": ROLES}, "by": ("model",)}
    yield Mean(name="leak", of="hidden", within=DIFFERENCE, **retained, **ANSWER)
    yield Mean(name="beyond_text", of="over", within=DIFFERENCE, **retained, **ANSWER)
    if config.seeds:
        over: dict[str, Any] = {"cluster": "model", "within": SHARE, "of": "right"}
        where = {**last, "distance": later, "role": ROLES}
        yield Mean(name="seeds", by=("probe", "arm", "distance"), where=where, **over)
        yield Mean(
            name="seeds_hidden", by=("distance",), where={**far, "role": ROLES}, **{**beyond, "cluster": "model"}
        )


def over_training(config: Config, layers: int) -> Estimand:
    """What a linear probe reads in the model and in its earlier weights."""
    site = {"distance": config.hidden_from - config.block, "layer": layers - 1, "part": BOTH, "probe": LINEAR}
    by = ("model", "accuracy", "arm")
    where = {**site, "role": (MAIN, CHECKPOINT)}
    return Mean(name="by_training", of="right", by=by, where=where, cluster="trace", within=SHARE)


BY_MEMENTO = Mean(name="by_memento", of="right", by=("model", "arm", "memento"), cluster="trace", within=SHARE)
OF_ANSWERS: tuple[Estimand, ...] = (
    Mean(name="right", of="right", by=("model", "arm"), cluster="trace", within=SHARE),
    Difference(
        name="kept",
        of="right",
        by=("model",),
        where={"arm": RETAINED, "role": ROLES},
        less={"arm": RESTART},
        within=DIFFERENCE,
        **ANSWER,
    ),
)
EXCHANGED = (OTHER_DIGITS, OTHER_SUM)
OF_CHANGED: tuple[Estimand, ...] = (
    *(
        Mean(
            name=name,
            of=of,
            by=("model", "condition", "part"),
            where={"condition": conditions},
            cluster="trace",
            within=within,
            unit=unit,
        )
        for name, of, conditions, within, unit in (
            ("after", "right", (OWN, *EXCHANGED), SHARE, ""),
            ("turned", "turned", EXCHANGED, SHARE, ""),
            ("kl", "kl", EXCHANGED, UNBOUNDED, "nats"),
            ("margin", "margin", (OWN, OTHER_SUM, DONOR), UNBOUNDED, "nats"),
        )
    ),
    Mean(
        name="used", of="turned", by=("model",), where={"condition": OTHER_DIGITS, "part": BOTH}, within=SHARE, **ANSWER
    ),
    Ratio(name="way", of="moved", over="whole", by=("model", "part"), where={"condition": OTHER_SUM}, cluster="trace"),
    Ratio(
        name="follows",
        of="moved",
        over="whole",
        by=("model",),
        where={"condition": OTHER_SUM, "part": BOTH},
        **ANSWER,
    ),
)
OF_PROBED: tuple[Estimand, ...] = (
    Mean(name="left", of="right", by=("state",), cluster="trace", within=SHARE),
    Mean(name="left_hidden", of="hidden", by=("state",), within=DIFFERENCE, **ANSWER),
)
OF_CLOSED: tuple[Estimand, ...] = (
    Mean(name="still", of="right", by=("state",), cluster="trace", within=SHARE),
    *(
        Difference(
            name="harm",
            of="right",
            keys={"state": state},
            where={"state": state},
            less={"state": OPEN},
            within=DIFFERENCE,
            **ANSWER,
        )
        for state in (STAND_IN, *ERASED)
    ),
)


def ways(changed: Rows) -> Rows:
    """How far the margin between the two mementos moved (`moved`), of the way to where text and hidden block agree on
    the other one (`whole`)."""
    keys = ("model", "trace")
    own, donor = (beside(changed, "margin", {"condition": condition}, keys) for condition in (OWN, DONOR))
    return changed.assign(moved=own - changed["margin"], whole=own - donor)


def light_cone(reach: Rows, model: Model) -> Control:
    """The first two layers cannot know what is hidden."""
    near, far = (float(reach[reach["near"] == near]["varies"].max()) for near in (True, False))
    return Control(
        "Light cone: in the first memento that is written while the block is hidden, K and V of the first two layers "
        f"are the same retained and computed again, to {near:.1e} of their size (allowed for round-off: "
        f"{model.round_off:.1e}); those of later layers differ by up to {far:.1e}.",
        near <= model.round_off,
    )
