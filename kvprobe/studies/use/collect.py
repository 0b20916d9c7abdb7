"""From conversations to tables: K and V with many codes, erasers fitted on one half, and their effects on the other.

One file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import pandas as pd
from safetensors.torch import load_file
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import table_of_parts, tensor_parts
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


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Every edit of every conversation (`samples`), one at several strengths (`doses`), what `probes` read, the rank of
    each of the `erasers`, and some `replies`."""
    cases = cases_of(config, model.tokenizer)
    bands = named_bands(model.geometry.n_layers, config.bands)

    def read(case: Coded) -> dict[str, Tensor]:
        return read_case(model, case, config.batch)

    paths = tensor_parts(run, cases, "read", read, doing="Reading conversations", unit="conversation")
    reads = [load_file(path) for path in paths]
    fitted = fit_halves(reads, config)
    probes = check(reads, fitted)

    def scene_of(case: Coded) -> CodedScene:
        """Each conversation meets the erasers of the other half."""
        return CodedScene.of(model, case, reads[case.number], fitted[1 - case.number % 2])

    def effects(case: Coded) -> pd.DataFrame:
        scene = scene_of(case)
        tables = [scene.measure(view, scene.cells(view, bands, config)) for view in VIEWS]
        return pd.concat(tables, ignore_index=True).assign(context=case.number, half=case.number % 2)

    samples = table_of_parts(run, cases, "effects", effects, doing="Erasing and exchanging", unit="conversation")
    places = chosen_places(samples)

    def doses(case: Coded) -> pd.DataFrame:
        """The same edits at several strengths, at the place that the other half chose."""
        scene = scene_of(case)
        view, place, band, part = places[case.number % 2]
        edits = product((ERASE, SWAP), (LEACE, RANDOM_0, FULL), config.strengths)
        wanted = [scene.cell(kind, place, name, band, bands[band], part, much) for kind, name, much in edits]
        return scene.measure(view, wanted).assign(context=case.number, half=case.number % 2)

    return {
        "samples": samples,
        "doses": table_of_parts(run, cases, "doses", doses, doing="Dose and response", unit="conversation"),
        "probes": probes,
        "erasers": pd.concat([eraser_sizes(of_half).assign(half=half) for half, of_half in enumerate(fitted)]),
        "replies": pd.concat([replies(scene_of(case), case, bands[EVERY_LAYER]) for case in cases[:SHOWN]]),
    }


def check(reads: Sequence[Mapping[str, Tensor]], erasers: tuple[Erasers, Erasers]) -> pd.DataFrame:
    """What probes still read of each half once the other half's erasers were at work; see `check_places`."""
    names, halves = (LEACE, RANDOM_0, INLP), [VariantReads(reads[half::2]) for half in (0, 1)]
    tables = []
    for half, other in ((0, 1), (1, 0)):
        table = check_places(halves[half], halves[other], erasers[other], PLACES, DIGITS, names)
        tables.append(table.assign(context=2 * table["context"] + half))
    return pd.concat(tables, ignore_index=True)


def replies(scene: CodedScene, case: Coded, layers: Sequence[int]) -> pd.DataFrame:
    """What the model replies, greedily, after edits of all layers, K and V."""
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
