"""All scores of the rows of a cache, which is read layer by layer, each layer once."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.cache.layer import Layer, shape_of
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import ROTATED, described
from kvprobe.cache.rotary import Rotary
from kvprobe.cache.stored import AnyCache
from kvprobe.detection.columns import computable, lone_columns, read_at_spots, spots_of, unedited
from kvprobe.detection.scores import (
    FIRST_SLOTS,
    LayerRead,
    Learnt,
    Score,
    features_of,
    learnt_scores,
    plain_scores,
    unrotated,
)
from kvprobe.errors import UserError
from kvprobe.inference.model import Model

RowsScore = tuple[Sequence[int], Score]
"""A score of several rows, and their numbers in the cache."""


def judged_slots(ledger: Ledger, row: int) -> Bool[Tensor, "slots"]:
    """Slots that every layer holds: not those that were hidden in one, or left its sliding window."""
    return ledger.live[:, row].any(1).all(0) & ~ledger.padding[row]


class RowsReader:
    """Reads rows of a cache for their scores, layer after layer from the first one.

    They are read together, so they must hold the same slots, computed at the same positions.
    """

    def __init__(self, model: Model, ledger: Ledger, rows: Sequence[int]) -> None:
        self.rows, self.rotaries = rows, rotaries_by_part(model)
        held = judged_slots(ledger, rows[0]).nonzero()[:, 0].cpu()
        origins, tokens = ledger.origins[rows[0]].cpu(), ledger.tokens[[*rows]].cpu()
        self.held, self.tokens = held, tokens[:, held]
        self.later = origins[held] >= FIRST_SLOTS
        self.slots = held[self.later]
        self.positions = origins[self.slots]
        self._lone: list[list[Tensor]] = []
        self._before: Mapping[str, Tensor] = {}
        if computable(model.lanes) and len(self.slots):
            device = model.lanes.device
            at = self.positions if not model.lanes.can_reindex else torch.zeros_like(self.slots)
            alone = lone_columns(
                model.lanes,
                tokens[:, self.slots].flatten().to(device),
                at.repeat(len(rows)).to(device),
                min(2, model.geometry.n_layers),
            )
            by_row = (len(rows), len(self.slots))
            self._lone = [[part.cpu().unflatten(1, by_row).transpose(0, 1) for part in parts] for parts in alone]

    def read(self, number: int, layer: Layer) -> LayerRead:
        """A layer as it is scored."""
        stored = {name: part[[*self.rows]].cpu()[:, :, self.held] for name, part in layer.items()}
        finite = {name: part.nan_to_num(0.0, 0.0, 0.0)[:, :, self.later] for name, part in stored.items()}
        turned = unrotated(finite, self.rotaries[number], self.positions)
        lone = [part for parts in self._lone[: number + 1] for part in parts]
        known = dict(zip(map(str, range(len(lone))), lone, strict=True))
        predictors = known if number < len(self._lone) else self._before
        features = features_of(predictors) if predictors else torch.zeros(len(self.rows), len(self.slots), 0)
        self._before = turned or self._before
        return LayerRead(number, stored, self.held, self.tokens, turned, features, self.slots, self.positions)


def readers_of(model: Model, ledger: Ledger) -> list[RowsReader]:
    """A reader for each set of rows that can be read together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row in range(ledger.batch):
        where = ledger.origins[row].where(judged_slots(ledger, row), -1)
        alike.setdefault(tuple(where.tolist()), []).append(row)
    return [RowsReader(model, ledger, rows) for rows in alike.values()]


def scores_of(model: Model, cache: AnyCache, parts: tuple[Mapping[str, Learnt], ...]) -> list[list[Score]]:
    """All scores of each row; see `scores_of_rows`."""
    scores: list[list[Score]] = [[] for _ in range(cache.ledger.batch)]
    for rows, score in scores_of_rows(model, cache, parts):
        for place, row in enumerate(rows):
            scores[row].append(score.of_row(place))
    return scores


def scores_of_rows(model: Model, cache: AnyCache, parts: tuple[Mapping[str, Learnt], ...]) -> list[RowsScore]:
    """All scores, each of several rows, those of columns that are computed anew among them. Each layer is read once.

    Raises:
        UserError: a layer is not of the model's shape.
    """
    rows = range(cache.ledger.batch)
    readers = readers_of(model, cache.ledger)
    known = computable(model.lanes)
    chosen = [spots_of(unedited(cache.ledger, row)) if known else [] for row in rows]
    spots = [(row, slot) for row in rows for slot in chosen[row]]
    scores: list[RowsScore] = []
    broken, done = set[int](), list[int]()

    def scored(number: int, anew: Sequence[Tensor] = ()) -> Layer:
        """The layer, once it is scored; 0 where numbers are not finite, from which nothing is computed anew."""
        layer = cache.layers[number]
        refuse_other_shape(model, number, layer)
        done.append(number)
        for reader in readers:
            read = reader.read(number, layer)
            new = list(plain_scores(read)) if len(read.held) else []
            if len(read.slots):
                new += learnt_scores(read, parts[number], reader.rotaries[number])
            scores.extend((reader.rows, score) for score in new)
            infinite = [score.values.flatten(1).any(1).tolist() for score in new if score.check == "finite"]
            broken.update(row for of_part in infinite for row, found in zip(reader.rows, of_part, strict=True) if found)
        places = {row: [place for place, (at, _) in enumerate(spots) if at == row] for row in rows if row not in broken}
        for (name, part), right in zip(layer.items(), anew, strict=False):
            stored = part.transpose(1, 2)[tuple(torch.tensor(spots).T)].transpose(0, 1).to(right.device).float()
            apart = (stored - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-6)
            apart = apart.clamp_min(1e-6).log().cpu()
            for row, of_row in places.items():
                if of_row:
                    values = apart[None, :, of_row]
                    scores.append(((row,), Score("computed anew", number, name, values, torch.tensor(chosen[row]))))
        return {name: part.nan_to_num(0.0, 0.0, 0.0) for name, part in layer.items()} if broken else layer

    if spots:
        read_at_spots(model.lanes, cache.ledger, spots, scored)
    for number in range(len(done), len(cache.layers)):
        scored(number)
    return scores


def refuse_other_shape(model: Model, number: int, layer: Layer) -> None:
    if (shape := shape_of(layer)) != (expected := model.geometry.layers[number]):
        raise UserError(
            f"Layer {number} of the cache holds {described((shape,))}, but that of {model.name} holds "
            f"{described((expected,))}; audit a cache with the model that made it."
        )


def rotaries_by_part(model: Model) -> tuple[Mapping[str, Rotary | None], ...]:
    """How parts are rotated, each layer; not at all where keys cannot be rotated back."""
    if not model.lanes.can_reindex:
        return ({},) * model.geometry.n_layers
    return tuple(
        {
            name: rotary and Rotary(rotary.frequencies.cpu(), rotary.layout, rotary.last)
            for name, rotary in layer.items()
            if name in ROTATED
        }
        for layer in model.lanes.rotaries_by_part
    )
