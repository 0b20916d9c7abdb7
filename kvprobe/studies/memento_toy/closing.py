"""Can the channel be closed without harm? What a memento holds of its block's digits is taken out of its K and V.

Exactly: the memento is written anew in view of another block that the text fits as well (a stand-in), so that it holds
nothing of its own block but what is in the text. Or linearly, as soon as it is written: all that covaries with the
digits is erased, or only what does so beyond their sum, which the text states anyway; the labels are then the digits
less what is to be expected of them, given the sum (LEACE, Belrose et al. 2023, arXiv 2306.03819). Erasers are fitted
memento by memento, on caches of which all earlier mementos were erased.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing import Eraser, erase, leace_of, random_eraser
from kvprobe.erasing.leace import largest_covariance
from kvprobe.inference.model import Model
from kvprobe.probing.gram import Moments, one_hot_answers
from kvprobe.probing.ridge import fitted_by_fold
from kvprobe.progress import Bar
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.probes import FOLDS, RESTART
from kvprobe.studies.memento_toy.reading import (
    Edit,
    Written,
    digits_of,
    restarted,
    retained,
    rows_of,
    stood_in,
    unchanged,
    vectors_of,
)
from kvprobe.tasks.mementos import BASE, DIGITS, Trace, draw_alike, memento_name, posterior
from kvprobe.tidy import crossed

OPEN, STAND_IN = "open", "stand-in"
BEYOND, EVERYTHING, RANDOM = "beyond the sum", "everything", "random"
ERASED = (BEYOND, EVERYTHING, RANDOM)
Erasers = Mapping[int, list[dict[tuple[int, str], Eraser]]]
"""By memento, for each of its slots, those of each layer and part."""


def measure_closing(
    model: Model, traces: Sequence[Trace], config: Config, rng: np.random.Generator
) -> dict[str, pd.DataFrame]:
    """Of traces on which no eraser was fitted: `closed`, whether each memento is right, by `state`; `left`, the share
    of the block's digits that a linear probe reads in the last layer of the first memento that is written while the
    block is hidden; and `ranks`, of how many dimensions a slot loses how many, by `kind` and layer."""
    fitted_on = len(traces) // 3
    erasers = {kind: fit_erasers(model, traces[:fitted_on], config, kind, rng) for kind in ERASED}
    tested = traces[fitted_on:]
    others = [draw_alike(trace, rng) for trace in tested]

    def reading(state: str, some: slice) -> Iterator[Written]:
        rows, last = rows_of(model, tested[some]), config.blocks
        if state == RESTART:
            return restarted(model, rows, config.keep, range(1, last + 1))
        if state == STAND_IN:
            return stood_in(model, rows, rows_of(model, others[some]), config.keep, last)
        return retained(model, rows, config.keep, last, eraser_of(erasers[state]) if state in erasers else unchanged)

    digits, folds = digits_of(tested, config.block), torch.arange(len(tested)) % FOLDS
    held = np.flatnonzero(folds.numpy() == 0)
    answers, probed = [], []
    for state in Bar((OPEN, STAND_IN, *ERASED, RESTART), desc="Closing the channel", unit="state"):
        right, vectors = [], []
        for start in range(0, len(tested), config.batch):
            batch = []
            for written in reading(state, slice(start, start + config.batch)):
                batch.append(written.likeliest.all(1))
                if written.number == config.first:
                    vectors.append(written.vectors[-1].transpose(0, 1).flatten(1).float().cpu())
            right.append(torch.stack(batch, 1).cpu())
        (fitted,) = next(fitted_by_fold(torch.cat(vectors)[None], [digits], folds, BASE, only=[0]))
        hits = fitted.predicted[0].eq(digits[:, folds == 0]).double().mean(0)
        probed.append(pd.DataFrame({"trace": held, "state": state, "right": hits.numpy()}))
        keys = {"trace": range(len(tested)), "memento": range(1, config.blocks + 1)}
        answers.append(crossed(keys, {"right": torch.cat(right).double().numpy()}).assign(state=state))
    return {
        "closed": pd.concat(answers, ignore_index=True),
        "left": pd.concat(probed, ignore_index=True),
        "ranks": pd.DataFrame(ranks_of(erasers)),
    }


def fit_erasers(model: Model, traces: Sequence[Trace], config: Config, kind: str, rng: np.random.Generator) -> Erasers:
    """The erasers of all mementos but the last; random ones have the rank of those of what goes beyond the sum."""
    erasers: dict[int, list[dict[tuple[int, str], Eraser]]] = {}

    def fit(number: int, cache: KVCache) -> KVCache:
        seen = range(max(1, number - config.keep), number + 1)
        labels = torch.cat([labels_of(traces, block, config, whole=kind == EVERYTHING) for block in seen], 1)
        erasers[number] = fit_memento(number, cache, labels, rng, random=kind == RANDOM)
        return eraser_of(erasers)(number, cache)

    for _ in retained(model, rows_of(model, traces), config.keep, config.blocks - 1, fit):
        pass
    return erasers


def ranks_of(erasers: Mapping[str, Erasers]) -> Iterator[dict[str, str | int]]:
    for kind, of_kind in erasers.items():
        for number, slots in of_kind.items():
            for of_slot in slots:
                for (layer, part), eraser in of_slot.items():
                    rank, width = int(eraser.rank), len(eraser.mean)
                    yield {"kind": kind, "memento": number, "layer": layer, "part": part, "rank": rank, "width": width}


def labels_of(traces: Sequence[Trace], block: int, config: Config, *, whole: bool) -> Float[Tensor, "rows answers"]:
    """One column for each value of each digit of a block: 1 where the digit has it, less its probability given what the
    text states, unless the whole is asked for."""
    digits = digits_of(traces, block)
    answers = one_hot_answers(digits, BASE, torch.float64)
    if whole or config.content == "copy":
        return answers
    expected = [np.tile(posterior(sum(trace.blocks[block - 1]), DIGITS), DIGITS) for trace in traces]
    return answers - torch.from_numpy(np.array(expected))


def fit_memento(
    number: int, cache: KVCache, labels: Float[Tensor, "rows answers"], rng: np.random.Generator, *, random: bool
) -> list[dict[tuple[int, str], Eraser]]:
    """An eraser for each slot of a memento, layer and part, of what covaries with labels more than it does with labels
    of other traces; or of random directions, as many."""
    vectors = vectors_of(number, cache)
    sites = [(layer, part) for layer in range(len(vectors)) for part in ("K", "V")]
    shuffled = labels[torch.from_numpy(rng.permutation(len(labels)))]
    fitted = []
    for slot in range(vectors.shape[3]):
        features = vectors[:, :, :, slot].flatten(0, 1).double().cpu()
        noise = largest_covariance(Moments.of(features, shuffled))
        erasers = leace_of(Moments.of(features, labels), noise=noise)
        erasers = random_eraser(erasers, rng) if random else erasers
        fitted.append({site: erasers.at(place) for place, site in enumerate(sites)})
    return fitted


def eraser_of(erasers: Erasers) -> Edit:
    """Erases in a memento as soon as it is written."""

    def edit(number: int, cache: KVCache) -> KVCache:
        where = cache.ledger.in_segments([memento_name(number)])[0].nonzero()[:, 0].tolist()
        for slot, of_slot in zip(where, erasers.get(number, []), strict=False):
            cache = erase(cache, of_slot, slots=[slot])
        return cache

    return edit
