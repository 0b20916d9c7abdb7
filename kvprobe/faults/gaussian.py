"""Gaussian noise, matched to the numbers that it replaces: to their layer, head, channels, effect, or some of these."""

from dataclasses import dataclass
from typing import Annotated, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import Within
from kvprobe.cache.attention import scores_of
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext, SlotMoments
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault, Need
from kvprobe.faults.scope import Part, purpose_of
from kvprobe.faults.struck import Struck

Factor = Literal["mean", "spread", "covariance"]
FACTORS: tuple[Factor, ...] = get_args(Factor)
Matched = Literal[
    "raw", "layer", "head", "channel", "effect",
    "mean", "spread", "covariance", "mean+spread", "mean+covariance", "spread+covariance",
]  # fmt: skip
MATCHED_LABELS: dict[Matched, str] = {
    "raw": "one deviation everywhere",
    "layer": "the layer's scale",
    "head": "each head's scale",
    "channel": "channel covariance",
    "effect": "equal effect",
    "mean": "channel means",
    "spread": "channel spreads",
    "covariance": "channel correlations",
    "mean+spread": "channel means and spreads",
    "mean+covariance": "channel means and correlations",
    "spread+covariance": "channel covariance, layer's mean",
}
"""What noise is matched to, in a few words."""
MATCHED_MEANINGS: dict[Matched, str] = {
    "raw": "mean 0 and the same deviation in every layer, head and channel",
    "layer": "mean and deviation of all numbers of the layer's K (or V), as in the article. A few channels with large "
    "constant keys make this scale large, and all other channels are then hit with it",
    "head": "mean and deviation of each KV head's numbers",
    "channel": "mean and covariance of each head's channels, so that a struck slot looks like another slot of that "
    "head in every channel",
    "effect": "noise at the layer's scale mixed into what stands there, in the share at which striking one slot moves "
    "the layer's attention output as far, relative to its norm, in every layer; K and V each have a share and a target "
    "of their own",
    **{
        partly: f"the {partly.replace('+', ' and ')} of each head's channels, and the layer's for the rest; covariance "
        "without spread is correlation"
        for partly in get_args(Matched)[5:]
    },
}
"""The same at length. Eight of them are a factorial of what a channel has for itself: from `layer` (nothing) to
`channel` (all three of `FACTORS`). The article is "KV Cache is More Robust Than You Think in Large Language Models"."""

_NOISE, _TRIAL = 61, 67
_WIDEST = 2.0**12
"""The largest share of noise that is tried to reach an effect."""


@dataclass(frozen=True)
class Gaussian(Fault):
    """Gaussian noise in place of K and V.

    The Gaussian noise of "KV Cache is More Robust Than You Think in Large Language Models" (canarypwn), whose README
    says that it matches the layer's statistics. Noise at a layer's own scale hits layers with outlier channels harder,
    so the way of matching decides what a comparison of layers means. With `Scope(parts="k")` it is near the noise that
    the attack of arXiv 2510.17098 adds to keys.

    Attributes:
        matched: `raw` has mean 0 and deviation `scale`. `layer` has the mean and deviation of all numbers of the
            layer's K (or V), `head` those of each KV head, `channel` the mean and covariance of each head's channels.
            `effect` mixes `layer` noise into the numbers, with a share for K and one for V at which striking one slot
            moves the attention output equally far in every layer (see `shares`). The others are between `layer` and
            `channel`: what they name is each channel's own.
        scale: times the deviation; with `effect`, times the share.
    """

    matched: Matched = "layer"
    scale: Annotated[float, Within(0)] = 1.0

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("queries",) if self.matched == "effect" else ()

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        noise = struck.noise(part, _NOISE)
        if self.matched == "raw":
            return noise * self.scale
        if self.matched == "effect":
            share = self.scale * shares(struck.context, part)[struck.layer]
            replacement = _like_layer(struck.context, struck.layer, part, noise)
            return torch.lerp(struck.of(part).float(), replacement, share)
        moments = struck.context.moments(struck.layer, part)
        if self.matched == "head":
            mean, deviation = _pooled(moments.mean, moments.deviation, dim=1)
            return mean[struck.heads] + noise * deviation[struck.heads] * self.scale
        own, (mean, deviation) = factors_of(self.matched), _of_layer(moments)
        if "covariance" in own:
            noise = struck.chosen(struck.drawn(part, _NOISE) @ moments.root.transpose(1, 2))
            if "spread" not in own:
                noise = noise / moments.deviation[struck.heads].clamp(min=1e-12) * deviation
        else:
            noise = noise * (moments.deviation[struck.heads] if "spread" in own else deviation)
        return (moments.mean[struck.heads] if "mean" in own else mean) + noise * self.scale


def factors_of(matched: Matched) -> tuple[Factor, ...]:
    """What each channel has for itself under this noise; the rest is the layer's."""
    return FACTORS if matched == "channel" else tuple(factor for factor in FACTORS if factor in matched.split("+"))


def shares(context: FaultContext, part: Part) -> tuple[float, ...]:
    """The share of layer-matched noise, for each layer's K (or V), at which striking one slot moves the attention
    output, relative to its norm, equally far in every layer.

    The target is the geometric mean over layers of the effect of a share of 1, so that the noise is on average as
    strong as before. Effects are means over slots, without the first (a sink, whose loss is another question), and over
    the context's last queries. Here these queries attend to all slots: masks and windows are ignored.

    Raises:
        UserError: the fault context has no queries, or fewer than two slots.
    """
    known = context.computed.get(("shares", part))
    if isinstance(known, tuple):
        return cast(tuple[float, ...], known)
    if context.vectors(0, part).shape[1] < 2:
        raise UserError(
            "Noise matched by its effect needs two slots or more, because the first is left out; give a longer prompt."
        )
    layers = range(context.cache.n_layers)
    whole = torch.stack([effect(context, layer, part, 1.0) for layer in layers])
    target = float(whole.clamp(min=1e-12).log().mean().exp())
    matched = tuple(_share_for(context, layer, part, target) for layer in layers)
    context.computed["shares", part] = matched
    return matched


def effect(context: FaultContext, layer: int, part: Part, share: float) -> Float[Tensor, ""]:
    """How far striking one slot with this share of noise moves the layer's attention output, relative to its norm."""
    if context.queries is None:
        raise UserError("Noise matched by its effect needs the fault context's queries; let Model.sweep read them.")
    keys, values = context.vectors(layer, "k").float(), context.vectors(layer, "v").float()
    queries, scale = context.queries.rows[layer].float(), context.queries.scale[layer]
    scores = scores_of(queries @ keys.transpose(1, 2), scale)
    weights = scores.softmax(-1)
    output = weights @ values
    vectors = keys if part == "k" else values
    drawn = Draws().normal((*vectors.shape,), _TRIAL, layer, purpose_of(part)).to(vectors.device)
    mixed = torch.lerp(vectors, _like_layer(context, layer, part, drawn), share)
    if part == "v":
        # Only one slot's value changes: the output moves by that change, times the slot's weight.
        moved = weights.square() * (mixed - values).square().sum(-1)[:, None]
    else:
        changed = scores_of(queries @ mixed.transpose(1, 2), scale)
        # One slot's weight goes from a to b and the others shrink in proportion: the output moves by
        # (b − a)/(1 − a) · (value − output).
        rest = torch.log1p(-weights.clamp(max=1 - 1e-6)) + scores.logsumexp(-1, keepdim=True)
        after = torch.sigmoid(changed - rest)
        factor = (after - weights) / (1 - weights).clamp(min=1e-6)
        distance = (values.square().sum(-1)[:, None] - 2 * output @ values.transpose(1, 2)) + output.square().sum(-1)[
            ..., None
        ]
        moved = factor.square() * distance.clamp(min=0)
    # A query head's group shares its KV head; all heads of a token are struck together.
    group = context.queries.group
    norm = _by_token(output.square().sum(-1), group)
    relative = (_by_token(moved, group) / norm[..., None].clamp(min=1e-24)).sqrt()
    return relative[:, 1:].mean()


def _share_for(context: FaultContext, layer: int, part: Part, target: float) -> float:
    """The share at which this layer's effect equals the target, or comes nearest to it."""
    low, high = 1 / _WIDEST, _WIDEST
    for _ in range(24):
        middle = (low * high) ** 0.5
        if float(effect(context, layer, part, middle)) < target:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5


def _by_token(values: Float[Tensor, "kv_heads queries *rest"], group: int) -> Float[Tensor, "tokens *rest"]:
    """Summed over all heads of each token; the query heads of a group are adjacent."""
    return torch.unflatten(values, 1, (-1, group)).sum((0, 2))


def _like_layer(
    context: FaultContext, layer: int, part: Part, noise: Float[Tensor, "*axes d"], scale: float = 1.0
) -> Float[Tensor, "*axes d"]:
    """Noise with the mean and deviation of all numbers of a layer's K or V."""
    mean, deviation = _of_layer(context.moments(layer, part))
    return mean + noise * deviation * scale


def _of_layer(moments: SlotMoments) -> tuple[Float[Tensor, "1"], Float[Tensor, "1"]]:
    """Mean and deviation of all numbers of a layer's K or V."""
    return _pooled(moments.mean.flatten(), moments.deviation.flatten(), dim=0)


def _pooled(
    mean: Float[Tensor, "*axes"], deviation: Float[Tensor, "*axes"], dim: int
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Mean and deviation of numbers from those of equally large parts of them."""
    pooled = mean.mean(dim, keepdim=True)
    spread = (deviation.square() + (mean - pooled).square()).mean(dim, keepdim=True).sqrt()
    return pooled, spread
