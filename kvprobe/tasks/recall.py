"""Recall: digits that belong to names, words that say nothing, and questions for the digit of a name.

    a 3 b 7 c 1        pairs
    K B B F            talk: unrelated words
    ? b 7              question

Models that were trained on it read it so. To others it is spoken: a user states `a=3, b=7, c=1`, talks of other things,
and asks.

The digits are uniform and independent, so no other word tells one: once the pairs are hidden, all that a model knows
of them it has from what it kept.
"""

import string
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from kvprobe.checks import require
from kvprobe.text.transcript import Transcript

BASE = 10
ASK = "?"
"""Comes before the name that is asked for."""
NAMES, WORDS = string.ascii_lowercase[:16], string.ascii_uppercase[:16]
"""Of digits, in the order of every text; and what talk is made of."""
NOUNS = (
    "river", "table", "garden", "winter", "music", "paper", "bridge", "market", "window", "forest", "letter", "morning",
    "kitchen", "island", "summer", "road",
)  # fmt: skip
"""What spoken talk is made of."""
OPENING, PAIRS, TALK, QUESTION = "opening", "pairs", "talk", "question"
"""Segments. The opening of spoken texts is never hidden, so that the first slots, which all attend to, stay."""
ANSWER = "answer"
"""The part of a question that a model would say."""
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


def recall_text(
    digits: Sequence[int], talk: Sequence[int], asked: int, *, stated: bool = True, nouns: Sequence[str] | None = None
) -> Transcript:
    """Pairs, unrelated words and the question for one of the digits, with its answer.

    Args:
        talk: at least one word.
        stated: whether the pairs are.
        nouns: what talk is made of, where a model of language is spoken to.
    """
    known = zip(NAMES, digits, strict=False)
    answer = {"text": str(digits[asked]), "name": ANSWER}
    messages: list[tuple[str, str, str | list[str | Mapping[str, str]]]]
    if nouns:
        pairs = ", ".join(f"{name}={digit}" for name, digit in known)
        turn = [("user", PAIRS, f"Keep these in mind: {pairs}."), ("assistant", PAIRS, "Noted.")]
        messages = [
            ("system", OPENING, "You answer briefly."),
            *(turn if stated else []),
            ("user", TALK, " ".join(["Words:", *(nouns[word % len(nouns)] for word in talk)])),
            ("assistant", TALK, "I see."),
            ("user", QUESTION, f"Which digit belongs to {NAMES[asked]}? Answer with the pair."),
            ("assistant", QUESTION, [f"{NAMES[asked]}=", answer]),
        ]
    else:
        pairs = " ".join(f"{name} {digit}" for name, digit in known)
        messages = [
            *([("user", PAIRS, pairs)] if stated else []),
            ("user", TALK, " ".join(WORDS[word] for word in talk)),
            ("user", QUESTION, [f"{ASK} {NAMES[asked]} ", answer]),
        ]
    return Transcript.from_messages(
        [{"role": role, "content": text} for role, _, text in messages], [segment for _, segment, _ in messages]
    )


def vocabulary() -> tuple[str, ...]:
    """Every word of every text, after the control tokens; a word's id is its index here."""
    return ("<unk>", "<bos>", "<eos>", ASK, *map(str, range(BASE)), *NAMES, *WORDS)
