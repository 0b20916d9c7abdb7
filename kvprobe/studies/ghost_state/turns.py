"""The toy of Memento with a memory of states: what a block that attention no longer sees leaves, turn by turn, and what
a mistake in it does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.progress import Bar
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.reading import BOTH, ERASED, IN_VIEW, RESTART, STATE, vectors
from kvprobe.studies.layer_readers import read_layers
from kvprobe.tasks.mementos import (
    BASE,
    PLACES,
    Trace,
    block_name,
    draw_changed,
    memento_name,
    vocabulary,
)
from kvprobe.text.tokens import Tokens

TURNS = "turns"
RIGHT, SHIFT, READ = "mementos right", "shift by a mistake", "read from the state"
"""What `value` is, by `outcome`: whether a memento is right, given those before it; by how many nats a hidden block of
other digits moves the memento towards the sum that these would give; the share of the first block's digits that a
linear probe reads."""
ARMS = (IN_VIEW, ERASED, BOTH, RESTART)
"""After a restart each block is read after the mementos before it alone, at the positions that they had."""
BLOCKS = 5
"""Of a trace, as in `kvprobe train memento --blocks 5`."""


def read_toy(model: Model, config: Config) -> pd.DataFrame:
    """Per `arm`, `outcome`, `turn` and `text` the `value`; see `READ`.

    Raises:
        UserError: it is no model of mementos.
    """
    if not set(vocabulary()) == set(model.tokenizer.get_vocab()):
        raise UserError(
            f"{model.name} is no model of mementos; name models that `kvprobe train memento --memory …` trained in "
            "'toys'."
        )
    rng = np.random.default_rng([config.seed, 0])
    drawn = [draw_changed(rng, 1, blocks=BLOCKS) for _ in range(config.texts)]
    traces, wrong = [trace for trace, _ in drawn], [changed["sum"] for _, changed in drawn]
    tables = [
        table
        for start in Bar(range(0, config.texts, config.batch), desc=f"Reading {model.name}", unit="batch")
        for table in read_mementos(
            model, traces[start : start + config.batch], wrong[start : start + config.batch], start
        )
    ]
    labels = torch.tensor([trace.blocks[0] for trace in traces]).T
    if model.geometry.recurrent:
        tables += probe_states(model, traces, labels, config)
    return pd.concat(tables, ignore_index=True).assign(table=TURNS)


def read_mementos(model: Model, traces: Sequence[Trace], wrong: Sequence[Trace], start: int) -> Iterator[pd.DataFrame]:
    """Of some traces, whether mementos are right, and how far a mistake in the first block moves them."""
    clean, mistaken = (model.tokens([trace.conversation() for trace in some]) for some in (traces, wrong))
    poisoned = [_with_block(*pair) for pair in zip(clean, mistaken, strict=True)]
    texts = np.arange(start, start + len(traces))
    places = _first_difference(traces, wrong)[..., None]
    stated, injected = (
        torch.tensor([[_digits(memento) for memento in trace.mementos[1:]] for trace in some])[..., None]
        for some in (traces, wrong)
    )
    for arm in ARMS:
        scores, moved = (
            torch.stack([scores for scores, _ in turn_by_turn(model, rows, arm)], 1) for rows in (clean, poisoned)
        )
        right = scores.argmax(3).eq(stated[..., 0]).all(2).double().numpy()
        margins = [(of.gather(3, stated) - of.gather(3, injected))[..., 0].gather(2, places) for of in (scores, moved)]
        shift = (margins[0] - margins[1])[..., 0].numpy()
        for turn in range(1, BLOCKS + 1):
            keys = {"arm": arm, "turn": turn, "text": texts}
            yield pd.DataFrame({**keys, "outcome": RIGHT, "value": right[:, turn - 1]})
            # Memento 1 is stated beside the mistake; what follows should go by what it says.
            if turn > 1:
                yield pd.DataFrame({**keys, "outcome": SHIFT, "value": shift[:, turn - 1]})


def probe_states(model: Model, traces: Sequence[Trace], labels: Tensor, config: Config) -> Iterator[pd.DataFrame]:
    """What a linear probe reads of the first block in the states, after each memento."""
    for arm in (ERASED, BOTH, RESTART):
        states: list[list[Tensor]] = [[] for _ in range(BLOCKS)]
        for start in range(0, len(traces), config.batch):
            rows = model.tokens([trace.conversation() for trace in traces[start : start + config.batch]])
            for number, (_, cache) in enumerate(turn_by_turn(model, rows, arm)):
                states[number].append(vectors(model, cache, STATE))
        for number, parts in enumerate(states):
            if arm == RESTART and number == 0:
                continue  # the block itself was just read
            read = read_layers(torch.cat(parts, 1), labels, BASE)
            read = read.loc[read["layer"] < 0]
            known = {"text": read["text"], "value": read["right"]}
            yield pd.DataFrame({**known, "arm": arm, "outcome": READ, "turn": number + 1})


def turn_by_turn(model: Model, rows: Sequence[Tokens], arm: str) -> Iterator[tuple[Tensor, KVCache]]:
    """After each block and its memento, the log-probabilities of the memento's digits, `[texts, places, digits]`, and
    the cache, in which the block is hidden from then on."""
    ids: Sequence[int] = model.tokenizer.convert_tokens_to_ids([*map(str, range(BASE))])
    cache, first = None, 0
    for number in range(1, BLOCKS + 1):
        end = rows[0].span(memento_name(number)).stop
        if arm == RESTART and number > 1:
            blocks = {block_name(before) for before in range(1, number)}
            alone = [place for place in range(first) if rows[0].segments[place] not in blocks]
            cache = model.prefill([row.at(alone) for row in rows])
        cache, logits = model.extend(cache, [row[first:end] for row in rows], logits=PLACES + 1)
        first = end
        if arm == BOTH:
            cache = cache.mask(block_name(number))
        elif arm == ERASED and model.geometry.attending:
            cache = cache.mask(block_name(number), layers=model.geometry.attending)
        yield logits[:, :-1].double().log_softmax(-1)[..., ids].cpu(), cache


def _with_block(row: Tokens, other: Tokens) -> Tokens:
    """The tokens of one trace with block 1 of another."""
    block = row.span(block_name(1))
    return replace(row, ids=(*row.ids[: block.start], *other.ids[block], *row.ids[block.stop :]))


def _first_difference(traces: Sequence[Trace], wrong: Sequence[Trace]) -> Tensor:
    """By trace and memento, the first place at which the right sum and that of the mistake differ."""
    pairs = [
        [(_digits(one), _digits(other)) for one, other in zip(trace.mementos[1:], changed.mementos[1:], strict=True)]
        for trace, changed in zip(traces, wrong, strict=True)
    ]
    return torch.tensor(
        [[next(place for place in range(PLACES) if one[place] != other[place]) for one, other in row] for row in pairs]
    )


def _digits(memento: int) -> list[int]:
    return [int(digit) for digit in f"{memento:0{PLACES}}"]
