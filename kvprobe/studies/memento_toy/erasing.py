"""The digits of a block taken out of its memento, linearly and as soon as it is written.

Erased is what covaries with the digits, or with what they say beyond their sum, which the text states anyway: the
answers are then the digits less what is to be expected of them, given the sum. Erasers are fitted memento by memento,
on caches of which all earlier mementos were erased (LEACE, Belrose et al. 2023, arXiv 2306.03819).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing.caches import LayerPart, erase
from kvprobe.erasing.leace import leace_beyond_chance
from kvprobe.erasing.random_eraser import random_eraser
from kvprobe.erasing.subspace import Eraser
from kvprobe.inference.model import Model
from kvprobe.probing.gram import one_hot_answers
from kvprobe.studies.memento_toy.traces import Edit, retained, token_rows, vectors_of
from kvprobe.tasks.mementos import BASE, Trace, expected_digits, memento_name

SHUFFLES = 19
"""Of answers, above whose largest covariance a direction is erased."""
Erasers = Mapping[int, Sequence[Mapping[LayerPart, Eraser]]]
"""By memento, for each of its slots, those of each layer and part."""


def fit_mementos(
    model: Model,
    traces: Sequence[Trace],
    keep: int,
    rng: np.random.Generator,
    *,
    beyond_text: bool = True,
    random: bool = False,
) -> Erasers:
    """The erasers of all mementos but the last, each of the digits of its block and of those that are kept.

    Args:
        keep: blocks before the present one that stay in view.
        rng: of shuffled answers and random directions.
        beyond_text: erase only what the digits say beyond the text.
        random: the control: as many random directions as would be erased.
    """
    erasers: dict[int, list[dict[LayerPart, Eraser]]] = {}

    def fit(number: int, cache: KVCache) -> KVCache:
        seen = range(max(1, number - keep), number + 1)
        answers = torch.cat([digit_answers(traces, block, beyond_text=beyond_text) for block in seen], 1)
        erasers[number] = _fit_memento(number, cache, answers, rng, random=random)
        return erasing(erasers)(number, cache)

    for _ in retained(model, token_rows(model, traces), keep, len(traces[0].blocks) - 1, fit):
        pass
    return erasers


def erasing(erasers: Erasers) -> Edit:
    """For `kvprobe.studies.memento_toy.traces.retained`: erases in each memento as soon as it is written."""

    def edit(number: int, cache: KVCache) -> KVCache:
        where = cache.ledger.in_segments([memento_name(number)])[0].nonzero()[:, 0].tolist()
        for slot, of_slot in zip(where, erasers.get(number, []), strict=False):
            cache = erase(cache, of_slot, slots=[slot])
        return cache

    return edit


def mean_ranks(erasers: Erasers) -> dict[int, float]:
    """Of how many dimensions an eraser is, on average over mementos, slots, K and V, by layer."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for of_slot in (of_slot for of_memento in erasers.values() for of_slot in of_memento):
        for (layer, _), eraser in of_slot.items():
            ranks[layer].append(int(eraser.rank))
    return {layer: sum(of_layer) / len(of_layer) for layer, of_layer in ranks.items()}


def digit_answers(traces: Sequence[Trace], block: int, *, beyond_text: bool) -> Float[Tensor, "rows places_and_values"]:
    """One column for each value of each digit of a block: 1 where the digit has it, perhaps less its probability given
    what the text states."""
    digits = torch.tensor([trace.blocks[block - 1] for trace in traces]).T
    answers = one_hot_answers(digits, BASE, torch.float64)
    return answers - torch.from_numpy(expected_digits(traces, block)) if beyond_text else answers


def _fit_memento(
    number: int, cache: KVCache, answers: Float[Tensor, "rows outputs"], rng: np.random.Generator, *, random: bool
) -> list[dict[LayerPart, Eraser]]:
    vectors = vectors_of(number, cache)
    sites = [(layer, part) for layer in range(len(vectors)) for part in ("K", "V")]
    orders = [torch.from_numpy(rng.permutation(len(answers))) for _ in range(SHUFFLES)]
    fitted: list[dict[LayerPart, Eraser]] = []
    for slot in range(vectors.shape[3]):
        erasers = leace_beyond_chance(vectors[:, :, :, slot].flatten(0, 1).cpu(), answers, orders)
        erasers = random_eraser(erasers, rng) if random else erasers
        fitted.append({site: erasers.at(place) for place, site in enumerate(sites)})
    return fitted
