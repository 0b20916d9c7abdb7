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
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.changing import DONOR, OTHER_DIGITS, OTHER_SUM, OWN
from kvprobe.studies.memento_toy.closing import BEYOND, ERASED, EVERYTHING, OPEN, STAND_IN
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
    shown = replace(trace, blocks=trace.blocks[: config.first]).conversation()
    masked = tuple(map(block_name, hidden_blocks(config.first, config.keep)))
    facts = {
        "chat": chat_record(shown, masked=masked),
        "layers": layers,
        "first": config.first,
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
    samples, answers = tables["samples"], tables["answers"]
    by_model = answers[answers["arm"] == RETAINED].groupby("model")["right"].mean().round(4)
    bounds = {distance: text_of(config, distance) for distance in samples["distance"].unique().tolist()}
    samples = samples.assign(
        over=samples["right"] - samples["distance"].map(bounds), accuracy=samples["model"].map(by_model)
    )
    later = answers[answers["memento"] >= config.first]
    findings = measure(
        samples,
        of_samples(config, layers),
        (later, OF_ANSWERS),
        (answers, (BY_MEMENTO,)),
        (ways(tables["changed"]), OF_CHANGED),
        (tables["left"], OF_LEFT),
        (tables["closed"][tables["closed"]["memento"] > 1], OF_CLOSED),
    )
    for (kind, layer), rows in tables["ranks"].groupby(["kind", "layer"], sort=False):
        findings.number("rank", rows["rank"].mean(), state=kind, layer=layer)
    for distance, bound in bounds.items():
        findings.number("text", bound, distance=distance)
    findings.number("own_text", own_text(config))
    findings.number("visible_text", text_of(config, config.first - config.block))
    return findings


def own_text(config: Config) -> float:
    """The same from the first memento that is written while the block is hidden, by itself."""
    return 1 / BASE if config.content == "copy" else bayes_accuracy(config.block, [config.first])


def of_samples(config: Config, layers: int) -> Iterator[Estimand]:
    """Of what probes read."""
    right: dict[str, Any] = {"of": "right", "cluster": "trace", "within": SHARE}
    last = {"layer": layers - 1, "part": BOTH}
    first = {"distance": config.first - config.block}
    here = {**first, **last}
    training = {**here, "role": (MAIN, CHECKPOINT)}
    yield Mean(name="by_layer", by=("model", "probe", "arm", "layer"), where={**first, "part": BOTH}, **right)
    yield Mean(name="by_distance", by=("model", "probe", "arm", "distance"), where=last, **right)
    yield Mean(name="by_part", by=("model", "part", "arm", "layer"), where={**first, "probe": LINEAR}, **right)
    yield Mean(name="by_training", by=("accuracy", "probe", "arm"), where=training, **right)
    retained, restart = ({**here, "arm": arm, "role": ROLES} for arm in (RETAINED, RESTART))
    linear: dict[str, Any] = {"by": ("model",), "within": DIFFERENCE, **ANSWER}
    retained_linear, restart_linear = ({**where, "probe": LINEAR} for where in (retained, restart))
    yield Difference(name="leak", of="right", where=retained_linear, less=restart_linear, **linear)
    yield Mean(name="beyond_text", of="over", where=retained_linear, **linear)
    if config.seeds:
        over: dict[str, Any] = {"of": "right", "cluster": "model"}
        keys = ("probe", "arm", "distance")
        yield Mean(name="seeds", by=keys, where={**last, "role": ROLES}, within=SHARE, **over)
        yield Difference(name="seeds_leak", by=("probe",), where=retained, less=restart, within=DIFFERENCE, **over)


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
OF_CHANGED: tuple[Estimand, ...] = (
    Mean(name="after", of="right", by=("model", "condition", "part"), cluster="trace", within=SHARE),
    Mean(name="margin", of="margin", by=("model", "condition", "part"), cluster="trace", unit="nats"),
    Mean(
        name="lost",
        of="lost",
        by=("model", "condition", "part"),
        where={"condition": (OTHER_DIGITS, OTHER_SUM)},
        cluster="trace",
        unit="nats",
    ),
    Difference(
        name="used",
        of="right",
        by=("model",),
        where={"condition": OTHER_DIGITS, "part": BOTH},
        less={"condition": OWN},
        within=DIFFERENCE,
        **ANSWER,
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
OF_LEFT: tuple[Estimand, ...] = (
    Mean(name="left", of="right", by=("state",), cluster="trace", within=SHARE),
    *(
        Difference(
            name="left_over",
            of="right",
            keys={"state": state},
            where={"state": state},
            less={"state": RESTART},
            within=DIFFERENCE,
            **ANSWER,
        )
        for state in (STAND_IN, BEYOND, EVERYTHING)
    ),
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
    the other one (`whole`); and how much log-probability the memento of the text `lost`."""
    keys = ("model", "trace")
    own, donor = (beside(changed, "margin", {"condition": condition}, keys) for condition in (OWN, DONOR))
    lost = beside(changed, "logprob", {"condition": OWN}, keys) - changed["logprob"]
    return changed.assign(moved=own - changed["margin"], whole=own - donor, lost=lost)


def light_cone(reach: Rows, model: Model) -> Control:
    """The first two layers cannot know what is hidden."""
    near, far = (float(reach[reach["near"] == near]["varies"].max()) for near in (True, False))
    return Control(
        "Light cone: in the first memento that is written while the block is hidden, K and V of the first two layers "
        f"are the same retained and computed again, to {near:.1e} of their size (allowed for round-off: "
        f"{model.round_off:.1e}); those of later layers differ by up to {far:.1e}.",
        near <= model.round_off,
    )
