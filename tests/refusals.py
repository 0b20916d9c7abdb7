"""How every refusal is tested: a `UserError` of one sentence that says these words."""

import re
from collections.abc import Callable

import pytest

from kvprobe.errors import UserError

LONGEST = 1200
"""Characters of a message, with a path in it, or the list of all known names."""

ASIDE = re.compile(r"\(.*\)")
"""What may hold a full stop: words of another library."""


def refused(call: Callable[[], object], *words: str | re.Pattern[str]) -> str:
    """The one sentence with which a call is refused, which holds all these words, or matches these patterns."""
    with pytest.raises(UserError, match=r"\A[^\n]*[^\s.][.?]\Z") as refusal:
        call()
    sentence = str(refusal.value)
    assert not re.search(r"[.!?] [A-Z]", ASIDE.sub("", sentence))
    assert len(sentence) <= LONGEST, len(sentence)
    assert words, "give the words that tell this refusal from another"
    for piece in words:
        assert piece, "an empty text is in every sentence"
        assert piece.search(sentence) if isinstance(piece, re.Pattern) else piece in sentence, sentence
    return sentence
