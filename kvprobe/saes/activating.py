"""Examples of a latent: the tokens that it is most active in, each with the text around it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError
from kvprobe.saes.dictionary import Dictionary
from kvprobe.saes.shards import Shards

BEFORE, AFTER = 14, 4
"""Tokens around the most active one that are shown."""


@dataclass(frozen=True)
class Example:
    """A passage and how active a latent is in each token; token number `peak` is the most active of its whole text."""

    ids: tuple[int, ...]
    values: tuple[float, ...]
    peak: int


@dataclass(frozen=True)
class Activating:
    """The texts that a latent is most active in, most active first.

    Attributes:
        density: share of all recorded tokens in which it is active.
        examples: of different texts; empty for a latent that is never active.
    """

    latent: int
    density: float
    examples: tuple[Example, ...]


@checked_arguments
def activating(dictionary: Dictionary, shards: Shards, latents: Sequence[int], examples: int = 6) -> list[Activating]:
    """For each latent the recorded tokens that it is most active in, at most one of each text, and no passage twice.

    Raises:
        UserError: there is no such latent, or nothing was recorded at the dictionary's place.
    """
    for latent in latents:
        if not 0 <= latent < dictionary.width:
            raise UserError(f"There is no latent {latent}; the dictionary has latents 0 to {dictionary.width - 1}.")
    columns = torch.tensor(list(latents), dtype=torch.long)
    shards_read = shards.activations(dictionary.place)
    values = torch.cat([dictionary.encode(activations)[:, columns].cpu() for activations in shards_read])
    ids, text, _ = (torch.cat(parts) for parts in zip(*shards.words(), strict=True))
    _, number, lengths = text.unique_consecutive(return_inverse=True, return_counts=True)
    texts = _Texts(ids, number, lengths)
    return [
        Activating(latent, float((column != 0).double().mean()), texts.examples(column, examples))
        for latent, column in zip(latents, values.unbind(1), strict=True)
    ]


@dataclass(frozen=True)
class _Texts:
    """Recorded tokens.

    Attributes:
        ids: of all tokens, text after text.
        number: of each token's text, from 0 on.
        lengths: of the texts.
    """

    ids: Int[Tensor, "tokens"]
    number: Int[Tensor, "tokens"]
    lengths: Int[Tensor, "texts"]

    def examples(self, values: Float[Tensor, "tokens"], count: int) -> tuple[Example, ...]:
        """The passages around a latent's highest values, at most one of each text."""
        ends = self.lengths.cumsum(0)
        highest = values.new_zeros(len(ends)).scatter_reduce(0, self.number, values, "amax", include_self=False)
        shown: dict[tuple[int, ...], Example] = {}
        for text in highest.argsort(descending=True).tolist():
            if highest[text] <= 0 or len(shown) == count:
                break
            end = int(ends[text])
            start = end - int(self.lengths[text])
            peak = start + int(values[start:end].argmax())
            window = slice(max(start, peak - BEFORE), min(end, peak + AFTER + 1))
            passage = tuple(self.ids[window].tolist())
            # Texts may share passages; one of each is enough.
            shown.setdefault(passage, Example(passage, tuple(values[window].tolist()), peak - window.start))
        return tuple(shown.values())
