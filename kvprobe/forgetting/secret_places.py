"""What readers read of a secret: its digits, or else its words, or else which of several secrets it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

CLASSES = 10
"""Of a digit."""
REPEATS = 3
"""Secrets for each class below which readers have nothing to learn from."""
FEWEST_READ = REPEATS * CLASSES
"""Secrets of one conversation below which readers have nothing to learn from."""
Noun = Literal["digit", "word", "secret"]
"""What a reader reads one of."""
TO_LEARN_FROM = (
    f"Readers learn from {FEWEST_READ} secrets or more with as many digits each, or with words of which each recurs in "
    "three of them or more, such as first and last names; give such (--secrets, --others). Any secret can be searched "
    "for by trying."
)
"""What to give where readers of one conversation have nothing to learn from."""


@dataclass(frozen=True)
class SecretPlaces:
    """What readers read of secrets: a class for each place, such as a digit.

    Attributes:
        labels: none where there is nothing to learn.
    """

    labels: Int[Tensor, "places secrets"]
    classes: int
    noun: Noun

    @classmethod
    def of(cls, secrets: Sequence[str]) -> "SecretPlaces":
        """Their digits, or else their words, in places whose words recur often enough for a reader to learn them."""
        digits, words = digits_of(secrets), [secret.split() for secret in secrets]
        if len(digits) or len({*map(len, words)}) > 1:
            return cls(digits, CLASSES, "digit")
        places = [[*dict.fromkeys(place)] for place in zip(*words, strict=True)]
        labels = [
            [known.index(word) for word in place]
            for known, place in zip(places, zip(*words, strict=True), strict=True)
            if 1 < len(known) <= len(secrets) / REPEATS
        ]
        numbers = torch.tensor(labels, dtype=torch.long).reshape(-1, len(secrets))
        return cls(numbers, int(numbers.max()) + 1 if labels else 0, "word")

    @classmethod
    def or_which(cls, secrets: Sequence[str]) -> "SecretPlaces":
        """The same, or else which of the secrets it is, for readers that meet each more than once."""
        found = cls.of(secrets)
        return found if len(found.labels) else cls(torch.arange(len(secrets))[None], len(secrets), "secret")


def digits_of(secrets: Sequence[str]) -> Int[Tensor, "places secrets"]:
    """The digits of each secret that differ between them, a row for each place; none where some have more."""
    digits = [[int(letter) for letter in secret if letter in "0123456789"] for secret in secrets]
    if len({*map(len, digits)}) > 1:
        return torch.zeros(0, len(secrets), dtype=torch.long)
    numerals = torch.tensor(digits, dtype=torch.long).T
    return numerals[(numerals != numerals[:, :1]).any(1)]


def learnable(secrets: Sequence[str]) -> bool:
    """Whether readers of one conversation have something to learn from."""
    return len(secrets) >= FEWEST_READ and len(SecretPlaces.of(secrets).labels) > 0


def are_codes(secrets: Sequence[str]) -> bool:
    """Whether all are digits alone, and as many."""
    return len({*map(len, secrets)}) == 1 and all(secret.isascii() and secret.isdecimal() for secret in secrets)
