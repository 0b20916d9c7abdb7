"""Can the channel be closed without harm? What a memento holds of its block's digits is taken out of its K and V.

Exactly: the memento is written anew in view of another block that the text fits as well (a stand-in), so that it holds
nothing of its own block but what is in the text. Or linearly, as soon as it is written: all that covaries with the
digits is erased, or only what does so beyond their sum, which the text states anyway; the labels are then the digits
less what is to be expected of them, given the sum (LEACE, Belrose et al. 2023, arXiv 2306.03819). Erasers are fitted
memento by memento, on caches of which all earlier mementos were erased.
"""

from collections.abc import Iterator, Sequence

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
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.probes import FOLDS, RESTART, labels_of, read_linearly
from kvprobe.studies.memento_toy.reading import (
    Edit,
    Written,
    digits_of,
    restarted,
    retained,
    rows_of,
    stood_in,
    vectors_of,
)
from kvprobe.tasks.mementos import BASE, DIGITS, Trace, draw_alike, memento_name, posterior
from kvprobe.tidy import crossed

OPEN, STAND_IN = "open", "stand-in"
BEYOND, EVERYTHING, RANDOM = "beyond the sum", "everything", "random"
ERASED = (BEYOND, EVERYTHING, RANDOM)
SHUFFLES = 19
"""Of labels, above whose largest covariance a direction is erased."""
Erasers = dict[int, list[dict[tuple[int, str], Eraser]]]
"""By memento, for each of its slots, those of each layer and part."""


def states_of(config: Config) -> list[str]:
    """What is done to mementos. Where they are copies, all that a text does not say is everything."""
    return [OPEN, STAND_IN, *(kind for kind in ERASED if (kind, config.content) != (BEYOND, "copy")), RESTART]


def measure_closing(model: Model, traces: Sequence[Trace], config: Config, state: str) -> pd.DataFrame:
    """Three kinds of rows (`measure`), of traces on which no eraser was fitted. Of `answer`, one per trace and memento:
    whether it is `right`. Of `probe`, one per tested trace: the share of the block's digits that a linear probe reads
    in the last layer of the first memento that is written while the block is hidden (`right`), and that of digits which
    the text fits as well (`alike`). Of `rank`, one per layer: of how many dimensions an eraser is, on average."""
    fitted_on = len(traces) // 3
    rng = np.random.default_rng([config.seed, 4, states_of(config).index(state)])
    erasers = fit_erasers(model, traces[:fitted_on], config, state, rng) if state in ERASED else {}
    tested = traces[fitted_on:]
    others = [draw_alike(trace, rng) for trace in tested]
    right, vectors = [], []
    for start in range(0, len(tested), config.batch):
        some, batch = slice(start, start + config.batch), []
        for written in reading(model, tested[some], others[some], config, state, erasers):
            batch.append(written.likeliest.all(1))
            if written.number == config.hidden_from:
                vectors.append(written.vectors[-1].transpose(0, 1).flatten(1).float().cpu())
        right.append(torch.stack(batch, 1).cpu())
    keys = {"trace": range(len(tested)), "memento": range(1, config.blocks + 1)}
    answers = crossed(keys, {"right": torch.cat(right).double().numpy()})
    folds = torch.arange(len(tested)) % FOLDS
    digits = labels_of(tested, config, np.random.default_rng([config.seed, 6]))
    read = pd.DataFrame(read_linearly(torch.cat(vectors), digits, folds))
    ranks = pd.DataFrame(
        [
            {"layer": layer, "rank": int(eraser.rank)}
            for of_memento in erasers.values()
            for of_slot in of_memento
            for (layer, _), eraser in of_slot.items()
        ],
        columns=["layer", "rank"],
    )
    tables = {
        "answer": answers,
        "probe": read.assign(trace=np.flatnonzero(folds.numpy() == 0)),
        "rank": ranks.groupby("layer", as_index=False).mean(),
    }
    return pd.concat([table.assign(measure=name) for name, table in tables.items()], ignore_index=True).assign(
        state=state
    )


def reading(
    model: Model, traces: Sequence[Trace], others: Sequence[Trace], config: Config, state: str, erasers: Erasers
) -> Iterator[Written]:
    """All mementos of some traces."""
    rows, last = rows_of(model, traces), config.blocks
    if state == RESTART:
        return restarted(model, rows, config.keep, range(1, last + 1))
    if state == STAND_IN:
        return stood_in(model, rows, rows_of(model, others), config.keep, last)
    return retained(model, rows, config.keep, last, eraser_of(erasers))


def fit_erasers(model: Model, traces: Sequence[Trace], config: Config, kind: str, rng: np.random.Generator) -> Erasers:
    """The erasers of all mementos but the last. Random ones are as many directions as are found beyond the sum."""
    erasers: Erasers = {}

    def fit(number: int, cache: KVCache) -> KVCache:
        seen = range(max(1, number - config.keep), number + 1)
        answers = torch.cat([answers_of(traces, block, config, whole=kind == EVERYTHING) for block in seen], 1)
        erasers[number] = fit_memento(number, cache, answers, rng, random=kind == RANDOM)
        return eraser_of(erasers)(number, cache)

    for _ in retained(model, rows_of(model, traces), config.keep, config.blocks - 1, fit):
        pass
    return erasers


def answers_of(traces: Sequence[Trace], block: int, config: Config, *, whole: bool) -> Float[Tensor, "rows answers"]:
    """One column for each value of each digit of a block: 1 where the digit has it, less its probability given what the
    text states, unless the whole is asked for."""
    digits = digits_of(traces, block)
    answers = one_hot_answers(digits, BASE, torch.float64)
    if whole or config.content == "copy":
        return answers
    expected = [np.tile(posterior(sum(trace.blocks[block - 1]), DIGITS), DIGITS) for trace in traces]
    return answers - torch.from_numpy(np.array(expected))


def fit_memento(
    number: int, cache: KVCache, answers: Float[Tensor, "rows answers"], rng: np.random.Generator, *, random: bool
) -> list[dict[tuple[int, str], Eraser]]:
    """An eraser for each slot of a memento, layer and part, of the directions that covary with the answers more than
    any does with shuffled ones; or of as many random directions."""
    vectors = vectors_of(number, cache)
    sites = [(layer, part) for layer in range(len(vectors)) for part in ("K", "V")]
    orders = [torch.from_numpy(rng.permutation(len(answers))) for _ in range(SHUFFLES)]
    fitted = []
    for slot in range(vectors.shape[3]):
        features = vectors[:, :, :, slot].flatten(0, 1).double().cpu()
        moments = Moments.of(features, answers)
        centred = (features - features.mean(1, keepdim=True)).mT
        noise = largest_covariance(moments, torch.stack([centred @ answers[order] for order in orders]))
        erasers = leace_of(moments, noise=noise)
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
