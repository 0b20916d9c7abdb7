"""Conversations are drawn and read once; then every reader is given more and more of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.experiments.parts import Parts, TensorOfParts, tensor_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.work import kept
from kvprobe.inference.model import Model
from kvprobe.probing.controls import random_model
from kvprobe.probing.readers import Evidence, Known, scored
from kvprobe.studies.leakage_scaling import Config, Reader
from kvprobe.studies.leakage_scaling.readers import READ_FROM, read
from kvprobe.studies.leakage_scaling.reading import (
    STATES,
    ArmState,
    alone_of,
    labels_of,
    places_of,
    read_batch,
    spread,
)
from kvprobe.studies.leakage_scaling.soft import soft_reader
from kvprobe.tasks.grammar import HELD_OUT, Conversation, draw, draw_shared, random_codes
from kvprobe.tasks.passcode import CODE_LENGTH
from kvprobe.tidy import Rows

GRAMMAR, SHARED, UNTRAINED = "grammar", "shared", "untrained"
DRAWS = 2
"""At most so many disjoint sets of training conversations of one number, over which a point is averaged,"""
QUICK: tuple[Reader, ...] = ("pooled", "asked", "neutral")
"""of these readers; others get one."""
INNER = 4
"""Every so many ways of stating the code are those of the inner fold."""
BESIDE = 1500
"""Conversations that are known, at most, where contexts are shared or weights are random."""
CODES = "codes"
"""What is new in the test conversations of Memento's own split: nothing but the code."""


class TestSet(NamedTuple):
    """Some of the test conversations: what is new in them, their places among all of these, and the cluster of each."""

    held_out: str
    places: slice
    clusters: list[int]


@dataclass(frozen=True)
class World:
    """Conversations, those that readers are trained on first; by whom they are read; and how much is known of them.

    Attributes:
        counts: numbers of conversations to train on.
    """

    name: str
    conversations: Sequence[Conversation]
    counts: Sequence[int]
    tests: Sequence[TestSet]
    readers: Sequence[Reader]

    @property
    def training(self) -> int:
        return self.counts[-1]

    @cached_property
    def labels(self) -> Tensor:
        return labels_of(self.conversations)

    @cached_property
    def inner(self) -> Tensor:
        """Which training conversations are of the inner fold: other wordings, or where all are shared, other codes."""
        training = self.conversations[: self.training]
        shared = self.name == SHARED
        numbers = [place if shared else conversation.wording for place, conversation in enumerate(training)]
        return torch.tensor(numbers) % (INNER + shared) == 0

    def up_to(self, most: int) -> "World":
        """The same with at most so many conversations to train on."""
        counts = [count for count in self.counts if count <= most] or self.counts[:1]
        kept = [*self.conversations[: counts[-1]], *self.conversations[self.training :]]
        return replace(self, conversations=kept, counts=counts)


def worlds_of(config: Config) -> list[World]:
    """Conversations of the grammar; those of Memento's split; and the grammar's for random weights."""
    rng, counts, tested = np.random.default_rng([config.seed, 1]), config.conversations, config.tested
    codes = random_codes(counts[-1] + len(HELD_OUT) * tested, rng)
    training, new, tests = draw(codes[: counts[-1]], rng), [], []
    for held_out in HELD_OUT:
        start = counts[-1] + len(new)
        drawn = draw(codes[start : start + tested], rng, held_out)
        clusters = [one.subject if held_out == "subject" else one.wording for one in drawn]
        tests.append(TestSet(held_out, slice(len(new), len(new) + tested), clusters))
        new += drawn
    worlds = [World(GRAMMAR, training + new, counts, tests, config.readers)]
    beside = worlds[0].up_to(BESIDE)
    if config.shared:
        rng = np.random.default_rng([config.seed, 2])
        shared = draw_shared(random_codes(beside.training + tested, rng), config.shared, rng)
        clusters = [(beside.training + place) % config.shared for place in range(tested)]
        worlds.append(World(SHARED, shared, beside.counts, [TestSet(CODES, slice(0, tested), clusters)], ("pooled",)))
    if config.untrained:
        worlds.append(replace(beside, name=UNTRAINED, readers=("pooled",)))
    return worlds


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Three tables. `samples`: for each world, arm, state, reader, number of `conversations`, kind of hold-out, `draw`
    of training conversations, cluster of test conversations and `digit`, the share that is `right` and the `bits` that
    are gained. `use`: for each arm, state, kind of hold-out and cluster, the `logprob` of the whole code when the model
    is asked for it, in nats. `reach`: by `arm` and `layer`, how far averages `differ` between retained and recomputed
    slots, of their size."""
    parts, tables, use, reach = Parts(model, config, run), [], [], []
    for world in worlds_of(config):
        batches = range(0, len(world.conversations), config.batch)
        some = [world.conversations[start : start + config.batch] for start in batches]
        about, doing = (world.name, world.readers), f"Reading conversations, {world.name}"
        paths = parts.tensors(read_some, some, world.name, *about, doing=doing, unit="batch")
        tables.append(read_world(parts, world, paths))
        if "asked" in world.readers:
            use.append(use_of(config, world, paths))
        if world.name == GRAMMAR:
            reach.append(reach_of(config, paths[0]))
    named = {"samples": tables, "use": use, "reach": reach}
    return {name: pd.concat(some, ignore_index=True) if some else pd.DataFrame() for name, some in named.items()}


@kept
def reads_in(model: Model, config: Config, world: str) -> Model:
    """The model that reads a world's conversations."""
    return random_model(model, config.seed) if world == UNTRAINED else model


def read_some(
    model: Model, config: Config, some: Sequence[Conversation], world: str, readers: Sequence[Reader]
) -> dict[str, Tensor]:
    """What a world's readers need of some conversations."""
    needed = {READ_FROM[reader] for reader in readers}
    slots = (config.slots, *spread(model.geometry.n_layers, config.layers)) if "slots" in needed else ()
    asks = tuple(name for name in ("asked", "neutral") if name in needed)
    return read_batch(reads_in(model, config, world), some, config.arms, slots, asks)


def read_world(parts: Parts[Config], world: World, paths: Sequence[Path]) -> pd.DataFrame:
    """What all readers make of a world."""
    places = places_of(parts.config.arms)
    sources = list(dict.fromkeys(place.source for place in places))
    cases: list[tuple[ArmState, Reader, TensorOfParts | None]] = [
        (source, reader, TensorOfParts(paths, f"{READ_FROM[reader]}.{source.name}") if reader != "soft" else None)
        for source in sources
        for reader in world.readers
    ]
    doing = f"Reading codes, {world.name}"
    table = parts.table(read_codes, cases, f"{world.name}-read", world, doing=doing, unit="reader")
    of_place = (
        table[table["source"] == place.source.name].assign(arm=place.arm, state=place.state, world=world.name)
        for place in places
    )
    return pd.concat(of_place, ignore_index=True).drop(columns="source")


def read_codes(
    model: Model, config: Config, case: tuple[ArmState, Reader, TensorOfParts | None], world: World
) -> pd.DataFrame:
    """What a reader makes of a source, of more and more conversations."""
    source, reader, shown = case
    if shown is None:
        some = world.up_to(config.prompted)
        alone = alone_of(model, some.conversations, source, config.batch)
        features, reading = torch.arange(alone.batch), soft_reader(model, alone, some.labels)
    else:
        some, reading = world, partial(read, reader)
        features = shown.read()
    features, draws = features.to(model.lanes.device), DRAWS if reader in QUICK else 1
    tables = [
        averaged(curve_point(features, some, reading, count, draws, config.seed), some, count) for count in some.counts
    ]
    return pd.concat(tables).assign(source=source.name, reader=reader)


def curve_point(
    features: Tensor, world: World, reading: Callable[[Known], Evidence], count: int, draws: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """For each draw of so many training conversations, what is right and how many bits are gained of each test
    conversation, by digit."""
    tested = torch.arange(world.training, len(world.conversations))
    drawn, labels = [], world.labels.to(features.device)
    for number in range(min(draws, world.training // count)):
        some = torch.arange(number * count, (number + 1) * count)
        rows = torch.cat([some, tested]).to(features.device)
        folds = torch.cat([2 - world.inner[some].long(), torch.zeros(len(tested), dtype=torch.long)])
        known = Known(features[rows], labels[:, rows], folds.to(features.device), seed * 1000 + number)
        drawn.append(scored(known, reading(known)))
    return drawn


def averaged(drawn: Sequence[tuple[Tensor, Tensor]], world: World, count: int) -> pd.DataFrame:
    """By kind of hold-out, draw and cluster, the mean over conversations of each digit."""
    tables = []
    for test in world.tests:
        for number, (right, bits) in enumerate(drawn):
            for digit in range(CODE_LENGTH):
                columns = {
                    "right": right[digit, test.places].cpu().numpy(),
                    "bits": bits[digit, test.places].cpu().numpy(),
                }
                rows: Rows = pd.DataFrame({"cluster": test.clusters, **columns})
                rows = rows.groupby("cluster", as_index=False).mean()
                tables.append(rows.assign(held_out=test.held_out, draw=number, digit=digit + 1))
    return pd.concat(tables).assign(conversations=count)


def use_of(config: Config, world: World, paths: Sequence[Path]) -> pd.DataFrame:
    """Log-probability of the right code after each place, by cluster of test conversations."""
    truth, tables = world.labels[:, world.training :].T[..., None], []
    for place in places_of(config.arms):
        said = tensor_of_parts(paths, f"asked.{place.source.name}")[world.training :]
        logprob = said.double().gather(2, truth).sum((1, 2)).numpy()
        for test in world.tests:
            rows: Rows = pd.DataFrame({"cluster": test.clusters, "logprob": logprob[test.places]})
            means = rows.groupby("cluster", as_index=False).mean()
            tables.append(means.assign(arm=place.arm, state=place.state, held_out=test.held_out))
    return pd.concat(tables, ignore_index=True)


def reach_of(config: Config, path: Path) -> pd.DataFrame:
    """How far the averages of retained and recomputed slots of some conversations differ, by layer."""
    tables = []
    for arm in (arm for arm in config.arms if arm != "turn"):
        places = (ArmState(arm, state).source.name for state in STATES)
        one, other = (tensor_of_parts([path], f"pooled.{name}").float() for name in places)
        differs = (one - other).abs().amax((0, 2)) / one.abs().amax((0, 2))
        tables.append(pd.DataFrame({"layer": range(len(differs)), "differs": differs.tolist(), "arm": arm}))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
