"""A block is read and its memento written; then the block is hidden in one of several ways, and any digit is asked for.

The memento is *retained* (it saw its block), *restart* (computed again from its text), a *stand-in* (it saw a block of
the same memento whose omitted digits are all others), or has the K or the V of the stand-in alone. All are at the same
positions and have the same text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.plain_data import Limits, filled
from kvprobe.policies import RestartInPlace
from kvprobe.tasks.lossy_mementos import BITS, BLOCK, MEMENTO, QUESTION, Digits, LossyDesign
from kvprobe.text.tokens import Tokens
from kvprobe.training.schedule import Provenance

RETAINED, RESTART, STAND_IN = "retained", "restart", "stand-in"
SWAPPED: Mapping[str, Literal["K", "V"]] = {"K of the stand-in": "K", "V of the stand-in": "V"}
OMITTED, STATED = "omitted", "stated"


@dataclass(frozen=True)
class Trained:
    """What a model was trained for, as its config says.

    Attributes:
        provenance: of the memento that questions saw.
    """

    asked: int
    slots: int
    provenance: Provenance
    seed: int

    @property
    def design(self) -> LossyDesign:
        return LossyDesign(self.asked, self.slots)


def trained(model: Model) -> Trained:
    """What a model was trained for.

    Raises:
        UserError: it is no model of `kvprobe train lossy`.
    """
    given = getattr(model.lanes.plain.config, "lossy", None)
    if given is None:
        raise UserError(f"{model.name} is no model of lossy mementos; give one that `kvprobe train lossy` trained.")
    return filled(Trained, given, f"What {model.name} was trained for", Limits(text=64, entries=8))


def token_rows(model: Model, design: LossyDesign, digits: Digits, place: int = 0) -> list[Tokens]:
    """The tokens of blocks, their mementos and a question."""
    (first,) = model.tokens(design.conversation(digits[0].tolist(), place))
    number = np.array(model.tokenizer.convert_tokens_to_ids([*map(str, range(10))]))
    ids = np.tile(first.ids, (len(digits), 1))
    block, memento = first.span(BLOCK), first.span(MEMENTO)
    ids[:, block] = number[digits]
    ids[:, memento.start + 1 : memento.stop] = number[digits[:, : design.stated]]
    if tuple(ids[0].tolist()) != first.ids:
        raise UserError(f"{model.name} does not read a block as one token for each digit; see `kvprobe train lossy`.")
    return [replace(first, ids=tuple(row)) for row in ids.tolist()]


def caches(model: Model, design: LossyDesign, digits: Digits, others: Digits) -> dict[str, KVCache]:
    """What questions see, by what became of the memento.

    Args:
        others: blocks of the same mementos, for stand-ins.
    """
    before = [[row[: row.span(QUESTION).start] for row in token_rows(model, design, some)] for some in (digits, others)]
    own, other = (model.prefill(rows) for rows in before)
    retained, stand_in = own.evict(BLOCK), other.evict(BLOCK)
    swapped = {name: retained.patch(stand_in, MEMENTO, part=part) for name, part in SWAPPED.items()}
    restart = model.apply(RestartInPlace(BLOCK), own)
    return {RETAINED: retained, RESTART: restart, STAND_IN: stand_in, **swapped}


def vectors(cache: KVCache) -> Float[Tensor, "layers rows width"]:
    """K and V in all slots of the memento, side by side."""
    where = cache.ledger.in_segments([MEMENTO])[0]
    parts = [
        torch.cat([heads[:, :, where].flatten(1) for heads in pair], 1)
        for pair in zip(cache.keys, cache.values, strict=True)
    ]
    return torch.stack(parts).float().cpu()


def answers(model: Model, design: LossyDesign, cache: KVCache, digits: Digits, others: Digits) -> pd.DataFrame:
    """Per block and kind of digits (`omitted`, `stated`): the share of answers that are `right`, that give the digit of
    the stand-in (`follows`), how many `bits` the answers know of all these digits, and by how many nats the digit is
    likelier than the stand-in's (`margin`).
    """
    scores = torch.stack([*_asked(model, design, cache, digits)], 1)
    own, other = (torch.from_numpy(some)[:, :, None] for some in (digits, others))
    chosen, likeliest = [scores.gather(2, some)[:, :, 0] for some in (own, other)], scores.argmax(2)
    numbers = {
        "right": likeliest == own[:, :, 0],
        "follows": likeliest == other[:, :, 0],
        "bits": BITS + chosen[0] / np.log(2),
        "margin": chosen[0] - chosen[1],
    }
    kinds = {OMITTED: slice(design.stated, None), STATED: slice(0, design.stated)}
    return pd.concat(
        [
            pd.DataFrame({name: _per_block(name, number[:, places]) for name, number in numbers.items()}).assign(
                trace=range(len(digits)), kind=kind
            )
            for kind, places in kinds.items()
            if design.stated or kind == OMITTED
        ]
    )


def _per_block(name: str, numbers: Tensor) -> np.ndarray:
    numbers = numbers.double()
    return (numbers.sum(1) if name == "bits" else numbers.mean(1)).numpy()


def _asked(model: Model, design: LossyDesign, cache: KVCache, digits: Digits) -> Iterator[Float[Tensor, "rows digits"]]:
    """The log-probability of each digit as the answer, by the place that is asked for."""
    number: Sequence[int] = model.tokenizer.convert_tokens_to_ids([*map(str, range(10))])
    for place in range(design.places):
        (row,) = token_rows(model, design, digits[:1], place)
        _, logits = model.extend(cache, [row[row.span(QUESTION)]] * len(digits))
        yield logits[:, -1].double().log_softmax(-1)[:, number].cpu()
