"""A tiny toy of Memento with random weights, and its traces read by the library's own caches, step by step."""

from collections.abc import Sequence

import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model, load
from kvprobe.models.unproved import Lane
from kvprobe.policies import RestartInPlace
from kvprobe.tasks.mementos import PLACES, Trace, block_name, hidden_blocks, memento_name
from kvprobe.training.loop import TrainingRecipe
from kvprobe.training.memento import Memento

TINY = Memento(blocks=4, layers=3, width=16, heads=2, inner=24, tested=4)


def toy(recipe: TrainingRecipe = TINY) -> Model:
    """Random weights, which are large so that whatever is seen is felt."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = recipe.model()
    for parameter in plain.parameters():
        if parameter.ndim == 2:
            parameter.data *= 2
    return load(plain, tokenizer=recipe.tokenizer())


def follow(
    recipe: Memento, model: Model, traces: Sequence[Trace], lane: Lane = "plain", at_once: int = 1
) -> tuple[KVCache, torch.Tensor]:
    """Blocks are read, summed up and hidden by the library's own cache, so many tokens at once.

    Returns the last cache, and the logits of each memento digit.
    """
    rows = model.tokens([trace.conversation() for trace in traces])
    cache = model.prefill([row[: row.span(memento_name(0)).stop] for row in rows], lane=lane)
    scores = []
    for number in range(1, recipe.blocks + 1):
        start, end = rows[0].span(block_name(number)).start, rows[0].span(memento_name(number)).stop
        read = []
        for first in range(start, end, at_once):
            piece = slice(first, min(first + at_once, end))
            cache, logits = model.extend(cache, [row[piece] for row in rows], lane=lane, logits=piece.stop - first)
            read.append(logits)
        scores.append(torch.cat(read, 1)[:, -PLACES - 1 : -1])  # after the last digit comes the next block
        if number == recipe.blocks:
            break
        if recipe.provenance == "recomputed":
            cache = model.apply(RestartInPlace(block_name(number)), cache)
        elif hidden := hidden_blocks(number + 1, recipe.keep):
            # What is hidden from attention alone, a state has read.
            cache = cache.mask(*map(block_name, hidden), layers=model.geometry.attending if recipe.memory else None)
    return cache, torch.cat(scores, 1)
