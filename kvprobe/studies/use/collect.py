"""From conversations to tables: K and V with many codes, erasers fitted on one half, and their effects on the other.

One file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from safetensors.torch import load_file
from torch import Tensor

from kvprobe.experiments.parts import table_of_parts, tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.studies.use.config import Config
from kvprobe.studies.use.effects import (
    ERASE,
    FULL,
    IN_VIEW,
    STRENGTHS,
    SWAP,
    VIEWS,
    cell,
    cells,
    edited,
    held,
    measure,
    random_names,
    seen,
    stage,
)
from kvprobe.studies.use.fit import INLP, LEACE, Erasers, fit
from kvprobe.studies.use.read import read_turn
from kvprobe.tasks.passcode import Context, Encoder, contexts, draw_codes

SPARE = 64
"""Codes that are there to be a donor's; among so many, some begin with another digit."""
TOLD = 3
"""Conversations whose generated replies are shown."""
NEW_TOKENS = 12


@dataclass(frozen=True)
class Case:
    """A conversation: the codes with which it is read to fit erasers, and the two that are exchanged."""

    number: int
    context: Context
    codes: tuple[str, ...]
    pair: tuple[str, str]

    @property
    def half(self) -> int:
        return self.number % 2


Place = tuple[str, str, str, str]
"""View, place, band and part."""


def cases_of(config: Config, tokenizer: Encoder) -> list[Case]:
    """All conversations, each with codes of its own."""
    every = contexts()[: config.contexts]
    count = config.contexts * (config.codes + 1) + SPARE
    drawn = draw_codes(count, np.random.default_rng([config.seed, 1]), tokenizer)
    cut = config.contexts * config.codes
    fitted, owns, spare = drawn[:cut], drawn[cut : cut + config.contexts], drawn[cut + config.contexts :]
    found = []
    for number, (context, own) in enumerate(zip(every, owns, strict=True)):
        codes = fitted[number * config.codes : (number + 1) * config.codes]
        # Another first digit, so that one token tells the two codes apart.
        other = next(code for code in spare if code[0] != own[0])
        found.append(Case(number, context, tuple(codes), (own, other)))
    return found


def collect_reads(model: Model, cases: Sequence[Case], config: Config, run: Run) -> list[dict[str, Tensor]]:
    """What `read_turn` gives for each conversation."""

    def read(case: Case) -> dict[str, Tensor]:
        return read_turn(model, case.context, case.codes, config.batch)

    paths = tensor_parts(run, cases, "read", read, doing="Reading conversations", unit="conversation")
    return [load_file(path) for path in paths]


def fit_halves(reads: Sequence[Mapping[str, Tensor]], config: Config) -> tuple[Erasers, Erasers]:
    """The erasers of each half of the conversations."""
    first, second = (
        fit(reads[half::2], config.randoms, np.random.default_rng([config.seed, 2, half])) for half in (0, 1)
    )
    return first, second


def collect_effects(
    model: Model,
    cases: Sequence[Case],
    reads: Sequence[Mapping[str, Tensor]],
    erasers: tuple[Erasers, Erasers],
    config: Config,
    run: Run,
) -> pd.DataFrame:
    """All edits in all conversations, with erasers that were fitted on the other half; see `measure`."""
    layers = named_bands(model.geometry.n_layers, config.bands)
    names = [LEACE, INLP, FULL, *random_names(config.randoms)]

    def every(case: Case) -> pd.DataFrame:
        scene = stage(model, case.context, case.pair, reads[case.number], case.codes)
        tables = []
        for view, places in VIEWS.items():
            others = held(scene, erasers[1 - case.half], places, names, layers[EVERY_LAYER])
            tables.append(measure(model, scene, view, others, cells(view, scene.layout, layers, config.randoms)))
        return pd.concat(tables, ignore_index=True).assign(context=case.number, half=case.half)

    return table_of_parts(run, cases, "effects", every, doing="Erasing and exchanging", unit="conversation")


def chosen_places(table: Any) -> tuple[Place, Place]:
    """For each half, where the eraser took most of the margin beyond a random one on the *other* half: one band of
    layers."""
    banded = table[(table["kind"] == ERASE) & (table["band"] != EVERY_LAYER)]
    lost = banded.assign(lost=banded["intact_margin"] - banded["margin"])

    def best(half: int) -> Place:
        by = ["view", "place", "band", "part"]
        means = lost[lost["half"] == half].groupby([*by, "name"])["lost"].mean().unstack("name")
        return (means[LEACE] - means[random_names(1)[0]]).idxmax()

    return best(1), best(0)


def collect_doses(
    model: Model,
    cases: Sequence[Case],
    reads: Sequence[Mapping[str, Tensor]],
    erasers: tuple[Erasers, Erasers],
    places: tuple[Place, Place],
    config: Config,
    run: Run,
) -> pd.DataFrame:
    """The same edits at several strengths, at the place that the other half chose."""
    layers = named_bands(model.geometry.n_layers, config.bands)
    names = [LEACE, *random_names(1), FULL]

    def doses(case: Case) -> pd.DataFrame:
        scene = stage(model, case.context, case.pair, reads[case.number], case.codes)
        view, place, band, part = places[case.half]
        wanted = [
            cell(scene.layout, kind, place, name, band, layers[band], part) for kind in (ERASE, SWAP) for name in names
        ]
        tables = []
        for strength in STRENGTHS:
            others = held(scene, erasers[1 - case.half], [place], names, layers[band], strength)
            tables.append(measure(model, scene, view, others, wanted).assign(strength=strength))
        return pd.concat(tables, ignore_index=True).assign(context=case.number, half=case.half)

    return table_of_parts(run, cases, "doses", doses, doing="Dose and response", unit="conversation")


def tell(
    model: Model, cases: Sequence[Case], reads: Sequence[Mapping[str, Tensor]], erasers: tuple[Erasers, Erasers]
) -> pd.DataFrame:
    """What the model replies, greedily, after edits of all layers, K and V: one row per conversation and edit."""
    rows, layers = [], range(model.geometry.n_layers)
    for case in cases[:TOLD]:
        scene = stage(model, case.context, case.pair, reads[case.number], case.codes)
        own = erasers[1 - case.half]
        edits = {"nothing": scene.base}
        for place in VIEWS[IN_VIEW]:
            for name in (LEACE, *random_names(1), FULL):
                edits[f"{place}: {name}"] = edited(scene, scene.average, own, place, name, layers)
        asked = scene.suffix[: len(scene.suffix) - scene.kept + 1]
        for edit, cache in edits.items():
            said = generate(model.lanes, [asked], seen(cache, scene.layout, IN_VIEW), max_new_tokens=NEW_TOKENS)
            rows.append({"context": case.number, "code": case.pair[0], "erased": edit, "reply": said.texts[0]})
    return pd.DataFrame(rows)
