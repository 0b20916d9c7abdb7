"""A guard: slots whose numbers lie far outside what sound caches of the model hold are evicted, not clamped."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.brief import Brief
from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import KV, described
from kvprobe.cache.rotary import Rotary, Rotation
from kvprobe.errors import UserError
from kvprobe.files import expanded, replacing
from kvprobe.fingerprint import Maker
from kvprobe.names import one_line
from kvprobe.policies.policy import Live, Policy, Scene
from kvprobe.stats import conformal_rank

FORMAT = "kvprobe-guard-1"
FEWEST = 4
"""Conversations from which a guard can be learnt."""
SMALLEST = 1e-6
"""Of the layer's largest range; a channel that never moves is given so much."""


@dataclass(frozen=True, eq=False, repr=False)
class Sound(Brief):
    """What sound caches of one model hold, channel by channel of K before rotation and of V.

    The slot at position 0, which receives attention whatever it holds, is unlike all others, and so has middles and
    ranges of its own. A slot is sound if it is like either: where it was computed is no longer known of every cache.

    Attributes:
        middles: of each layer, the median of each channel, in first slots and in all others.
        ranges: the largest distance from it.
        limit: how many ranges away the worst number of a slot may be.
        rate: share of the slots of sound caches that were to lie beyond the limit.
        rotaries: how each layer's keys are rotated.
        made_by: the model.
    """

    middles: tuple[Float[Tensor, "2 kv_heads width"], ...]
    ranges: tuple[Float[Tensor, "2 kv_heads width"], ...]
    limit: float
    rate: float
    rotaries: tuple[Rotary | None, ...]
    made_by: Maker | None = None

    @classmethod
    def of(cls, caches: Sequence[KVCache], rotaries: Sequence[Rotary | None], rate: float = 0.01) -> "Sound":
        """Learnt from sound caches, of a conversation each: ranges from one half, the limit from the other.

        Raises:
            UserError: there are too few conversations, or too few slots for so low a rate; or slots of several models,
                numbers that are not finite, or layers that store something else than K and V.
        """
        if len(caches) < FEWEST or not 0 < rate < 1:
            raise UserError(
                f"A guard is learnt from {FEWEST} conversations or more, at a rate between 0 and 1; got "
                f"{len(caches)} at {rate:g}."
            )
        for number, cache in enumerate(caches):
            refuse_other_model(caches[0], cache, f"Cache {number} of those to learn from")
            _refuse_unjudged(cache)
            cache.refuse_nonfinite()
        pairs = [_middles_and_ranges(caches[::2], layer, rotary) for layer, rotary in enumerate(rotaries)]
        middles, ranges = zip(*pairs, strict=True)
        sound = cls(middles, ranges, math.inf, rate, tuple(rotaries), caches[0].made_by)
        scores = torch.cat([sound.scores(cache)[cache.ledger.live_somewhere] for cache in caches[1::2]])
        place = conformal_rank(len(scores), rate)
        if place > len(scores):
            raise UserError(
                f"A rate of {rate:g} cannot be met from {len(scores)} slots; give conversations of at least "
                f"{2 * math.ceil(1 / rate)} in all."
            )
        return replace(sound, limit=float(scores.sort().values[place - 1]))

    def scores(self, cache: KVCache) -> Float[Tensor, "batch slots"]:
        """How many ranges the worst number of each slot is away from its middle, over layers, heads, K and V; from the
        middle of first slots or of the others, whichever it is nearer to.

        Raises:
            UserError: the cache, or a slot of it, is of another model, or a layer stores something else than K and V.
        """
        _refuse_unjudged(cache)
        widths = [tuple(middle.shape[1:]) for middle in self.middles]
        if widths != [(parts[0].heads, sum(part.numbers for part in parts)) for parts in cache.shape]:
            raise UserError("The guard was learnt from caches of another shape; learn one for this model.")
        if self.made_by and cache.made_by and not cache.made_by.same(self.made_by):
            raise UserError("The guard was learnt from caches of another model; learn one for this model.")
        origins = cache.ledger.origins
        worst = torch.zeros(2, *origins.shape, device=origins.device)
        for layer, rotary in enumerate(self.rotaries):
            middle, span = (kinds[layer].to(origins.device)[:, None, :, None] for kinds in (self.middles, self.ranges))
            away = (_numbers(cache, layer, rotary) - middle).abs() / span
            worst = torch.maximum(worst, away.amax((2, 4)))
        return worst.nan_to_num(nan=torch.inf, posinf=torch.inf).amin(0)

    def save(self, path: str | Path) -> None:
        """Write it to one safetensors file."""
        tensors = {f"middles.{layer}": tensor for layer, tensor in enumerate(self.middles)}
        tensors |= {f"ranges.{layer}": tensor for layer, tensor in enumerate(self.ranges)}
        tensors |= {
            f"frequencies.{layer}": rotary.frequencies.clone() for layer, rotary in enumerate(self.rotaries) if rotary
        }
        known = {
            "limit": self.limit,
            "rate": self.rate,
            "layouts": [rotary and rotary.layout for rotary in self.rotaries],
            "made_by": self.made_by and self.made_by.confirmed(),
        }
        with replacing(expanded(path)) as partial:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                partial,
                metadata={"format": FORMAT, "known": json.dumps(known)},
            )

    @staticmethod
    def load(path: str | Path) -> "Sound":
        """Read what `save` wrote.

        Raises:
            UserError: there is no such file, or something else is in it.
        """
        place = expanded(path)
        if not place.is_file():
            raise UserError(f"There is no file of a guard at {place}; give one that Sound.save wrote.")
        try:
            with safe_open(place, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if metadata.get("format") != FORMAT:
                raise UserError(f"{place} holds no guard; give a file that Sound.save wrote.")
            known = json.loads(metadata["known"])
            if not math.isfinite(known["limit"]):
                raise ValueError(f"its limit is {known['limit']}, which no number is beyond")
            layers = range(len(known["layouts"]))
            return Sound(
                tuple(tensors[f"middles.{layer}"].float() for layer in layers),
                tuple(tensors[f"ranges.{layer}"].float() for layer in layers),
                float(known["limit"]),
                float(known["rate"]),
                tuple(
                    None if layout is None else Rotary(tensors[f"frequencies.{layer}"], layout)
                    for layer, layout in enumerate(known["layouts"])
                ),
                Maker(str(known["made_by"])) if known["made_by"] else None,
            )
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{place} is truncated or was altered ({one_line(error)}); save it again.") from error

    def _facts(self) -> Sequence[str]:
        return (f"{len(self.middles)} layers", f"rate={self.rate:g}", f"limit={self.limit:.3g}")


@dataclass(frozen=True)
class Guard(Policy):
    """Evict slots that hold a number further from its channel's middle than the numbers of sound caches are.

    A slot goes in all layers and heads. `kvprobe.inference.guarding.learn` learns what sound caches hold. Damage whose
    numbers are those of other sound slots, such as blocks of another conversation, cannot be seen so.

    Attributes:
        sound: what sound caches of the model hold, or a file of it.
    """

    sound: Sound | str

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sound, str):
            object.__setattr__(self, "sound", Sound.load(self.sound))

    def evicted(self, cache: KVCache) -> Bool[Tensor, "batch slots"]:
        """The live slots that it evicts from this cache."""
        assert isinstance(self.sound, Sound)
        return (self.sound.scores(cache) > self.sound.limit) & cache.ledger.live_somewhere

    def keep(self, scene: Scene) -> Live:
        return (~self.evicted(scene.cache))[None, :, None, :].expand_as(scene.live)

    def act(self, scene: Scene) -> Scene:
        scene = super().act(scene)
        cache, padding = scene.cache, scene.cache.ledger.padding[:, None, :, None]
        if not bool(padding.any()):
            return scene
        # An evicted slot may pad its row, and even with no weight NaN is NaN.
        keys, values = (tuple(tensor.masked_fill(padding, 0) for tensor in part) for part in (cache.keys, cache.values))
        return scene.with_cache(cache.with_parts({"K": keys, "V": values}))


def _refuse_unjudged(cache: KVCache) -> None:
    """Refuse slots of several models, and layers of whose numbers only some would be judged."""
    cache.ledger.refuse_mixed("A guard")
    if any({*layer} != {*KV} for layer in cache.layers):
        raise UserError(
            f"A guard judges K and V, and the layers of this cache are {described(cache.shape)}; give a model whose "
            "layers all store K and V alone."
        )


def _numbers(cache: KVCache, layer: int, rotary: Rotary | None) -> Float[Tensor, "batch kv_heads slots width"]:
    """K before rotation beside V."""
    keys, at = cache.keys[layer], cache.ledger.origins
    if rotary is not None:
        keys = Rotation.between(rotary, at, torch.zeros_like(at)).of(keys)
    return torch.cat([keys.float(), cache.values[layer].float()], -1)


def _middles_and_ranges(
    caches: Sequence[KVCache], layer: int, rotary: Rotary | None
) -> tuple[Float[Tensor, "2 kv_heads width"], Float[Tensor, "2 kv_heads width"]]:
    """Of first slots and of the others; a range of the others is the least that first slots are given."""
    numbers = [_numbers(cache, layer, rotary).transpose(1, 2) for cache in caches]
    first = [cache.ledger.live_somewhere & (cache.ledger.origins == 0) for cache in caches]
    others = [cache.ledger.live_somewhere & (cache.ledger.origins != 0) for cache in caches]
    if not any(bool(chosen.any()) for chosen in first) or not any(bool(chosen.any()) for chosen in others):
        raise UserError("A guard is learnt from whole conversations, from position 0 on; give such caches.")
    kinds = [
        torch.cat([each[slots] for each, slots in zip(numbers, chosen, strict=True)]) for chosen in (first, others)
    ]
    middles = [kind.median(0).values for kind in kinds]
    ranges = [(kind - middle).abs().amax(0) for kind, middle in zip(kinds, middles, strict=True)]
    common = ranges[1].clamp_min(float(ranges[1].max()) * SMALLEST)
    return torch.stack(middles), torch.stack([torch.maximum(*ranges), common]).clamp_min(float(common.min()))
