"""The same turn at the beginning of a conversation and after others."""

from typing import Any

import pytest

from kvprobe.studies.routing.beginnings import beginnings
from kvprobe.text.turns import Turns
from kvprobe.training.steps import Steps
from tests.models import tiny_tokenizer
from tests.refusals import refused

EARLIER = [("how is it", "it is cold"), ("and the sea", "well")]


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), Steps(shape="moe", corpus="plain").tokenizer()])
def test_all_that_a_turn_stands_after_ends_where_it_begins(tokenizer: Any):
    turns = Turns(tokenizer, "tiny")
    earlier = EARLIER if turns.tokenizer.unk_token_id is None else [("a 3", "a 7"), ("a 3 b 4", "b")]
    text = "the code" if turns.tokenizer.unk_token_id is None else "c 1"
    begun = beginnings(turns, text, earlier)
    place = max(map(len, begun.earlier))
    assert begun.turn.positions == tuple(range(place, place + len(begun.turn)))
    for before, exchange in zip(begun.earlier, earlier, strict=True):
        assert before.following == place
        whole = turns.transcript(*exchange, text).tokens(tokenizer)
        assert before.ids + begun.turn.ids == whole.ids
    alone = turns.transcript(text).tokens(tokenizer)
    assert begun.opening.ids + begun.turn.ids == alone.ids
    assert not begun.opening or begun.opening.following == place


def test_a_template_that_writes_a_first_turn_otherwise_is_refused():
    template = (
        "{% for message in messages %}{{ 'first: ' if loop.first else 'then: ' }}{{ message['content'] }}\n{% endfor %}"
    )
    turns = Turns(tiny_tokenizer(template), "tiny")
    refused(lambda: beginnings(turns, "the code", EARLIER), "writes a question differently")
