"""Noise floors: how far two caches of one text lie apart where nothing is wrong.

A cache depends on who computed it: another kernel, batch or portion of the prompt adds up in another order, halves
round, engines round weights and activations. `floor_between` gives what was measured of such a pair, by part and
relative depth, in many texts and models. Models differ more than texts do, so a model that was measured has floors of
its own, known by its config; others have those of the models that were measured, together.

Limits hold for whole caches, not for vectors. Of each cache the most unusual place counts, so that a sound cache
exceeds its limit at most at the stated rate (conformal prediction; Vovk et al. 2005). The most unusual places of caches
fall off as a power of the distance, so that a limit for more slots, or at a lower rate than the texts can show, lies
farther out on that tail.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float

from kvprobe.arguments import AtLeastOne, Share, checked_arguments
from kvprobe.cache.computed import DTYPES, STEPS, Computed
from kvprobe.cache.differences import vectors_apart
from kvprobe.cache.entries import entries
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import ROTATED
from kvprobe.cache.precision import computed_as, in_fp8
from kvprobe.cache.stored import AnyCache
from kvprobe.errors import UserError
from kvprobe.stats import conformal_rank, ranks_of_quantile

Kept = Literal["slots", "delta rule", "Mamba-2", "convolution"]
"""What of a layer: its slots; or the state that it keeps, of which rows count as slots; or the last inputs of its short
convolution."""
Place = Literal["vector", "layer", "outlier", "block"]
"""What is held against a limit: the distance of a vector; the median of a part of a layer; and, relative to that median
where it is above the usual one, the distance of a vector, and the median of `BLOCK` slots of a head."""
REFERENCE = "float32"
"""Through it, pairs that were not measured are compared."""
RATE = 0.01
"""Sound caches that exceed a limit."""
BLOCK, DEPTHS = 16, 6
"""Slots of a block, and ranges of relative depth; the first layer, which depends on the token alone, is apart."""
TOGETHER = "together"
_NUMPY: Any = np  # its annotations are incomplete
FILE = Path(__file__).with_name("floors.json")
"""What `benchmarks/floors.py` measured."""
_LEAST = float(torch.finfo(torch.float32).eps)
_ONE_PRODUCT, _NEWBORN = 1e-6, 1e-5
_TAIL, _KEPT = 0.2, 40
"""The share of caches whose most unusual places are the tail, and how many are kept."""


@dataclass(frozen=True)
class Tail:
    """The most unusual places of sound caches.

    Attributes:
        caches: how many were measured.
        worst: of the most unusual ones, in falling order, the logarithm of the largest distance as a multiple of the
            usual one; with less than one slot's share of it, `width` times the logarithm of the slots.
        width: of the tail, in logarithms.
    """

    caches: int
    worst: tuple[float, ...]
    width: float

    def limit(self, slots: int, rate: float) -> float:
        """Which multiple of the usual distance a sound cache of so many slots exceeds at most at this rate."""
        if not self.worst:
            raise UserError(f"No text was measured that has a whole block; give some of at least {BLOCK} tokens.")
        if not rate:
            raise UserError("No limit is exceeded by no sound cache; give a rate above 0.")
        place = self.caches - conformal_rank(self.caches, rate)
        beyond = math.log(1 / (rate * (self.caches + 1))) if place < 0 else 0.0
        if place >= len(self.worst):
            raise UserError(f"Sound caches are known at rates below {len(self.worst) / self.caches:.2f}; got {rate:g}.")
        return math.exp(self.worst[max(place, 0)] + self.width * (beyond + math.log(slots)))

    def interval(self, slots: int, rate: float) -> tuple[float, float]:
        """The 95 % interval of that quantile of sound caches, from order statistics; infinite at its upper end where
        the caches are too few to bound it."""
        least, most = ranks_of_quantile(self.caches, rate)
        sizes = [math.exp(one + self.width * math.log(slots)) for one in self.worst]
        return (sizes[most] if most < len(sizes) else 0.0), (sizes[least - 1] if least else math.inf)


@dataclass(frozen=True)
class MeasuredPair:
    """What was measured of one pair.

    Attributes:
        usual: the median distance, where there is any, of K and V or of states, of slot 0 and of other slots, in the
            first layer and at `DEPTHS` depths; of several models the largest. Slot 0 often holds the same token, to
            which it was not fitted: it has at least what others have.
        tails: by `Place`, of each model as multiples of what is usual in it.
        models: in which it was measured.
        slots: of the shortest and of the longest text.
    """

    usual: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    tails: Mapping[str, Tail]
    models: tuple[str, ...]
    slots: tuple[int, int]

    def at(self, part: str, depth: float, first: bool = False) -> float:
        curves = self.usual.get(part) or self.usual["K" if part in ROTATED else "V"]
        return float(_profile(curves[not first], np.array(depth)))

    def scores(self, off: Float[np.ndarray, "layers parts heads slots"]) -> dict[str, float]:
        """The largest distance in a cache as a multiple of the usual one, by `Place`; none of blocks without one."""
        layers, _, _, slots = off.shape
        depth = _NUMPY.arange(layers) / max(1, layers - 1)
        first, others = (
            np.stack([_profile(curves[place], depth) for curves in self.usual.values()], 1) for place in (0, 1)
        )
        expected = np.concatenate([first[..., None], np.repeat(others[..., None], slots - 1, 2)], 2)[:, :, None]
        middle = np.median(off, (2, 3), keepdims=True)
        own = off / np.maximum(expected, middle)
        scores = {
            "vector": (off / expected).max(),
            "layer": (middle / others[:, :, None, None]).max(),
            "outlier": own.max(),
        }
        if whole := slots // BLOCK * BLOCK:
            scores["block"] = np.median(own[..., :whole].reshape(*own.shape[:3], -1, BLOCK), -1).max()
        return {place: float(score) for place, score in scores.items()}

    def exceeds(self, off: Float[np.ndarray, "layers parts heads slots"], place: Place, rate: float = RATE) -> bool:
        """Whether the most unusual place of a cache is beyond the limit."""
        return self.scores(off).get(place, 0.0) > self.tails[place].limit(counted(place, off.shape[-1]), rate)


@dataclass(frozen=True)
class NoiseFloor:
    """How far sound caches of a pair lie apart.

    Attributes:
        one, other: how the caches were computed.
        measured: of this pair; or of each of the two and `REFERENCE`. Such a floor is wide: distances add up, and each
            has half of the rate.
        own: whether all of it was measured in the model at hand.
        model: the digest of that model's config, where it is known.
    """

    one: Computed
    other: Computed
    measured: tuple[MeasuredPair, ...]
    own: bool = False
    model: str | None = None

    def usual(self, part: str, depth: float, first: bool = False) -> float:
        """The median distance of a vector.

        Args:
            part: of K, V and others; a rotated key counts as K, and what is not rotated as V.
            depth: of the layer: 0 is the first and 1 the last.
            first: whether it is of slot 0, which sees nothing but itself.
        """
        return sum(one.at(part, depth, first) for one in self.measured)

    @checked_arguments
    def times(self, slots: AtLeastOne, *, place: Place = "outlier", rate: Share = RATE) -> float:
        """The limit as a multiple of the usual distance: what no place of a sound cache of so many slots exceeds, but
        at this rate."""
        each = rate / len(self.measured)
        return max(one.tails[place].limit(counted(place, slots), each) for one in self.measured)

    @checked_arguments
    def allowed(
        self,
        part: str,
        depth: Share,
        slots: AtLeastOne,
        *,
        first: bool = False,
        place: Place = "vector",
        rate: Share = RATE,
    ) -> float:
        """The distance that no place of a sound cache exceeds, but at this rate; of "outlier" and "block" it is what is
        allowed where the median of the layer is usual. See `usual` and `times`."""
        return self.usual(part, depth, first) * self.times(slots, place=place, rate=rate)

    @property
    def of_one_engine(self) -> bool:
        """Whether an engine computed one of the two caches, or slots of it, and transformers the other."""
        return (self.one in DTYPES) != (self.other in DTYPES)

    @property
    def longest(self) -> int:
        """Slots of the longest text that was measured."""
        return min(one.slots[1] for one in self.measured)

    @property
    def models(self) -> tuple[str, ...]:
        """In which it was measured."""
        return tuple(dict.fromkeys(name for one in self.measured for name in one.models))

    @property
    def name(self) -> str:
        """How the two were computed."""
        return f"{self.one} and {self.other}"

    @property
    def step(self) -> float:
        """Between neighbouring numbers in the coarser of the two precisions, relative."""
        return max(STEPS[self.one], STEPS[self.other])

    @property
    def single(self) -> float:
        """What one product of matrices may be off by."""
        return max(_ONE_PRODUCT, self.step / 2)

    @property
    def newborn(self) -> float:
        """What a slot may be off by in the first layer in which it differs at all."""
        return max(_NEWBORN, 4 * self.step)

    def most_usual(self, part: str, depth: float) -> float:
        """The largest median of the distances of a part in a layer at this depth."""
        return max(self.single, self.allowed(part, depth, 1, place="layer"))


@checked_arguments
def floor_between(one: Computed, other: Computed, kept: Kept = "slots", *, model: str | None = None) -> NoiseFloor:
    """What is known of caches of one text that were computed in two ways; their order does not matter.

    A pair that was not measured gets a wide floor, of what each of the two was measured to differ from float32 in
    transformers.

    Args:
        kept: what of the caches.
        model: the digest of its config (`Maker.config`); one that was measured has a floor of its own.

    Raises:
        UserError: nothing was measured of one of the two.
    """
    own, end = _shipped().get(model or "", {}), "" if kept == "slots" else f", {kept}"
    known = _shipped()[TOGETHER] | own
    found = known.get(f"{one} / {other}{end}") or known.get(f"{other} / {one}{end}")
    through = [found] if found else [known.get(f"{side} / {REFERENCE}{end}") for side in (one, other)]
    measured = tuple(each for each in through if each is not None)
    if len(measured) < len(through):
        raise UserError(
            f"How far {one} and {other} lie apart{f' ({kept})' * bool(end)} was not measured; known are "
            f"{'; '.join(sorted(known))}: compare such, or measure yours with kvprobe.cache.floors.fitted."
        )
    of_it = all(each in own.values() for each in measured)
    return NoiseFloor(one, other, measured, own=of_it, model=model if of_it else None)


def floor_of_dtype(dtype: torch.dtype, kept: Kept = "slots") -> NoiseFloor:
    """What caches may differ by that a model computed twice in this dtype, in other portions, batches or kernels.

    Raises:
        UserError: nothing was measured of it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in get_args(Computed) or (kept != "slots" and f"{name} / {name}, {kept}" not in _shipped()[TOGETHER]):
        raise UserError(
            f"How far two caches in {name} lie apart{f' ({kept})' * (kept != 'slots')} was not measured; load the "
            "model in float32."
        )
    return floor_between(name, name, kept)  # pyright: ignore[reportArgumentType]


def floor_of(one: AnyCache, other: AnyCache) -> NoiseFloor:
    """What these two caches may differ by, from the precision of their numbers and from the engines that their ledgers
    name, in the model that made them. Where one alone was rounded to fp8, no rounding is benign, whatever it is stored
    as now."""
    model = config_of(one, other)
    if in_fp8(one) != in_fp8(other):
        return floor_between(REFERENCE, REFERENCE, model=model)
    return floor_between(computed_as(one), computed_as(other), model=model)


def config_of(*caches: AnyCache) -> str | None:
    """The config of the models that computed the slots of caches, as far as it is known; None where there are two."""
    makers = [one.made_by for one in caches]
    for one in caches:
        ledger = one.ledger
        makers += [ledger.others[number] for number in {*entries(ledger.makers[ledger.of_others], int)}]
    configs = {maker.config for maker in makers if maker is not None} - {None}
    return configs.pop() if len(configs) == 1 else None


def distances_of_rows(one: Iterable[Layer], other: Iterable[Layer]) -> Float[np.ndarray, "layers parts heads slots"]:
    """The distance of each vector of the first row; see `vectors_apart`. All layers have the same parts and heads."""
    pairs = zip(one, other, strict=True)
    return torch.stack(
        [torch.stack([vectors_apart(ours[name][0], theirs[name][0]) for name in theirs]) for ours, theirs in pairs]
    ).numpy()


def fitted(distances: Mapping[str, Sequence[Float[np.ndarray, "layers parts heads slots"]]]) -> MeasuredPair:
    """A floor from the distances (`distances_of_rows`) of texts of each model, K before V, or of one part, a state.

    Raises:
        UserError: there is none.
    """
    models = tuple(model for model, texts in distances.items() if texts)
    if not models:
        raise UserError("There are no distances to learn from; give those of at least one text.")
    parts = ("K", "V") if distances[models[0]][0].shape[1] == 2 else ("state",)
    sizes = [off.shape[-1] for model in models for off in distances[model]]
    own = {model: _usual(distances[model], parts) for model in models}
    bare = {model: MeasuredPair(usual, {}, (model,), (min(sizes), max(sizes))) for model, usual in own.items()}
    scores = [bare[model].scores(off) for model in models for off in distances[model]]
    tails = {
        place: _tail(
            [(score[place], counted(place, size)) for score, size in zip(scores, sizes, strict=True) if place in score]
        )
        for place in get_args(Place)
    }
    usual = {
        part: tuple(tuple(map(max, zip(*(own[model][part][n] for model in models), strict=True))) for n in (0, 1))
        for part in parts
    }
    return MeasuredPair(usual, tails, models, (min(sizes), max(sizes)))  # pyright: ignore[reportArgumentType]


def _usual(texts: Sequence[np.ndarray], parts: Sequence[str]) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    curves = {part: [_curve(texts, n, first) for first in (True, False)] for n, part in enumerate(parts)}
    if "state" in curves:  # which jumps where a layer attends between two that keep states, at no depth in particular
        most = float(np.median([np.median(off, (1, 2, 3)).max() for off in texts]))
        curves["state"] = [[float(f"{max(_LEAST, most):.3g}")] * (DEPTHS + 1)] * 2
    return {part: (tuple(map(max, first, others)), tuple(others)) for part, (first, others) in curves.items()}


def _tail(caches: Sequence[tuple[float, int]]) -> Tail:
    """Of the largest multiple of each cache, and the number of its slots; caches that are nearer than usual count as
    usual."""
    sizes: Any = _NUMPY.log(np.maximum([score for score, _ in caches], 1.0))
    tail: Any = np.sort(sizes)[-max(2, math.ceil(_TAIL * len(sizes))) :]
    tail = tail[tail > 0]
    width = round(float((tail[1:] - tail[0]).mean()), 4) if len(tail) > 1 else 0.0
    by_slot = np.sort(sizes - width * np.log([slots for _, slots in caches]))[::-1]
    return Tail(len(sizes), tuple(np.round(by_slot[:_KEPT], 3).tolist()), width)


def _curve(texts: Sequence[np.ndarray], part: int, first: bool) -> list[float]:
    """Medians of the distances that are not 0, in the first layer and in `DEPTHS` ranges of depth; of a range without a
    layer, that of the nearest one."""
    layers = texts[0].shape[0]
    ranges = _NUMPY.ceil(np.arange(layers) / max(1, layers - 1) * DEPTHS - 1e-9)
    values = [off[:, part, :, :1] if first else off[:, part, :, 1:] for off in texts]
    medians = dict.fromkeys(map(int, _NUMPY.unique(ranges)), 0.0)
    for number in medians:
        every = np.concatenate([off[ranges == number].ravel() for off in values])
        if every.any():
            medians[number] = float(np.median(every[every > 0]))
    near = [min(medians, key=lambda known, number=number: abs(known - number)) for number in range(DEPTHS + 1)]
    return [float(f"{max(_LEAST, medians[number]):.3g}") for number in near]


def _profile(curve: Sequence[float], depth: np.ndarray) -> np.ndarray:
    """The usual distance at depths: that of the first layer, and straight lines of logarithms between the middles of
    ranges."""
    middles = (np.arange(DEPTHS) + 0.5) / DEPTHS
    return np.where(depth <= 0, curve[0], np.exp(np.interp(depth, middles, np.log(curve[1:]))))


def counted(place: str, slots: int) -> int:
    """By how many slots a place is multiplied: medians of a layer are few however many slots it has."""
    return 1 if place == "layer" else slots


@cache
def _shipped() -> dict[str, dict[str, MeasuredPair]]:
    """The floors of all models together, and those of each model that has some of its own, by the digest of its
    config."""
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    tables = {TOGETHER: known[TOGETHER], **known["models"]}
    return {table: {pair: _of_record(record) for pair, record in records.items()} for table, records in tables.items()}


def _of_record(record: dict[str, Any]) -> MeasuredPair:
    usual = {part: (tuple(first), tuple(others)) for part, (first, others) in record["usual"].items()}
    tails = {place: Tail(of["caches"], tuple(of["worst"]), of["width"]) for place, of in record["tails"].items()}
    return MeasuredPair(usual, tails, tuple(record["models"]), (record["slots"][0], record["slots"][1]))
