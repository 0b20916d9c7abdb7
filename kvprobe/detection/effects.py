"""What a difference between two caches does to the model's output."""

from dataclasses import dataclass, replace
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.stored import AnyCache, StoredCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import first_divergence
from kvprobe.text.tokens import Tokens

NEW = 16
"""Tokens that are written greedily."""


@dataclass(frozen=True)
class OutputEffect:
    """What the model says after one cache, held against what it says after the reference.

    Attributes:
        kl: of the next token's distribution, in nats; None where a number is not finite.
        top: whether the likeliest next token is the same.
        divergence: index of the first token, of those written greedily, that differs; None if none does.
        tokens: how many were written.
    """

    kl: float | None
    top: bool
    divergence: int | None
    tokens: int

    def __str__(self) -> str:
        if self.kl is None:
            return "Output: the model's logits are not finite."
        top = "the same" if self.top else "another"
        written = (
            f"all {self.tokens} tokens written greedily are the same"
            if self.divergence is None
            else f"of {self.tokens} tokens written greedily, number {self.divergence} is the first that differs"
        )
        return f"Output: the next token's distribution moves by {self.kl:.2g} nats (KL), its mode is {top}; {written}."


def reference_of(model: Model, cache: AnyCache) -> KVCache:
    """What the model computes of a cache's tokens, at the positions at which its keys were computed.

    Raises:
        UserError: the model cannot read these tokens.
    """
    ledger = cache.ledger
    ledger.refuse_fitted("A comparison with what the model reads")
    read = model.prefill([_row(cache, row) for row in range(ledger.batch)])
    # Each token in its slot of the cache, also where padding stands between.
    slots = ((~ledger.padding).cumsum(1) - 1).clamp(min=0).to(model.lanes.device)
    return read.take(slots, ledger.padding.to(slots.device))


def effect_of(model: Model, cache: AnyCache, reference: AnyCache, row: int) -> OutputEffect | None:
    """Read the last token of a row again, after what stands before it in each of the caches; after all of each, go on
    greedily."""
    ledger = reference.ledger
    held_slots = entries((~ledger.padding[row]).nonzero()[:, 0], int)
    if len(held_slots) < 2 or bool(ledger.fitted[row, end := held_slots[-1]]):
        return None
    last = Tokens.of([int(ledger.tokens[row, end])], start=int(ledger.positions[row, end]))
    logits: list[Tensor] = []
    written: list[list[int]] = []
    for one in (reference, cache):
        held = (one.cache() if isinstance(one, StoredCache) else one).rows([row])
        held = replace(held, made_by=model.lanes.maker).to(model.lanes.device)
        layers = tuple({part: tensor.to(model.lanes.dtype) for part, tensor in layer.items()} for layer in held.layers)
        whole = replace(held, layers=layers)
        if not all(bool(tensor.isfinite().all()) for tensor in whole.tensors):
            return OutputEffect(None, False, 0, 0)
        try:
            logits.append(_next(model, whole.rewind(slots=-1), last))
            written.append(_written(model, whole, int(logits[-1].argmax())))
        except UserError:
            if one is reference:
                raise
            return OutputEffect(None, False, 0, 0)  # all else is as in the reference, which could be read
    right, found = (some.double().log_softmax(-1) for some in logits)
    kl = float((right.exp() * (right - found)).sum())
    kl = max(0.0, kl) if isfinite(kl) else None
    return OutputEffect(kl, int(found.argmax()) == int(right.argmax()), first_divergence(*written), NEW)


def _row(cache: AnyCache, row: int) -> Tokens:
    ledger = cache.ledger
    held = ~ledger.padding[row]
    run = Tokens.of(entries(ledger.tokens[row, held], int))
    return replace(run, positions=entries(ledger.origins[row, held], int))


def _next(model: Model, cache: KVCache, token: Tokens) -> Float[Tensor, "vocab"]:
    with torch.no_grad():
        return model.extend(cache, [token])[1][0, -1].float()


def _written(model: Model, cache: KVCache, first: int) -> list[int]:
    """The first token that follows, and those after it, each the likeliest; they see the last slot as it is stored."""
    said = [first]
    while len(said) < NEW:
        token = Tokens.of([said[-1]], start=int(cache.ledger.following[0]))
        with torch.no_grad():
            cache, logits = model.extend(cache, [token])
        said.append(int(logits[0, -1].argmax()))
    return said
