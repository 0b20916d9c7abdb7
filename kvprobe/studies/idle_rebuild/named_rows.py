"""Runs under names that all read the same tokens: each goes on where its own cache ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True)
class NamedRows:
    """The rows of a cache, each under a name."""

    names: tuple[str, ...]
    cache: KVCache

    def joined(self, name: str, cache: KVCache) -> "NamedRows":
        """With one more row."""
        return NamedRows((*self.names, name), KVCache.join([self.cache, cache]))

    def only(self, *names: str) -> "NamedRows":
        """The rows of these names, in this order."""
        return NamedRows(names, self.cache.rows([self.names.index(name) for name in names]))


def read_on(
    model: Model, runs: Sequence[NamedRows], tokens: Tokens, logits: int = 1
) -> tuple[list[NamedRows], dict[str, Float[Tensor, "last vocab"]]]:
    """Let every run read these tokens; the longer caches, and the logits after the last `logits` tokens by name.

    Args:
        runs: in several batches where their caches hold different numbers of slots, since rows of a batch are padded to
            the longest.
    """
    grown: list[NamedRows] = []
    scores: dict[str, Tensor] = {}
    for rows in runs:
        cache, by_row = model.extend(rows.cache, onwards(rows.cache, [tokens]), logits=logits)
        grown.append(replace(rows, cache=cache))
        scores |= dict(zip(rows.names, by_row, strict=True))
    return grown, scores
