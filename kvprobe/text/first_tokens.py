"""The tokens with which words begin, by which a model's choice among them is read."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvprobe.errors import UserError


@runtime_checkable
class TextEncoder(Protocol):
    """What makes tokens of a text."""

    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Mapping[str, Sequence[int]]: ...


def first_tokens(tokenizer: TextEncoder, words: Sequence[str]) -> list[int]:
    """The first token of each word.

    Raises:
        UserError: two words begin with the same token, so that it does not tell which of them is chosen.
    """
    found = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words]
    for word, token in zip(words, found, strict=True):
        if (first := words[found.index(token)]) != word:
            raise UserError(
                f"With this tokenizer {first!r} and {word!r} begin with the same token, so it does not show which of "
                "them a model says; use another model."
            )
    return found
