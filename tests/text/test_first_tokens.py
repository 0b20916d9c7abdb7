"""First tokens of words, by which a choice is read."""

from typing import Any

import pytest

from kvprobe.errors import UserError
from kvprobe.text.first_tokens import first_tokens


def letters(text: str, **_: Any) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


def test_words_that_begin_alike_are_refused_and_a_word_that_comes_twice_is_not():
    tokenizer: Any = letters
    assert first_tokens(tokenizer, ["red", "blue", "red"]) == [ord("r"), ord("b"), ord("r")]
    with pytest.raises(UserError, match="'blue' and 'brown' begin with the same token"):
        first_tokens(tokenizer, ["red", "blue", "brown"])
