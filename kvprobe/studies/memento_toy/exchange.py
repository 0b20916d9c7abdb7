"""Is what mementos hold of a hidden block used? The block is exchanged for another, and nothing else that can be seen.

What the first memento after it states is compared under caches that differ in the hidden block alone. Its other digits
either fit the text as well (`digits`), or have another sum than the text states (`sum`): then the memento that the text
asks for is another than the one that the hidden block asks for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.patching.grid import Part
from kvprobe.studies.memento_toy.traces import hide, memento, retained, token_rows
from kvprobe.tasks.mementos import PLACES, Change, Trace, block_name, memento_name
from kvprobe.text.tokens import Tokens

OWN, DONOR = "own", "donor"
"""The caches in which nothing is exchanged, and in which the text fits the exchanged block."""
PARTS: tuple[Part, ...] = ("K", "V", "KV")


def exchange_blocks(
    model: Model, pairs: Sequence[tuple[Trace, Mapping[Change, Trace]]], block: int, keep: int = 0
) -> pd.DataFrame:
    """A row per trace (its place in `pairs`), change of the hidden block (`condition`) and `part` of the cache that it
    is felt through.

    Columns: `right`, whether each digit of the memento that the text asks for is the likeliest; `turned`, whether any
    of its likeliest digits is another than with the hidden block as it was; `kl`, the divergence of what is predicted
    from what is predicted then, in nats over the three digits; and `margin`, by how many nats that memento is likelier
    than the one that the exchanged block asks for, where that is another.

    Args:
        pairs: see `kvprobe.tasks.mementos.draw_changed`; all with the same kinds of change.
        block: the one that is exchanged.
        keep: blocks before the present one that stay in view.
    """
    own = token_rows(model, [trace for trace, _ in pairs])
    others = {kind: token_rows(model, [changed[kind] for _, changed in pairs]) for kind in pairs[0][1]}
    asking = _Asking(model, own, others.get("sum"), block + keep + 1, keep)
    base = asking.before(own)
    # What was read in view of the block and is still in view: its memento, and later blocks that are kept, with theirs.
    later = range(block + 1, asking.number)
    carriers = [memento_name(block), *(name(number) for number in later for name in (block_name, memento_name))]
    first = asking.read(base)
    clean = asking.scores(first, asking.text)
    tables = [asking.table(first, clean).assign(condition=OWN, part="KV")]
    for kind, rows in others.items():
        span = own[0].span(block_name(block))
        mixed = [row[: span.start] + other[span] + row[span.stop :] for row, other in zip(own, rows, strict=True)]
        donor = asking.before(mixed)
        for part in PARTS:
            patched = asking.read(base.patch(donor, *carriers, part=part))
            tables.append(asking.table(patched, clean, rival=kind == "sum").assign(condition=kind, part=part))
    if "sum" in others:
        fits = asking.read(asking.before(others["sum"]))
        tables.append(asking.table(fits, clean).assign(condition=DONOR, part="KV"))
    return pd.concat(tables, ignore_index=True)


@dataclass(frozen=True)
class _Asking:
    """Asking for the first memento that is written while the block is hidden.

    Attributes:
        own: the traces as they are.
        others: the same with a block of another sum, and the text that fits it; None where there are none.
        number: of the memento.
    """

    model: Model
    own: Sequence[Tokens]
    others: Sequence[Tokens] | None
    number: int
    keep: int

    @property
    def text(self) -> list[Tokens]:
        """The mementos that the text asks for."""
        return memento(self.own, self.number)

    def before(self, rows: Sequence[Tokens]) -> KVCache:
        """The cache as the block before the memento sees it."""
        *_, last = retained(self.model, rows, self.keep, self.number - 1)
        return hide(last.cache, last.number, self.keep)

    def read(self, cache: KVCache) -> KVCache:
        """The cache once that block has been read."""
        span = self.own[0].span(block_name(self.number))
        return self.model.extend(cache, [row[span] for row in self.own])[0]

    def scores(self, cache: KVCache, text: Sequence[Tokens]) -> Float[Tensor, "rows places words"]:
        """The log-probabilities of the digits of a memento, each after the true ones before it."""
        _, logits = self.model.extend(cache, list(text), logits=PLACES + 1)
        return logits[:, :PLACES].double().log_softmax(-1).cpu()

    def table(self, cache: KVCache, clean: Float[Tensor, "rows places words"], *, rival: bool = True) -> pd.DataFrame:
        """What is predicted after a cache, beside what is predicted as it was.

        Args:
            rival: whether the memento that the exchanged block asks for is another.
        """
        scores = self.scores(cache, self.text)
        likeliest = scores.argmax(-1)
        numbers = {
            "right": (likeliest == _stated(self.text)).all(1),
            "turned": (likeliest != clean.argmax(-1)).any(1),
            "kl": (clean.exp() * (clean - scores)).sum((1, 2)),
            "margin": torch.full((len(self.own),), torch.nan),
        }
        if rival and self.others is not None:
            asked = memento(self.others, self.number)
            numbers["margin"] = _likelihood(scores, self.text) - _likelihood(self.scores(cache, asked), asked)
        table = {name: tensor.double().cpu().numpy() for name, tensor in numbers.items()}
        return pd.DataFrame({"trace": range(len(self.own)), **table})


def _stated(text: Sequence[Tokens]) -> Int[Tensor, "rows places"]:
    return torch.tensor([row.ids[-PLACES:] for row in text])


def _likelihood(scores: Float[Tensor, "rows places words"], text: Sequence[Tokens]) -> Float[Tensor, "rows"]:
    return scores.gather(2, _stated(text)[:, :, None]).sum((1, 2))
