"""The check of refusals catches what it is for."""

import re

import pytest

from kvprobe.errors import UserError
from tests.refusals import LONGEST, refused


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "message",
    [
        "words without a full stop",
        "words on two\nlines.",
        "words. More.",
        "words..",
        "words" * LONGEST + ".",
        "",
        "others.",
    ],
)
def test_a_message_that_is_not_one_sentence_with_the_words_fails(message: str):
    with pytest.raises(AssertionError):
        refused(lambda: raising(UserError(message)), "words")


def test_another_exception_none_and_no_words_fail():
    with pytest.raises(KeyError):
        refused(lambda: raising(KeyError("words.")), "words")
    with pytest.raises(pytest.fail.Exception):
        refused(lambda: None, "words")
    for words in [(), ("",), (re.compile("^is"),)]:
        with pytest.raises(AssertionError):
            refused(lambda: raising(UserError("It is so (a. B.).")), *words)
    assert refused(lambda: raising(UserError("It is so (a. B.).")), "is", re.compile("^It")) == "It is so (a. B.)."
