"""Texts, recordings and dictionaries, each kept as soon as it is there, so that an interrupted run resumes."""

import pandas as pd

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.fingerprint import digest
from kvprobe.inference.model import Model
from kvprobe.saes import Dictionary, Place, Recipe, Shards, hand_written, record, self_written, trained_in
from kvprobe.saes.dictionary import content_digest
from kvprobe.studies.features import Config
from kvprobe.text.tokens import Tokens

AT_ONCE = 128
"""Texts that are written side by side."""


def prepare(model: Model, config: Config, run: Run) -> tuple[list[Dictionary], Shards]:
    """The dictionaries to be studied, and a recording of texts at their places.

    They are trained on what is recorded: hand-written conversations and texts that the model writes. None of them is a
    conversation that is studied.
    """
    texts, folder = hand_written(model), run.part("shards")
    if not config.trains:
        loaded = Dictionary.load_all(config.dictionaries, model)
        return loaded, record(model, texts, [dictionary.place for dictionary in loaded], folder)
    places = [Place.parse(place) for place in config.places]
    shards = record(model, texts + written(model, config, run), places, folder)
    recipe = Recipe(config.kind, config.width, config.active, config.tokens, seed=config.seed)
    kept = run.path / "dictionaries"
    return [trained_in(kept / str(place), shards, place, recipe, model) for place in places], shards


def inputs(config: Config) -> dict[str, str]:
    """A digest of the files of the dictionaries that a config names; none of those that are trained."""
    names = () if config.trains else config.dictionaries
    return {"dictionaries": digest([content_digest(name).encode() for name in names]) if names else ""}


def written(model: Model, config: Config, run: Run) -> list[Tokens]:
    """What the model writes."""
    if not config.written:
        return []
    rows = range(config.written)
    blocks = [rows[first : first + AT_ONCE] for first in rows[::AT_ONCE]]
    doing = "Writing texts to train on"
    table = Parts(model, config, run).table(write, blocks, "written", doing=doing, unit="block")
    return [Tokens.of(ids.tolist()) for ids in table["id"]]


def write(model: Model, config: Config, block: range) -> pd.DataFrame:
    """The tokens of some texts, by number."""
    texts = self_written(model, block, config.length, config.seed)
    return pd.DataFrame({"text": block, "id": [list(text.ids) for text in texts]})
