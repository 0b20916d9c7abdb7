"""A trained eraser: a few slots in the place of what must go, after which the model goes on as if it had never been.

KVEraser (arXiv 2606.17034) trains a network that gives such slots for any text; here the slots themselves are trained,
for the cache at hand. Later slots stay as they are, and with them what they hold of the text: the eraser steers the
model away from it, which is not to remove it. `kv.certify` says what is left.
"""

from collections.abc import Mapping, Sequence
from math import cos, pi
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, Within, checked_arguments
from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache, Slots
from kvprobe.cache.parts import INDEX, recurrent
from kvprobe.editing.matching import spanned, with_fitted
from kvprobe.editing.splicing import one_row
from kvprobe.errors import UserError
from kvprobe.inference.forward import new_slots, one_row_each, prove_reading, taps
from kvprobe.inference.model import Model
from kvprobe.inference.rows import Readable
from kvprobe.models.hf_cache import past_key_values
from kvprobe.progress import Bar
from kvprobe.text.tokens import Tokens


@checked_arguments
def train_eraser(
    model: Model,
    cache: KVCache,
    target: KVCache,
    *segments: str,
    slots: Slots | None = None,
    texts: Readable,
    keep: AtLeastOne = 4,
    steps: AtLeastOne = 100,
    rate: Annotated[float, Within(0, 1000)] = 0.05,
    seed: AtLeastZero = 0,
) -> KVCache:
    """The cache with a span replaced by a few trained slots, so that the model goes on as from one that never had it.

    What is made small is the mean of `divergence` over the texts; judge by others. Trained slots start as slots of the
    target drawn at random, so that nothing of the span is in them at first. They stand at its last positions, without
    tokens. There is no inverse: keep the cache.

    Args:
        target: the cache that never had the span, such as of a restart, at positions of its own.
        segments, slots: the span, as for `KVCache.mask`.
        texts: continuations, such as questions with their answers, each to be read after both caches.
        keep: how many slots are trained.
        steps: of Adam, over all texts at once; they get smaller towards the end.
        rate: the first step's size, in standard deviations of each part of each layer of the target.
        seed: of the draw.

    Raises:
        UserError: several rows; a span that is hidden, quantised or shorter than `keep`; states or an index; or a
            target of another model; a cache that is not finite, before training or after it; or no texts.
    """
    span = spanned(cache, segments, slots, keep)
    refuse_other_model(cache, target, "The target")
    if any(recurrent(layer) or INDEX in layer for layer in cache.layers):
        raise UserError(
            f"{type(model.lanes.plain).__name__} keeps states, or chooses slots by an index, through which slots are "
            "not trained; recompute or evict instead."
        )
    wanted, runs = _wanted(model, cache, target, texts)
    start = _drawn(target, keep, seed)
    moves = [{name: torch.zeros_like(part, requires_grad=True) for name, part in layer.items()} for layer in start]
    sizes = [{name: part.float().std() for name, part in layer.items()} for layer in target.layers]

    def edited() -> KVCache:
        layers = [
            {name: part + move[name] * size[name].to(part.dtype) for name, part in layer.items()}
            for layer, move, size in zip(start, moves, sizes, strict=True)
        ]
        return with_fitted(cache, layers, span, span[len(span) - keep :])

    optimiser = torch.optim.Adam([move for layer in moves for move in layer.values()], lr=rate)
    with torch.enable_grad(), Bar(total=steps, desc="training the eraser", unit="step") as bar:
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = rate * (1 + cos(pi * step / steps)) / 2
            optimiser.zero_grad()
            loss = _kl(wanted, _log_probs(model, edited(), runs), runs).mean()
            _refuse_diverged(loss, rate)
            loss.backward(inputs=[move for layer in moves for move in layer.values()])
            optimiser.step()
            bar.set_postfix_str(f"{float(loss.detach()):.3f} nats")
            bar.update()
    with torch.no_grad():
        erased = edited()
        _refuse_diverged(_kl(wanted, _log_probs(model, erased, runs), runs), rate)
        return erased


@checked_arguments
def divergence(model: Model, cache: KVCache, target: KVCache, texts: Readable) -> Float[Tensor, "texts"]:
    """KL from the target's predictions to the cache's, in nats: the mean over what comes after each token of a text.

    Args:
        texts: each is read after both caches, at the positions of each.

    Raises:
        UserError: several rows, another model, a cache that is not finite, or no texts.
    """
    with torch.no_grad():
        wanted, runs = _wanted(model, cache, target, texts)
        return _kl(wanted, _log_probs(model, cache, runs), runs)


def _wanted(
    model: Model, cache: KVCache, target: KVCache, texts: Readable
) -> tuple[Float[Tensor, "texts tokens vocab"], list[Tokens]]:
    """What the target predicts after each token of the texts, and the texts as they follow the cache."""
    cache.refuse_nonfinite()
    target.refuse_nonfinite()
    after_target, runs = (model.tokens_after(past, texts, "texts") for past in (target, cache))
    return _log_probs(model, target, after_target), runs


def _refuse_diverged(losses: Float[Tensor, "..."], rate: float) -> None:
    if not bool(losses.isfinite().all()):
        raise UserError(f"Training ends in NaN or infinity at a rate of {rate}; give a smaller one.")


def _drawn(target: KVCache, count: int, seed: int) -> Sequence[Mapping[str, Tensor]]:
    """What each layer stores of live slots drawn at random, the first of all excepted: it is the sink."""
    live = target.ledger.live[:, 0].all(1).all(0).cpu()
    live[: min(1, int(live.sum()) - 1)] = False
    choices = live.nonzero()[:, 0]
    if not len(choices):
        raise UserError("The target has no live slot; give the cache of a text.")
    drawn = choices[torch.randint(len(choices), (count,), generator=torch.Generator().manual_seed(seed))]
    return [{name: part[:, :, drawn.to(part.device)] for name, part in layer.items()} for layer in target.layers]


def _log_probs(model: Model, cache: KVCache, runs: Sequence[Tokens]) -> Float[Tensor, "texts tokens vocab"]:
    """What is predicted after each token of the texts; anything after the end of one."""
    one_row(cache)
    lanes = model.lanes
    prove_reading(lanes, cache, runs)
    past, new = one_row_each(lanes, cache, len(runs)), new_slots(runs, lanes.device)
    assert past is not None
    logits = lanes.forward(new.tokens, past.ledger.append(new), past_key_values(taps(lanes, past)))
    return logits.float().log_softmax(-1)


def _kl(
    wanted: Float[Tensor, "texts tokens vocab"], found: Float[Tensor, "texts tokens vocab"], runs: Sequence[Tokens]
) -> Float[Tensor, "texts"]:
    lengths = torch.tensor([len(run) for run in runs], device=wanted.device)
    inside = torch.arange(wanted.shape[1], device=wanted.device) < lengths[:, None]
    return ((wanted.exp() * (wanted - found)).sum(-1) * inside).sum(1) / lengths
