"""What clean caches of a model hold: statistics learnt once from texts of many kinds, and kept in a file.

Three sets of texts are read. From the first come means, covariances and predictions; from the second the tails of each
check. On the third the limits are set so that a clean cache fails them at about the stated rate: of each cache the most
unusual place of all checks counts, so that the rate is that of whole caches. Each check is measured by its own most
unusual caches, leaving out the one that is judged (a jackknife; measured by simulation, not proved). These caches are
computed with rounded products and stored in 8 bits, as another engine would, so that what differs between engines
raises no alarm; one in four of the second and third as the model itself would. Parts of a cache that are in fp8 are
held against clean ones in the same fp8.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, check_fields
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import KV
from kvprobe.cache.precision import Fp8Format
from kvprobe.detection.clean_texts import as_by_another_engine, chats_of, clean_texts
from kvprobe.detection.rows import RowsReader, RowsScore, scores_of_rows
from kvprobe.detection.scores import (
    LayerRead,
    Learnt,
    Score,
)
from kvprobe.errors import UserError
from kvprobe.faults import Fp8Scale, Scope
from kvprobe.faults.scope import Part
from kvprobe.files import replacing, told
from kvprobe.fingerprint import digest
from kvprobe.inference.model import Model
from kvprobe.models.catalogue import cache_folder
from kvprobe.names import one_line
from kvprobe.progress import Bar
from kvprobe.stats import conformal_rank
from kvprobe.text.tokens import Tokens

FORMAT = "kvprobe-clean-8"
"""Of the file, of the texts and of what is learnt: where one of these changes, this changes, too."""
BODY = 0.9
"""The share of clean places below which a score is not unusual; beyond it the tail is taken to be exponential."""
NARROWEST = 0.05
"""A tail is taken to be at least so wide, so that what never varied in clean caches does not alarm by a rounding."""
POOLED = 300
"""So many places of the whole check are added to those by which the width of a head's tail is measured. Few texts give
a head few places, and those of one text are alike: where they happened to lie close together, a tail was far too narrow
and the limits of all others, measured in such widths, far too wide."""
RIDGE = 1e-4
EXACT = ("finite", "zeros", "copies")
"""Checks of what no clean cache was seen to hold; their limits are just beyond what clean caches had."""
FEATURES = "features"
"""Beside the parts of a layer, what it is predicted by."""
TOGETHER = 4
"""Texts that are read in one batch, and of one length."""
_LARGEST, _LEAST_LIMIT = 4, 5.0
"""How many of the most unusual clean caches a check is measured by, and the least limit in nats."""


@dataclass(frozen=True)
class CleanRecipe:
    """From how much text clean caches are learnt.

    Attributes:
        fitted: texts for means, covariances and predictions, all of the greatest length.
        tailed: texts for the tails of scores.
        calibrated: texts for the limits.
        longest: tokens of the longest text.
        rate: share of clean caches that may be called suspicious.
        fp8: the parts that are stored in fp8, and in which.
    """

    fitted: AtLeastOne = 20
    tailed: AtLeastOne = 20
    calibrated: AtLeastOne = 100
    longest: AtLeastOne = 192
    rate: float = 0.01
    seed: AtLeastZero = 0
    fp8: Mapping[str, Fp8Format] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rate < 1 or conformal_rank(self.calibrated, self.rate) > self.calibrated:
            raise UserError(
                f"A rate of {self.rate:g} cannot be met from {self.calibrated} texts; calibrate on at least "
                f"{math.ceil(1 / max(self.rate, 1e-9)) - 1}, at a rate between 0 and 1."
            )


@dataclass(frozen=True, repr=False)
class Clean(Brief):
    """What clean caches of one model hold.

    Attributes:
        parts: for each layer what is known of each part.
        tails: for each check and part of a layer, where the tail of its scores begins and how wide it is.
        limits: for each check, how surprising a place may be, in nats beyond what one place among as many would be.
        model: the fingerprint of the model, with weights rounded to bfloat16.
    """

    parts: tuple[Mapping[str, Learnt], ...]
    tails: Mapping[str, Float[Tensor, "heads 2"]]
    limits: Mapping[str, float]
    model: str
    recipe: CleanRecipe = field(default_factory=CleanRecipe)

    def _facts(self) -> Iterator[str]:
        yield f"{len(self.parts)} layers"
        yield f"{len(self.limits)} checks at rate={self.recipe.rate:g}"

    def surprise(self, score: Score) -> Float[Tensor, "heads places"]:
        """How improbable each place would be in a clean cache, in nats, less the logarithm of the number of places."""
        return _surprise(score.values, *self._tail(score), torch.tensor(score.values.shape[1]))

    def largest_surprises(self, scores: Sequence[Score]) -> list[float]:
        """Of all places of some scores, for each of the rows that they are of."""
        values = torch.cat([score.values.amax(-1) for score in scores], 1).T
        tails = torch.cat([self.tails[score.key] for score in scores]).to(values.device)
        heads = torch.tensor([score.values.shape[1] for score in scores])
        places = torch.tensor([score.values.shape[2] for score in scores]).repeat_interleave(heads).to(values.device)
        return _surprise(values, tails[:, :1], tails[:, 1:], places[:, None]).amax(0).tolist()

    def excess(self, score: Score) -> Float[Tensor, "heads places"]:
        """The surprise of each place as a multiple of its limit: above 1 it is suspicious."""
        return self.surprise(score) / self.limits[score.check]

    def allowed(self, score: Score) -> Float[Tensor, "heads places"]:
        """The value of each place at which it would be suspicious."""
        begins, wide = self._tail(score)
        return begins + wide * (self.limits[score.check] + math.log(1 - BODY) + math.log(score.values.shape[1]))

    def _tail(self, score: Score) -> tuple[Tensor, Tensor]:
        tails = self.tails[score.key].to(score.values.device)
        begins, wide = tails[:, None].unbind(-1)
        return begins, wide


def clean_of(model: Model, recipe: CleanRecipe | None = None) -> Clean:
    """What is known of this model's clean caches, learnt if it is not yet in the user's cache folder."""
    recipe = recipe or CleanRecipe()
    written = digest(
        [json.dumps([FORMAT, asdict(recipe)], sort_keys=True).encode(), model.lanes.rounded_fingerprint.encode()], 16
    )
    path = cache_folder() / "clean" / f"{written}.safetensors"
    if path.is_file():
        return load_clean(path)
    clean = learn_clean(model, recipe)
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    save_clean(clean, path)
    return clean


def learn_clean(model: Model, recipe: CleanRecipe) -> Clean:
    """Read the texts and learn from them."""
    generator = np.random.default_rng(recipe.seed)
    longest, chats = recipe.longest, chats_of(model)
    fitted = clean_texts(model, recipe.fitted, longest, generator, shortest=longest, chats=chats)
    tailed = clean_texts(model, recipe.tailed, longest, generator, together=TOGETHER, chats=chats)
    calibrated = clean_texts(model, recipe.calibrated, longest, generator, together=TOGETHER, chats=chats)
    sums: dict[tuple[int, str], dict[str, Tensor]] = {}
    for group in Bar(_groups(fitted), desc="Learning what clean caches hold", unit="group"):
        cache = _in_fp8(as_by_another_engine(model, group), recipe)
        reader = RowsReader(model, cache.ledger, range(len(group)))
        for number, layer in enumerate(cache.layers):
            _add(sums, reader.read(number, layer))
    parts = tuple(
        {name: _learnt(sums[number, FEATURES] | sums[number, name]) for name in model.geometry.parts[number]}
        for number in range(model.geometry.n_layers)
    )
    scored = [*_scored(model, tailed, parts, recipe, "Learning what is unusual in them")]
    by_key: dict[str, list[Score]] = {}
    for _, score in chain(*scored):
        by_key.setdefault(score.key, []).append(score)
    clean = Clean(parts, _tails(by_key), {}, model.lanes.rounded_fingerprint, recipe)
    calibrating = _worst(clean, _scored(model, calibrated, parts, recipe, "Setting limits"))
    return replace(clean, limits=limits_of(_worst(clean, scored), calibrating, recipe.rate))


def limits_of(
    others: Sequence[Mapping[str, float]], calibrating: Sequence[Mapping[str, float]], rate: float
) -> dict[str, float]:
    """Limits of each check which a clean cache fails at about this rate.

    Args:
        others, calibrating: the largest surprise of each check in clean caches; those calibrated on are like the caches
            that will be audited.
    """
    usual = _usual([*others, *calibrating])
    times: list[float] = []
    for number, of_text in enumerate(calibrating):
        # Beside all others, as the cache is that will be audited.
        unit = _usual([*others, *calibrating[:number], *calibrating[number + 1 :]])
        times.append(max((value / unit[check] for check, value in of_text.items() if check in unit), default=0.0))
    allowed = max(1.0, sorted(times)[conformal_rank(len(times), rate) - 1])
    # What never happens in a clean cache is no matter of degree.
    never = {check: max(of_text.get(check, 0.0) for of_text in (*others, *calibrating)) for check in EXACT}
    return {check: allowed * value for check, value in usual.items()} | {
        check: max(_LEAST_LIMIT, 1 + value) for check, value in never.items()
    }


def _scored(
    model: Model, texts: Sequence[Tokens], parts: tuple[Mapping[str, Learnt], ...], recipe: CleanRecipe, doing: str
) -> Iterator[list[RowsScore]]:
    """The scores of texts, which are read together where they are of one length: of three in four groups as by another
    engine, which is the more unusual, and of others by the model itself."""
    for number, group in enumerate(Bar(_groups(texts), desc=doing, unit="group")):
        cache = as_by_another_engine(model, group) if number % 4 else model.prefill([*group])
        yield scores_of_rows(model, _in_fp8(cache, recipe), parts)


def _in_fp8(cache: KVCache, recipe: CleanRecipe) -> KVCache:
    """The cache, of which those parts are in fp8 that are learnt so."""
    for name, kind in recipe.fp8.items():
        part: Part = name.lower() if name in KV else name  # pyright: ignore[reportAssignmentType]
        cache = cache.corrupt(Fp8Scale(1.0, kind, scope=Scope(parts=part)))
    return cache


def _surprise(
    values: Float[Tensor, "heads *places"], begins: Tensor, wide: Tensor, places: Int[Tensor, "*heads"]
) -> Float[Tensor, "heads *places"]:
    """See `Clean.surprise`."""
    surprise = (values - begins) / wide - math.log(1 - BODY) - places.log()
    # What is not a number is as unusual as can be.
    return surprise.where(~(values <= begins), torch.zeros_like(surprise)).nan_to_num(math.inf, math.inf)


def _groups(texts: Sequence[Tokens]) -> list[Sequence[Tokens]]:
    return [texts[first : first + TOGETHER] for first in range(0, len(texts), TOGETHER)]


def _worst(clean: Clean, scored: Iterable[list[RowsScore]]) -> list[dict[str, float]]:
    """The largest surprise of each check in each row of each cache."""
    worst: dict[tuple[int, int], dict[str, float]] = {}
    for number, scores in enumerate(scored):
        by_check: dict[tuple[str, tuple[int, ...]], list[Score]] = {}
        for rows, score in scores:
            by_check.setdefault((score.check, tuple(rows)), []).append(score)
        for (check, rows), same in by_check.items():
            for row, surprise in zip(rows, clean.largest_surprises(same), strict=True):
                worst.setdefault((number, row), {})[check] = max(0.0, surprise)
    return [*worst.values()]


def _usual(worst: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of the largest surprises of each check over caches.

    Checks differ in how far their tails are from exponential, so each is measured by its own most unusual caches.
    """
    usual: dict[str, float] = {}
    for check in sorted({*chain(*worst)}.difference(EXACT)):
        most = sorted(of_text.get(check, 0.0) for of_text in worst)[-_LARGEST:]
        usual[check] = max(_LEAST_LIMIT, sum(most) / len(most))
    return usual


def _add(sums: dict[tuple[int, str], dict[str, Tensor]], read: LayerRead) -> None:
    """Add a layer of texts to the sums of products."""
    x = read.features.double().flatten(0, 1)
    new = {FEATURES: {"count": torch.tensor(float(len(x))), "x": x.sum(0), "xx": x.T @ x}}
    for name, part in read.unrotated.items():
        y = part.double().transpose(0, 1).flatten(1, 2)
        norms = y.norm(dim=-1)
        new[name] = {
            "y": y.sum(1),
            "yy": y.transpose(1, 2) @ y,
            "xy": x.T @ y.transpose(0, 1).flatten(1),
            "norm": torch.stack([norms.sum(1), norms.square().sum(1)], 1),
        }
    for name, tensors in new.items():
        held = sums.setdefault((read.number, name), {})
        for kind, tensor in tensors.items():
            held[kind] = held[kind] + tensor if kind in held else tensor


def _learnt(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mean, covariance, prediction and what it leaves, of one part of a layer."""
    count = sums["count"]
    mean, centre = sums["y"] / count, sums["x"] / count
    heads, d = mean.shape
    covariance = sums["yy"] / count - mean[:, :, None] * mean[:, None]
    xx = sums["xx"] / count - centre[:, None] * centre
    xy = sums["xy"] / count - centre[:, None] * mean.flatten()
    features = len(centre)
    ridge = RIDGE * xx.diagonal().mean() if features else xx.sum()
    weights = torch.linalg.solve(xx + ridge * torch.eye(features, dtype=xx.dtype), xy) if features else xy
    by_head = weights.unflatten(1, (heads, d)).movedim(1, 0)
    both = by_head.transpose(1, 2) @ xy.unflatten(1, (heads, d)).movedim(1, 0)
    rest = covariance - both - both.transpose(1, 2) + by_head.transpose(1, 2) @ xx @ by_head
    norms = sums["norm"] / count
    spread = (norms[:, 1] - norms[:, 0].square()).clamp_min(0).sqrt()
    tiny = 1e-6 * norms[:, 0].clamp_min(1e-6)
    learnt = {
        "mean": mean,
        "whiten": _whitening(covariance, d / count),
        "centre": centre,
        "weights": weights,
        "rest": _whitening(rest, d / count),
        "deviation": rest.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() + tiny[:, None],
        "norm": torch.stack([norms[:, 0], spread + tiny], 1),
    }
    return {name: tensor.float().contiguous() for name, tensor in learnt.items()}


def _whitening(covariance: Float[Tensor, "heads d d"], shrinkage: Tensor) -> Float[Tensor, "heads d d"]:
    """What makes vectors of this covariance, shrunk towards equal variances, have unit variance: x @ whitening."""
    shrinkage = shrinkage.clamp(1e-4, 0.5)
    d = covariance.shape[-1]
    size = covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    shrunk = (1 - shrinkage) * covariance + (shrinkage * size)[:, None, None] * torch.eye(d, dtype=covariance.dtype)
    values, vectors = torch.linalg.eigh(shrunk)
    return vectors * values.clamp_min(1e-6 * values[:, -1:]).rsqrt()[:, None]


def _tails(scores: Mapping[str, Sequence[Score]]) -> dict[str, Float[Tensor, "heads 2"]]:
    """Where the tail of each begins and how wide it is: the mean of a head's own places beyond that, and of `POOLED`
    more that are like those of the whole check."""
    measured: dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]] = {}
    for key, same in scores.items():
        values = torch.cat([score.values.transpose(0, 1).flatten(1) for score in same], 1)
        begins = values.quantile(BODY, 1)
        over = values - begins[:, None]
        measured.setdefault(same[0].check, {})[key] = begins, over.clamp_min(0).sum(1), (over > 0).sum(1)
    tails: dict[str, Tensor] = {}
    for by_key in measured.values():
        sums, counts = (torch.cat([one[place] for one in by_key.values()]).sum() for place in (1, 2))
        width = sums / counts.clamp_min(1)
        for key, (begins, beyond, count) in by_key.items():
            wide = (beyond + POOLED * width) / (count + POOLED)
            tails[key] = torch.stack([begins, wide.clamp_min(NARROWEST)], 1)
    return tails


def save_clean(clean: Clean, path: Path) -> None:
    """Write it to one safetensors file."""
    tensors = {
        f"{number}.{name}.{kind}": tensor
        for number, layer in enumerate(clean.parts)
        for name, learnt in layer.items()
        for kind, tensor in learnt.items()
    }
    tensors |= {f"tail.{key}": tensor.contiguous() for key, tensor in clean.tails.items()}
    known = {"format": FORMAT, "layers": str(len(clean.parts)), "limits": json.dumps(clean.limits)}
    known |= {"model": clean.model, "recipe": json.dumps(asdict(clean.recipe))}
    with replacing(path) as partial:
        save_file(tensors, partial, metadata=known)


def load_clean(path: Path) -> Clean:
    """Read what `save_clean` wrote.

    Raises:
        UserError: something else is in the file.
    """
    try:
        with told(path), safe_open(path, framework="pt") as file:
            known = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if known["format"] != FORMAT:
            raise KeyError("format")
        parts: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(int(known["layers"]))]
        tails: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith("tail."):
                tails[name.removeprefix("tail.")] = tensor
            else:
                number, part, kind = name.split(".")
                parts[int(number)].setdefault(part, {})[kind] = tensor
        return Clean(
            tuple(parts),
            tails,
            {str(check): float(limit) for check, limit in json.loads(known["limits"]).items()},
            known["model"],
            CleanRecipe(**json.loads(known["recipe"])),
        )
    except (SafetensorError, KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is truncated or was altered ({one_line(error)}); delete it, and it is learnt anew."
        ) from error
