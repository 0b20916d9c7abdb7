"""From conversations to tables: K and V with many codes, erasers fitted on one half, and their effects on the other.

One file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import pandas as pd
from safetensors.torch import load_file
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.studies.use import Config
from kvprobe.studies.use.effects import ERASE, FULL, IN_VIEW, SWAP, VIEWS, CodedScene
from kvprobe.studies.use.place_erasers import INLP, LEACE, RANDOM_0, Erasers, check_places, eraser_sizes
from kvprobe.studies.use.places import DIGITS, PLACES, cases_of, fit_halves, read_case
from kvprobe.studies.use.variants import VariantReads
from kvprobe.tasks.passcode import Coded
from kvprobe.tidy import Rows

SHOWN = 3
"""Conversations whose generated replies are shown."""
NEW_TOKENS = 12
NOTHING = "nothing"
"""The edit of a reply from the unedited cache."""

Chosen = tuple[str, str, str, str]
"""View, place, band and part."""
Scene = tuple[Coded, Mapping[str, Tensor], Erasers]
"""A conversation, what was read of it, and the erasers that it meets."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Every edit of every conversation (`samples`), one at several strengths (`doses`), what `probes` read, the rank of
    each of the `erasers`, and some `replies`."""
    parts, coded, unit = Parts(model, config, run), cases_of(config, model.tokenizer), "conversation"
    paths = parts.tensors(read, coded, "read", doing="Reading conversations", unit=unit)
    reads = [load_file(path) for path in paths]
    fitted = fit_halves(reads, config)
    # Each conversation meets the erasers of the other half.
    cases = [(case, read, fitted[1 - case.number % 2]) for case, read in zip(coded, reads, strict=True)]
    samples = parts.table(effects, cases, "effects", doing="Erasing and exchanging", unit=unit)
    places = chosen_places(samples)
    return {
        "samples": samples,
        "doses": parts.table(doses, cases, "doses", places, doing="Dose and response", unit=unit),
        "probes": check(reads, fitted),
        "erasers": pd.concat([eraser_sizes(of_half).assign(half=half) for half, of_half in enumerate(fitted)]),
        "replies": pd.concat([replies(CodedScene.of(model, *case), case[0]) for case in cases[:SHOWN]]),
    }


def read(model: Model, config: Config, case: Coded) -> dict[str, Tensor]:
    """K and V of a conversation; see `read_case`."""
    return read_case(model, case, config.batch)


def effects(model: Model, config: Config, case: Scene) -> pd.DataFrame:
    """Every edit of a conversation, in every view."""
    scene, number = CodedScene.of(model, *case), case[0].number
    bands = named_bands(scene.base.n_layers, config.bands)
    tables = [scene.measure(view, scene.cells(view, bands, config)) for view in VIEWS]
    return pd.concat(tables, ignore_index=True).assign(context=number, half=number % 2)


def doses(model: Model, config: Config, case: Scene, places: tuple[Chosen, Chosen]) -> pd.DataFrame:
    """The same edits at several strengths, at the place that the other half chose."""
    scene, number = CodedScene.of(model, *case), case[0].number
    bands = named_bands(scene.base.n_layers, config.bands)
    view, place, band, part = places[number % 2]
    edits = product((ERASE, SWAP), (LEACE, RANDOM_0, FULL), config.strengths)
    wanted = [scene.cell(kind, place, name, band, bands[band], part, much) for kind, name, much in edits]
    return scene.measure(view, wanted).assign(context=number, half=number % 2)


def check(reads: Sequence[Mapping[str, Tensor]], erasers: tuple[Erasers, Erasers]) -> pd.DataFrame:
    """What probes still read of each half once the other half's erasers were at work; see `check_places`."""
    names, halves = (LEACE, RANDOM_0, INLP), [VariantReads(reads[half::2]) for half in (0, 1)]
    tables = []
    for half, other in ((0, 1), (1, 0)):
        table = check_places(halves[half], halves[other], erasers[other], PLACES, DIGITS, names)
        tables.append(table.assign(context=2 * table["context"] + half))
    return pd.concat(tables, ignore_index=True)


def replies(scene: CodedScene, case: Coded) -> pd.DataFrame:
    """What the model replies, greedily, after edits of all layers, K and V."""
    layers = range(scene.base.n_layers)
    edits = [("", NOTHING), *product(VIEWS[IN_VIEW], (LEACE, RANDOM_0, FULL))]
    caches = [scene.edited(scene.average, place, name, layers) if place else scene.base for place, name in edits]
    asked = scene.suffix[: len(scene.suffix) - scene.codes.shape[1] + 1]
    said = generate(scene.model.lanes, [asked] * len(edits), KVCache.join(caches), max_new_tokens=NEW_TOKENS).texts
    rows = zip(edits, said, strict=True)
    return pd.DataFrame(
        {"context": case.number, "code": case.pair[0], "place": place, "name": name, "reply": reply}
        for (place, name), reply in rows
    )


def chosen_places(table: Rows) -> tuple[Chosen, Chosen]:
    """For each half, where the eraser took most of the margin beyond a random one on the *other* half: one band of
    layers."""
    banded = table[(table["kind"] == ERASE) & (table["band"] != EVERY_LAYER)]
    lost = banded.assign(lost=banded["intact_margin"] - banded["margin"])

    def best(half: int) -> Chosen:
        by = ["view", "place", "band", "part"]
        means = lost[lost["half"] == half].groupby([*by, "name"])["lost"].mean().unstack("name")
        return (means[LEACE] - means[RANDOM_0]).idxmax()

    return best(1), best(0)
