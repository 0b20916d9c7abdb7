"""Recall: digits that belong to names, words that say nothing, and questions for the digit of a name.

    a 3 b 7 c 1        pairs
    K B B F            talk
    ? b                question    → 7

The digits are uniform and independent, so the text says of a digit nothing but the digit itself: once the pairs are
hidden, all that a model knows of them it has from what it kept of them.
"""

import string
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvprobe.checks import require
from kvprobe.text.transcript import Transcript

BASE = 10
ASK = "?"
"""Comes before the name that is asked for."""
NAMES, WORDS = string.ascii_lowercase[:16], string.ascii_uppercase[:16]
"""Of digits, in the order of every text; and what talk is made of."""
SEGMENTS = PAIRS, TALK, QUESTION = "pairs", "talk", "question"
Digits = Int[np.ndarray, "texts pairs"]
Words = Int[np.ndarray, "texts words"]


def draw_digits(rng: np.random.Generator, count: int, pairs: int) -> Digits:
    """The digits of so many texts."""
    require("pairs", pairs, 1, len(NAMES))
    return rng.integers(BASE, size=(count, pairs))


def draw_others(rng: np.random.Generator, digits: Digits) -> Digits:
    """Other digits in every place."""
    return (digits + rng.integers(1, BASE, size=digits.shape)) % BASE


def draw_talk(rng: np.random.Generator, count: int, words: int) -> Words:
    """The talk of so many texts."""
    return rng.integers(len(WORDS), size=(count, words))


def recall_text(digits: Sequence[int], talk: Sequence[int], asked: int) -> Transcript:
    """Pairs, talk and the question for one of the digits; the segments are `SEGMENTS`. Without talk there are two."""
    pairs = " ".join(f"{name} {digit}" for name, digit in zip(NAMES, digits, strict=False))
    texts = pairs, " ".join(WORDS[word] for word in talk), f"{ASK} {NAMES[asked]}"
    said = {name: text for name, text in zip(SEGMENTS, texts, strict=True) if text}
    return Transcript.from_messages([{"role": name, "content": text} for name, text in said.items()], list(said))


def vocabulary() -> tuple[str, ...]:
    """Every word of every text, after the control tokens; a word's id is its index here."""
    return ("<unk>", "<bos>", "<eos>", ASK, *map(str, range(BASE)), *NAMES, *WORDS)
