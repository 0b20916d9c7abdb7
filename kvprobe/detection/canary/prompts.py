"""Prompts that look at the whole cache: lists of random words, which a model recites from a chosen place on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvprobe.detection.canary.target import Prompt
from kvprobe.shipped import shipped_entries

CUE = 4
"""Words of the list that are repeated as a question; what follows them in the list is the answer. Of
other kinds and numbers nothing was compared yet; `benchmarks/canary_prompts.py` plants the zoo in their caches."""


@runtime_checkable
class Tokenizing(Protocol):
    """What makes tokens of words, as each `CanaryTarget` does."""

    def tokens(self, text: str, first: bool = False) -> Prompt: ...


@dataclass(frozen=True)
class Listing:
    """A list of words, in tokens.

    Attributes:
        body: the words.
        ends: where each word ends.
        again: what begins a question.
        cue: words of a question.
    """

    body: Prompt
    ends: Sequence[int]
    again: Prompt
    cue: int = CUE

    def question(self, place: int) -> Prompt:
        """The last words that end at or before a place; what follows them there is the answer."""
        last = max(self.cue, int(np.searchsorted(self.ends, place, "right")) - 1)
        return self.again + self.body[self.ends[last - self.cue] : self.ends[last]]

    def asking(self, place: int, length: int) -> Prompt:
        """The list and the question for a place, in exactly so many tokens."""
        question = self.question(place)
        return self.body[: length - len(question)] + question

    def after(self, place: int, length: int) -> Prompt:
        """The first `length` tokens of the list, and after them the question for a place."""
        return self.body[:length] + self.question(place)


class Prompts:
    """Makes lists that no engine has read before, so that nothing of them can be in a cache.

    Args:
        words: of which lists are made; short English nouns by default.
        cue: words of a question.
    """

    def __init__(self, target: Tokenizing, seed: int, words: Sequence[str] = (), cue: int = CUE) -> None:
        self._target, self._rng, self._cue = target, np.random.default_rng(seed), cue
        self._words = words or shipped_entries("tasks/recite")["words"]
        self._known: dict[str, Prompt] = {}
        self._start, self._again = target.tokens("", first=True), target.tokens("\n")

    def listing(self, length: int) -> Listing:
        """A new list of at least `length` tokens, in random order; a word comes again when all have been used."""
        body, ends = [*self._start], list[int]()
        while len(body) < length or len(ends) <= self._cue:
            for word in self._rng.permutation(self._words):
                body += self._word(f" {word}")
                ends.append(len(body))
                if len(body) >= length and len(ends) > self._cue:
                    break
        return Listing(tuple(body), ends, self._again, self._cue)

    def _word(self, word: str) -> Prompt:
        if word not in self._known:
            self._known[word] = self._target.tokens(word)
        return self._known[word]
