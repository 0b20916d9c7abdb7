"""How unusual each place of a cache is, layer by layer: raw scores, before anything is said about what is too much."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.layer import Layer
from kvprobe.cache.rotary import Rotary, Rotation

BLOCK = 16
"""Slots in a block; a shorter cache has none."""
FIRST_SLOTS = 4
"""Slots before this position are unlike all others (sinks). They are computed anew instead."""
MOST_FEATURES = 512
"""Numbers by which a layer is predicted; of more, so many random mixtures."""
SHIFTS = tuple(sign * 2**power for power in range(11) for sign in (1, -1))
FARTHEST_SHIFT = 2048
_STEP = BLOCK // 2
_AT_ONCE = 2**21
"""Products of two numbers of a key that are held at once."""
_TINY = 1e-30

Learnt = Mapping[str, Tensor]
"""What is known of a part of a layer: see `kvprobe.detection.clean`."""


@dataclass(frozen=True)
class Score:
    """Scores of one check at all places of a part of a layer, of one row or of several; higher is more unusual.

    Attributes:
        slots: the first slot of each place.
        length: slots in a place.
        shift: for the check of positions, gives the shift that explains a place best, by its row, head and number.
    """

    check: str
    layer: int
    part: str
    values: Float[Tensor, "*rows heads places"]
    slots: Int[Tensor, "places"]
    length: int = 1
    shift: Callable[..., int] | None = None

    @property
    def key(self) -> str:
        return f"{self.check}.{self.layer}.{self.part}"

    def of_row(self, row: int) -> "Score":
        """Of one row of several."""
        return replace(self, values=self.values[row], shift=self.shift and partial(self.shift, row))


@dataclass(frozen=True)
class LayerRead:
    """A layer as it is scored, of rows that hold the same slots, computed at the same positions.

    Attributes:
        stored: its parts as they are in the cache, of the slots that are live.
        held: the number of each of these slots in the cache, and `tokens` what the ledger names there.
        unrotated: the parts of slots computed after the first ones, keys rotated to position 0, in fp32.
        features: numbers of each of them by which the layer is predicted; none where nothing is known before.
        slots: their numbers in the cache, and `positions` where their keys were computed.
    """

    number: int
    stored: Layer
    held: Int[Tensor, "held"]
    tokens: Int[Tensor, "rows held"]
    unrotated: Mapping[str, Float[Tensor, "rows _ others _"]]
    features: Float[Tensor, "rows others features"]
    slots: Int[Tensor, "others"]
    positions: Int[Tensor, "others"]


def unrotated(
    layer: Layer, rotaries: Mapping[str, Rotary | None], positions: Int[Tensor, "slots"]
) -> dict[str, Float[Tensor, "rows heads slots d"]]:
    """The parts in fp32, keys rotated to position 0."""

    def turned(name: str, part: Tensor) -> Tensor:
        rotary = rotaries.get(name)
        if rotary is None:
            return part.float()
        return Rotation.between(rotary, positions[None], torch.zeros_like(positions[None])).of(part.float())

    return {name: turned(name, part) for name, part in layer.items()}


def features_of(parts: Mapping[str, Tensor]) -> Float[Tensor, "rows slots features"]:
    """The numbers of each slot side by side; of more than `MOST_FEATURES` so many random mixtures, always the same."""
    joined = torch.cat([part.transpose(1, 2).flatten(2) for part in parts.values()], -1)
    numbers = joined.shape[-1]
    if numbers <= MOST_FEATURES:
        return joined
    generator = torch.Generator().manual_seed(numbers)
    mixing = torch.randn(numbers, MOST_FEATURES, generator=generator) / numbers**0.5
    return joined @ mixing.to(joined.device)


def plain_scores(read: LayerRead) -> Iterator[Score]:
    """What needs no statistics of the model: numbers that are not finite, zeros, copies, coarse grids."""
    for part, rows in read.stored.items():
        empty = (rows == 0).all(-1)
        yield Score("finite", read.number, part, (~rows.isfinite().all(-1)).float(), read.held)
        yield Score("zeros", read.number, part, empty.float(), read.held)
        if read.number:
            yield Score("copies", read.number, part, (_copies(rows, read.tokens) & ~empty).float(), read.held)
        if rows.shape[-1] >= BLOCK:
            # NumPy takes a twentieth of the time of torch for rows as short as these.
            ordered = torch.from_numpy(np.sort(rows.abs().double().numpy(), -1))
            yield Score("grid", read.number, part, (ordered[..., 1:] == ordered[..., :-1]).float().mean(-1), read.held)


def learnt_scores(
    read: LayerRead, known: Mapping[str, Learnt], rotaries: Mapping[str, Rotary | None]
) -> Iterator[Score]:
    """What is held against clean caches: norms, distances, predictions, positions."""
    starts = _blocks(len(read.slots))
    predictor = "token" if read.number < 2 else "layer below"
    for part, numbers in read.unrotated.items():
        learnt = known[part]
        centred = numbers - learnt["mean"][:, None]
        norm = ((numbers.norm(dim=-1) - learnt["norm"][:, :1]) / learnt["norm"][:, 1:]).abs().clamp_min(_TINY).log()
        white = centred @ learnt["whiten"]
        predicted = prediction(read.features, learnt)
        residual = centred - predicted
        rest = residual @ learnt["rest"]
        far, off = _log_mean(white), _log_mean(rest)
        number = (residual / learnt["deviation"][:, None]).abs().amax(-1).clamp_min(_TINY).log()
        for check, values in (("norm", norm), ("distance", far), (predictor, off), ("number", number)):
            yield Score(check, read.number, part, values, read.slots)
        if not len(starts):
            continue
        for check, values in (("distance of a block", far), (f"{predictor}, of a block", off)):
            yield Score(check, read.number, part, _means(values, starts), read.slots[starts], BLOCK)
        if len(edges := starts[(starts >= _STEP) & (starts + _STEP <= len(read.slots))]):
            sides = _means(white.mT, edges, _STEP) - _means(white.mT, edges - _STEP, _STEP)
            yield Score("step", read.number, part, _log_mean(sides.mT), read.slots[edges])
        if (rotary := rotaries.get(part)) is not None:
            yield _positions(read, part, learnt, predicted, rotary, starts)


def prediction(features: Float[Tensor, "rows slots features"], learnt: Learnt) -> Float[Tensor, "rows heads slots d"]:
    """What the features say of a part, from its mean on."""
    heads, d = learnt["mean"].shape
    return ((features - learnt["centre"]) @ learnt["weights"]).unflatten(-1, (heads, d)).transpose(1, 2)


def _positions(
    read: LayerRead,
    part: str,
    learnt: Learnt,
    predicted: Float[Tensor, "rows heads slots d"],
    rotary: Rotary,
    starts: Int[Tensor, "blocks"],
) -> Score:
    """By how much another position explains a block of keys better than the claimed one."""
    slots = (starts[:, None] + torch.arange(BLOCK, device=starts.device)).flatten()

    def blocks(part: Tensor) -> Tensor:
        """[heads, rows * blocks, slots of a block, d]"""
        return part[:, :, slots].transpose(0, 1).flatten(1, 2).unflatten(1, (-1, BLOCK))

    rows, rest = len(predicted), learnt["rest"]
    keys, expected = blocks(read.unrotated[part]), blocks(learnt["mean"][:, None] + predicted)
    apart = shifted_distances(keys, expected, rest, rotary, [0, *SHIFTS]).clamp_min(_TINY).log()
    best = (apart[..., :1] - apart[..., 1:]).amax(-1).unflatten(1, (rows, -1)).transpose(0, 1)

    def nearest(row: int, head: int, block: int) -> int:
        there = (slice(head, head + 1), slice(row * len(starts) + block, row * len(starts) + block + 1))
        every = [shift for shift in range(-FARTHEST_SHIFT, FARTHEST_SHIFT + 1) if shift]
        return every[int(shifted_distances(keys[there], expected[there], rest[there[0]], rotary, every).argmin())]

    return Score("position", read.number, part, best, read.slots[starts], BLOCK, nearest)


def shifted_distances(
    keys: Float[Tensor, "heads blocks slots d"],
    expected: Float[Tensor, "heads blocks slots d"],
    rest: Float[Tensor, "heads d d"],
    rotary: Rotary,
    shifts: Sequence[int],
) -> Float[Tensor, "heads blocks shifts"]:
    """The mean square of (turned - expected) @ rest, for keys turned back by each number of positions.

    A pair of numbers of a key, as a complex number, turns by a factor. The square is a sum over every two pairs, each
    times the factors of both, so that slots are summed up once, and not once for each shift.
    """
    back = torch.tensor(shifts)[:, None]
    turn = Rotation.between(rotary, back, torch.zeros_like(back))
    factors = torch.complex(turn.cos.double(), turn.sin.double()).flatten(0, 2).T
    still = keys.shape[-1] - 2 * len(factors)
    factors = torch.nn.functional.pad(factors, (0, 0, 0, still), value=1.0)
    onto = rotary.paired(rest.double().mT).conj()
    same, mirrored = (onto.mH @ onto)[:, None], (onto.mT @ onto)[:, None]
    distances: list[Tensor] = []
    for some, aims in zip(
        *(part.split(max(1, _AT_ONCE // same.numel()), 1) for part in (keys, expected @ rest[:, None])), strict=True
    ):
        pairs, aims = rotary.paired(some.double()), aims.double()
        own = (factors.conj() * (same * (pairs.mH @ pairs) @ factors)).sum(-2).real
        own = own + (factors * (mirrored * (pairs.mT @ pairs) @ factors)).sum(-2).real
        crossed = torch.complex(aims @ onto.real[:, None], aims @ onto.imag[:, None])
        both = ((pairs * crossed).sum(-2) @ factors).real
        distances.append(own / 2 - 2 * both + aims.square().sum((-1, -2))[..., None])
    return torch.cat(distances, 1).float() / (BLOCK * keys.shape[-1])


def _blocks(slots: int) -> Int[Tensor, "blocks"]:
    """The first slot of each whole block, and of the block that ends with the last slot."""
    whole = torch.arange(0, max(0, slots - BLOCK + 1), BLOCK)
    return torch.cat([whole, torch.tensor([slots - BLOCK])]) if slots > BLOCK and slots % BLOCK else whole


def _means(values: Float[Tensor, "*rows slots"], starts: Int[Tensor, "blocks"], length: int = BLOCK) -> Tensor:
    """The mean over so many slots from each start."""
    return values[..., starts[:, None] + torch.arange(length)].mean(-1)


def _log_mean(white: Float[Tensor, "*places d"]) -> Float[Tensor, "*places"]:
    return white.square().mean(-1).clamp_min(_TINY).log()


def _copies(
    stored: Float[Tensor, "rows heads slots d"], tokens: Int[Tensor, "rows slots"]
) -> Bool[Tensor, "rows heads slots"]:
    """Slots that hold the very numbers of a slot of another token; a token repeated from the first slot on has the same
    V each time."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(stored.shape[-1], generator=generator, dtype=torch.float64).to(stored.device)
    hashes, order = (stored.double() @ mixing).sort(stable=True)
    of = tokens.to(order.device)[:, None].expand_as(order).gather(-1, order)
    same = (hashes[..., 1:] == hashes[..., :-1]) & (of[..., 1:] != of[..., :-1])
    result = torch.zeros(hashes.shape, dtype=torch.bool, device=stored.device)
    return result.scatter(-1, order[..., 1:], same)
