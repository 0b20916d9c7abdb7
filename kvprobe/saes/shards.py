"""Activations on disk: what a model computes at some places while it reads many texts, in shards of a few thousand
tokens.

The model is run no further than the deepest place. The first slot of each text is left out: it is the attention sink,
whose residual stream can be a hundred times the size of any other, and a dictionary would learn it instead of the text.
An interrupted recording resumes where it stopped. Memory holds one batch of texts, and in training one window of
shards.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError
from kvprobe.files import read_json, refuse_damaged, replacing, write_whole
from kvprobe.inference.capture import Port, editing
from kvprobe.inference.forward import extend
from kvprobe.inference.model import Model
from kvprobe.models.lanes import Lanes
from kvprobe.progress import Bar
from kvprobe.saes.places import Place, port_of
from kvprobe.text.tokens import Tokens

SHARD = 8_192
"""Tokens after which a shard is full."""
ROWS = 16
"""Texts that are read in one batch."""
WINDOW = 8
"""Shards whose tokens are shuffled together for batches."""
MOST_BYTES = 2**20
"""The largest `shards.json` that is read."""
FIRST = 1
"""Slots at the start of each text that are left out."""


@dataclass(frozen=True)
class Shards:
    """A recording.

    Attributes:
        folder: holds `shards.json` and numbered safetensors files.
        places: what was recorded.
        model: fingerprint of the weights with which texts were read.
        files: in order; each has `ids`, `text` and `slot` (one for each token) and one tensor `[tokens, dim]` for each
            place.
    """

    folder: Path
    places: tuple[Place, ...]
    model: str
    files: tuple[Path, ...]

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """A finished recording.

        Raises:
            UserError: there is none in this folder, or it is unfinished.
        """
        about = _about(folder)
        files = tuple(folder / f"{number:05d}.safetensors" for number in range(about["shards"]))
        if missing := [path.name for path in files if not path.is_file()]:
            raise UserError(
                f"The recording in {folder} is unfinished ({missing[0]} is missing); call `saes.record` again to "
                "resume it."
            )
        return cls(folder, tuple(map(Place.parse, about["places"])), about["model"], files)

    @property
    def tokens(self) -> int:
        """How many were recorded."""
        return sum(len(ids) for ids, _, _ in self.words())

    def words(self) -> Iterator[tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"], Int[Tensor, "tokens"]]]:
        """Token ids, text numbers and slots of each shard."""
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                yield file.get_tensor("ids"), file.get_tensor("text"), file.get_tensor("slot")

    def activations(self, place: Place) -> Iterator[Float[Tensor, "tokens dim"]]:
        """One shard after the other.

        Raises:
            UserError: the place was not recorded.
        """
        if place not in self.places:
            raise UserError(f"{place} was not recorded; choose from {', '.join(map(str, self.places))}.")
        for path in self.files:
            yield _tensor(path, place)

    def mean_and_spread(self, place: Place) -> tuple[Float[Tensor, "dim"], float]:
        """The mean activation, and the root mean square distance from it along one dimension."""
        sums, squares, count = torch.zeros(()), torch.zeros(()), 0
        for shard in self.activations(place):
            exact = shard.double()
            sums, squares, count = sums + exact.sum(0), squares + exact.square().sum(), count + len(exact)
        mean = sums / count
        spread = (squares / count - mean.square().sum()) / len(mean)
        return mean.float(), float(spread.clamp(min=0).sqrt())

    def batches(self, place: Place, size: int, rng: np.random.Generator) -> Iterator[Float[Tensor, "batch dim"]]:
        """Batches without end: each pass takes the shards in a new order and shuffles the tokens of `WINDOW` shards
        together."""
        rest: list[Tensor] = []
        while True:
            order = rng.permutation(len(self.files))
            for first in range(0, len(order), WINDOW):
                pool = torch.cat(
                    rest + [_tensor(self.files[number], place) for number in order[first : first + WINDOW]]
                )
                pool = pool[torch.from_numpy(rng.permutation(len(pool)))]
                whole = len(pool) - len(pool) % size
                yield from pool[:whole].view(-1, size, pool.shape[1])
                rest = [pool[whole:]]


@checked_arguments
def record(model: Model, texts: Sequence[Tokens], places: Sequence[Place], folder: Path) -> Shards:
    """Read texts and record what is computed at these places, or resume a recording that was interrupted.

    Raises:
        UserError: no texts or places, a place that the model does not have, or a folder with another recording.
    """
    if not texts or not places or max(map(len, texts)) <= FIRST:
        raise UserError("There is nothing to record; give texts of two tokens or more, and at least one place.")
    ports = {place: port_of(model.lanes, place) for place in places}
    groups = list(_grouped(texts))
    _begin(folder, model, texts, places, len(groups))
    with Bar(total=sum(map(len, texts)), desc="Recording activations", unit="token") as bar:
        for number, group in enumerate(groups):
            path = folder / f"{number:05d}.safetensors"
            if path.is_file():
                refuse_damaged(path)
            else:
                with replacing(path) as partial:
                    save_file(_shard(model.lanes, texts, group, ports), partial)
            bar.update(sum(len(texts[index]) for index in group))
    return Shards.open(folder)


def _begin(folder: Path, model: Model, texts: Sequence[Tokens], places: Sequence[Place], shards: int) -> None:
    """Write what a recording is of, or check that a folder holds the same recording."""
    about = {
        "model": model.fingerprint,
        "places": list(map(str, places)),
        "texts": hashlib.blake2b(repr([text.ids for text in texts]).encode(), digest_size=8).hexdigest(),
        "shards": shards,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards.json").is_file():
        write_whole(folder / "shards.json", json.dumps(about))
    elif _about(folder) != about:
        raise UserError(f"{folder} holds a recording of other texts, places or weights; choose another folder.")


def at_places(lanes: Lanes, tokens: Sequence[Tokens], ports: dict[Place, Port]) -> dict[Place, Tensor]:
    """What is computed at each place, `[rows, slots, dim]`; the model stops after the deepest place."""
    recorded: dict[Place, Tensor] = {}

    def record_tensor(place: Place, tensor: Tensor) -> Tensor:
        recorded[place] = tensor.flatten(2)
        if len(recorded) == len(ports):
            raise _AllRecorded
        return tensor

    records = [(port, partial(record_tensor, place)) for place, port in ports.items()]
    with suppress(_AllRecorded), editing(lanes, records):
        extend(lanes, None, tokens)
    return recorded


class _AllRecorded(Exception):
    """Everything that was asked for has been recorded, so the pass need not go on."""


def _shard(lanes: Lanes, texts: Sequence[Tokens], group: Sequence[int], ports: dict[Place, Port]) -> dict[str, Tensor]:
    pieces: dict[Place, list[Tensor]] = {place: [] for place in ports}
    for first in range(0, len(group), ROWS):
        rows = group[first : first + ROWS]
        for place, activations in at_places(lanes, [texts[row] for row in rows], ports).items():
            pieces[place] += [activations[at, FIRST : len(texts[row])] for at, row in enumerate(rows)]
    lengths = [len(texts[row]) - FIRST for row in group]
    return {
        "ids": torch.tensor([token for row in group for token in texts[row].ids[FIRST:]]),
        "text": torch.tensor(np.repeat(group, lengths)),
        "slot": torch.cat([torch.arange(length) + FIRST for length in lengths]),
        **{str(place): torch.cat(parts).cpu().contiguous() for place, parts in pieces.items()},
    }


def _grouped(texts: Sequence[Tokens]) -> Iterator[list[int]]:
    """Numbers of consecutive texts, as many as fill a shard; texts of no more than the slots left out are skipped."""
    group: list[int] = []
    size = 0
    for number, text in enumerate(texts):
        if len(text) <= FIRST:
            continue
        if group and size + len(text) > SHARD:
            yield group
            group, size = [], 0
        group.append(number)
        size += len(text)
    yield group


def _tensor(path: Path, place: Place) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(str(place)).float()


def _about(folder: Path) -> dict[str, Any]:
    path = folder / "shards.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no recording (it has no shards.json); make one with `saes.record`.")
    return read_json(path, MOST_BYTES)
