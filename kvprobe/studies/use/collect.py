"""From conversations to tables: K and V with many codes, erasers fitted on one half, and their effects on the other.

One file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from safetensors.torch import load_file
from torch import Tensor

from kvprobe.experiments.parts import table_of_parts, tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.studies.use import Config
from kvprobe.studies.use.check import check
from kvprobe.studies.use.effects import (
    ERASE,
    FULL,
    IN_VIEW,
    STRENGTHS,
    SWAP,
    VIEWS,
    Scene,
    cell,
    cells,
    edited,
    measure,
    stage,
)
from kvprobe.studies.use.fit import LEACE, RANDOM_0, Erasers, fit
from kvprobe.studies.use.read import Case, read_turn
from kvprobe.tasks.passcode import Encoder, contexts, draw_codes
from kvprobe.tidy import Rows

SPARE = 64
"""Codes that are there to be a donor's; among so many, some begin with another digit."""
SHOWN = 3
"""Conversations whose generated replies are shown."""
NEW_TOKENS = 12
NOTHING = "nothing"
"""The edit of a reply from the unedited cache."""

Place = tuple[str, str, str, str]
"""View, place, band and part."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Every edit of every conversation (`samples`), one at several strengths (`doses`), what `probes` read, the rank of
    each of the `erasers`, and some `replies`."""
    cases = cases_of(config, model.tokenizer)
    paths = tensor_parts(
        run,
        cases,
        "read",
        lambda case: read_turn(model, case, config.batch),
        doing="Reading conversations",
        unit="conversation",
    )
    reads = [load_file(path) for path in paths]
    fitted = fit_halves(reads, config)
    probes = check(reads, fitted)
    bench = Bench(model, config, run, cases, reads, fitted)
    samples = bench.effects()
    return {
        "samples": samples,
        "doses": bench.doses(chosen_places(samples)),
        "probes": probes,
        "erasers": sizes(fitted),
        "replies": bench.replies(),
    }


def cases_of(config: Config, tokenizer: Encoder) -> list[Case]:
    """All conversations, each with codes of its own."""
    every = contexts()[: config.contexts]
    count = config.contexts * (config.codes + 1) + SPARE
    drawn = draw_codes(count, np.random.default_rng([config.seed, 1]), tokenizer)
    owns, spare = drawn[config.contexts * config.codes : -SPARE], drawn[-SPARE:]
    cases = []
    for number, (context, code_asked) in enumerate(zip(every, owns, strict=True)):
        codes = drawn[number * config.codes : (number + 1) * config.codes]
        # Another first digit, so that one token distinguishes the two codes.
        other = next(code for code in spare if code[0] != code_asked[0])
        cases.append(Case(number, context, tuple(codes), (code_asked, other)))
    return cases


def fit_halves(reads: Sequence[Mapping[str, Tensor]], config: Config) -> tuple[Erasers, Erasers]:
    """The erasers of each half of the conversations."""
    first, second = (np.random.default_rng([config.seed, 2, half]) for half in (0, 1))
    return fit(reads[0::2], config.randoms, first), fit(reads[1::2], config.randoms, second)


@dataclass(frozen=True)
class Bench:
    """What edits are measured with: each conversation with the erasers of the other half."""

    model: Model
    config: Config
    run: Run
    cases: Sequence[Case]
    reads: Sequence[Mapping[str, Tensor]]
    erasers: tuple[Erasers, Erasers]

    @property
    def bands(self) -> dict[str, tuple[int, ...]]:
        return named_bands(self.model.geometry.n_layers, self.config.bands)

    def scene(self, case: Case) -> Scene:
        return stage(self.model, case, self.reads[case.number], self.erasers[1 - case.half])

    def effects(self) -> pd.DataFrame:
        """All edits in all conversations; see `measure`."""

        def every(case: Case) -> pd.DataFrame:
            scene = self.scene(case)
            wanted = {view: cells(view, scene.layout, self.bands, self.config.randoms) for view in VIEWS}
            tables = [measure(self.model, scene, view, edits) for view, edits in wanted.items()]
            return pd.concat(tables, ignore_index=True).assign(context=case.number, half=case.half)

        return table_of_parts(
            self.run, self.cases, "effects", every, doing="Erasing and exchanging", unit="conversation"
        )

    def doses(self, places: tuple[Place, Place]) -> pd.DataFrame:
        """The same edits at several strengths, at the place that the other half chose."""

        def doses(case: Case) -> pd.DataFrame:
            scene = self.scene(case)
            view, place, band, part = places[case.half]
            wanted = [
                cell(scene.layout, kind, place, name, band, self.bands[band], part)
                for kind in (ERASE, SWAP)
                for name in (LEACE, RANDOM_0, FULL)
            ]
            tables = [
                measure(self.model, scene, view, wanted, strength).assign(strength=strength) for strength in STRENGTHS
            ]
            return pd.concat(tables, ignore_index=True).assign(context=case.number, half=case.half)

        return table_of_parts(self.run, self.cases, "doses", doses, doing="Dose and response", unit="conversation")

    def replies(self) -> pd.DataFrame:
        """What the model replies, greedily, after edits of all layers, K and V: a row per conversation and edit."""
        rows, layers = [], self.bands[EVERY_LAYER]
        for case in self.cases[:SHOWN]:
            scene = self.scene(case)
            caches = {("", NOTHING): scene.base} | {
                (place, name): edited(scene, scene.average, place, name, layers)
                for place in VIEWS[IN_VIEW]
                for name in (LEACE, RANDOM_0, FULL)
            }
            asked = scene.suffix[: len(scene.suffix) - scene.kept + 1]
            for (place, name), cache in caches.items():
                reply = generate(self.model.lanes, [asked], cache, max_new_tokens=NEW_TOKENS).texts[0]
                rows.append(
                    {"context": case.number, "code": case.pair[0], "place": place, "name": name, "reply": reply}
                )
        return pd.DataFrame(rows)


def chosen_places(table: Rows) -> tuple[Place, Place]:
    """For each half, where the eraser took most of the margin beyond a random one on the *other* half: one band of
    layers."""
    banded = table[(table["kind"] == ERASE) & (table["band"] != EVERY_LAYER)]
    lost = banded.assign(lost=banded["intact_margin"] - banded["margin"])

    def best(half: int) -> Place:
        by = ["view", "place", "band", "part"]
        means = lost[lost["half"] == half].groupby([*by, "name"])["lost"].mean().unstack("name")
        return (means[LEACE] - means[RANDOM_0]).idxmax()

    return best(1), best(0)


def sizes(erasers: tuple[Erasers, Erasers]) -> pd.DataFrame:
    """Of each eraser: its mean rank over layers, the `share` of the variance that it moves, and of how many dimensions
    (`width`)."""
    return pd.DataFrame(
        {"half": half, "place": place, "role": role, "part": part, "name": name, "width": eraser.mean.shape[-1]}
        | {"rank": float(eraser.rank.double().mean()), "share": float(eraser.share.mean())}
        for half, of_half in enumerate(erasers)
        for (place, role, part, name), eraser in of_half.items()
    )
