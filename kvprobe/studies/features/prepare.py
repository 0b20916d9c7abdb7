"""Texts, recordings and dictionaries, each kept as soon as it is there, so that an interrupted run resumes."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.fingerprint import digest
from kvprobe.inference.model import Model
from kvprobe.saes import Dictionary, Place, Recipe, Shards, record, self_written, train
from kvprobe.saes.dictionary import content_digest
from kvprobe.studies.features import Config
from kvprobe.tasks import facts, sessions
from kvprobe.text.tokens import Tokens

AT_ONCE = 128
"""Texts that are written side by side."""


def places_of(config: Config) -> tuple[Place, ...]:
    """Where dictionaries are to be trained."""
    return tuple(map(Place.parse, config.places))


def prepare(model: Model, config: Config, run: Run) -> tuple[list[Dictionary], Shards]:
    """The dictionaries to be studied, and a recording of texts at their places.

    They are trained on what is recorded: hand-written conversations (`kvprobe.tasks.facts` and `sessions`) and texts
    that the model writes. None of them is a conversation that is studied.
    """
    texts = hand_written(model)
    if config.trains:
        places = places_of(config)
        shards = record(model, texts + written(model, config, run), places, recording(run))
        return [_trained(model, config, run, shards, place) for place in places], shards
    loaded = [Dictionary.load(name, model) for name in config.dictionaries]
    places = [features.place for features in loaded]
    if len(set(places)) != len(places):
        raise UserError(f"Two dictionaries read {places[0]}; give one for each place.")
    return loaded, record(model, texts, places, recording(run))


def inputs(config: Config) -> dict[str, str]:
    """A digest of the files of the dictionaries that a config names; none of those that are trained."""
    names = () if config.trains else config.dictionaries
    return {"dictionaries": digest([content_digest(name).encode() for name in names]) if names else ""}


def recording(run: Run) -> Path:
    """Where activations lie until the run is finished."""
    return run.part("shards")


def hand_written(model: Model) -> list[Tokens]:
    chats = [facts.conversation(fact, value) for fact in facts.facts() for value in fact.values]
    chats += [sessions.conversation(session) for session in sessions.sessions()]
    return [chat.tokens(model.tokenizer) for chat in chats]


def written(model: Model, config: Config, run: Run) -> list[Tokens]:
    """What the model writes."""
    if not config.written:
        return []
    rows = range(config.written)
    blocks: Sequence[Sequence[int]] = [rows[first : first + AT_ONCE] for first in rows[::AT_ONCE]]

    def measure(block: Sequence[int]) -> pd.DataFrame:
        texts = self_written(model, block, config.length, config.seed)
        return pd.DataFrame(
            [{"text": row, "id": token} for row, text in zip(block, texts, strict=True) for token in text.ids]
        )

    table = table_of_parts(run, blocks, "written", measure, doing="Writing texts to train on", unit="block")
    return [Tokens.of(list(ids)) for _, ids in table.groupby("text")["id"]]


def _trained(model: Model, config: Config, run: Run, shards: Shards, place: Place) -> Dictionary:
    folder = run.path / "dictionaries" / str(place)
    if not folder.is_dir():
        recipe = Recipe(config.kind, config.width, config.active, config.tokens, seed=config.seed)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        train(shards, place, recipe, model.name).save(partial).replace(folder)
    # As it is saved, so that a resumed run has the same: saving rounds TopK dictionaries in the last digit.
    return Dictionary.load(folder, model)
