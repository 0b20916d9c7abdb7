"""What a latent stands for, as far as texts tell: the tokens that it is most active in, each with its surroundings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvprobe.errors import UserError
from kvprobe.saes.dictionary import Dictionary
from kvprobe.saes.shards import Shards

BEFORE, AFTER = 14, 4
"""Tokens around the most active one that are shown."""


@dataclass(frozen=True)
class Example:
    """A stretch of text and how active a latent is in each of its tokens; the `peak`th of them is the most active of its text."""

    ids: tuple[int, ...]
    values: tuple[float, ...]
    peak: int


@dataclass(frozen=True)
class Activating:
    """The texts that a latent is most active in, most active first.

    Attributes:
        density: share of all recorded tokens in which it is active.
        examples: of different texts; none for a latent that is active nowhere.
    """

    latent: int
    density: float
    examples: tuple[Example, ...]


def activating(features: Dictionary, shards: Shards, latents: Sequence[int], examples: int = 6) -> list[Activating]:
    """For each of some latents the recorded tokens that it is most active in, one of each text, and no passage twice.

    Raises:
        UserError: there is no such latent, or nothing was recorded at the dictionary's place.
    """
    for latent in latents:
        if not 0 <= latent < features.width:
            raise UserError(f"There is no latent {latent}; the dictionary has {features.width}, counted from 0.")
    columns = torch.tensor(list(latents), dtype=torch.long)
    seen = [features.encode(shard)[:, columns].cpu() for shard in shards.activations(features.place)]
    values = torch.cat(seen)
    ids, text, _ = (torch.cat(parts) for parts in zip(*shards.words(), strict=True))
    _, place, lengths = text.unique_consecutive(return_inverse=True, return_counts=True)
    ends = lengths.cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, lengths.tolist(), strict=True)]
    found = []
    for column, latent in enumerate(latents):
        own = values[:, column]
        highest = torch.zeros(len(ends)).scatter_reduce(0, place, own, "amax", include_self=False)
        shown: dict[tuple[int, ...], Example] = {}
        for number in highest.argsort(descending=True).tolist():
            if highest[number] <= 0 or len(shown) == examples:
                break
            start, end = starts[number], ends[number]
            peak = start + int(own[start:end].argmax())
            window = slice(max(start, peak - BEFORE), min(end, peak + AFTER + 1))
            words = tuple(ids[window].tolist())
            # Texts may share passages; one of each is enough.
            shown.setdefault(words, Example(words, tuple(own[window].tolist()), peak - window.start))
        found.append(Activating(latent, float((own != 0).double().mean()), tuple(shown.values())))
    return found
