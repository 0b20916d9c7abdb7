"""Turns taken back, and caches that follow one another."""

from dataclasses import replace

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.fingerprint import Maker
from kvprobe.inference.model import Model
from kvprobe.policies import Quantise
from kvprobe.text.tokens import Tokens
from tests.models import WINDOW
from tests.random_caches import assert_bit_identical, assert_close, assert_same_ledger, random_cache, random_tokens
from tests.refusals import refused

SPANS = {"system": 3, "T1": WINDOW + 2, "T2": WINDOW}
ASKED = Tokens.of([5, 6, 7], "next")


def asked_after(model: Model, cache: KVCache) -> torch.Tensor:
    return model.extend(cache, ASKED.shifted(int(cache.ledger.following[0])), logits=3)[1]


@pytest.mark.parametrize(
    "place", [{"segment": "T2"}, {"slots": 3 + WINDOW + 2}, {"slots": -WINDOW}, {"position": 3 + WINDOW + 2}]
)
def test_a_turn_taken_back_was_never_read(tiny: Model, place: dict[str, int | str]):
    tokens = random_tokens(0, SPANS)
    back = tiny.prefill(tokens).rewind(**place)
    before = tiny.prefill(tokens[: tokens.span("T2").start])
    assert back.ledger.following.tolist() == before.ledger.following.tolist()
    assert_close(asked_after(tiny, back), asked_after(tiny, before), 1e-4)


def test_going_back_over_rows_of_unequal_length_is_going_back_in_each():
    short, long = random_cache(0, batch=1, slots=5), random_cache(1, batch=1, slots=8)
    rows = KVCache.join([short, long]).rewind(slots=-2)
    assert_same_ledger(rows.rows([1]).ledger, long.rewind(slots=-2).ledger)
    assert rows.ledger.following.tolist() == [3, 6]
    assert rows.rows([0]).ledger.live.sum() == 3


@pytest.mark.parametrize("edit", ["mask", "evict"])
def test_after_a_gap_closed_up_a_turn_taken_back_leaves_its_place(edit: str):
    cache = getattr(random_cache(2, batch=1), edit)("T1").reindex()
    assert cache.rewind("T2").ledger.following.tolist() == [4]
    assert cache.rewind("summary").ledger.following.tolist() == [2]


def test_after_a_gap_that_stays_the_next_token_stands_where_the_turn_began():
    cache = random_cache(3, batch=1, gaps=True)
    begins = int(cache.ledger.positions[0, 6])
    for edited in (cache, cache.evict("T1"), cache.mask("T2"), cache.mask("summary")):
        assert edited.rewind("T2").ledger.following.tolist() == [begins]
    gone = cache.evict("T2")
    assert gone.ledger.following.tolist() == cache.ledger.following.tolist()
    assert gone.rewind(position=begins).ledger.following.tolist() == [begins]
    assert gone.select("system").rewind(position=begins).ledger.following.tolist() == [begins]


def test_going_back_to_the_start_reads_as_from_nothing(tiny_llama: Model):
    empty = tiny_llama.prefill(random_tokens(0, SPANS)).rewind(slots=0)
    assert empty.ledger.following.tolist() == [0]
    assert_close(asked_after(tiny_llama, empty), tiny_llama.extend(None, ASKED, logits=3)[1])


def test_going_back_to_where_the_cache_is_changes_nothing():
    cache = random_cache(4, batch=1, gaps=True)
    assert_bit_identical(cache.rewind(slots=8), cache)


@pytest.mark.usefixtures("unchecked")
def test_a_place_that_a_row_does_not_have_is_refused():
    cache = random_cache(5, batch=1)
    refused(lambda: cache.rewind(), "only one of them")
    refused(lambda: cache.rewind("T1", slots=3), "only one of them")
    refused(lambda: cache.rewind("T9"), "no segment called")
    refused(lambda: cache.evict("T2").rewind("T2"), "cannot go back to 'T2'")
    refused(lambda: cache.rewind(slots=9), "cannot go back to 9")
    refused(lambda: cache.rewind(slots=-9), "cannot go back to -9")
    refused(lambda: cache.rewind(position=12), "cannot go back to 12")
    refused(lambda: cache.rewind(slots=1.5), "whole number")  # pyright: ignore[reportArgumentType]


def test_a_cache_read_by_itself_follows_another_as_its_slots_alone(tiny: Model):
    tokens = random_tokens(0, SPANS)
    first, second = tokens[: tokens.span("T2").start], tokens[tokens.span("T2")]
    joined = tiny.prefill(first).append(tiny.prefill(second))
    assert joined.ledger.recomputed[0].tolist() == [False] * len(first) + [True] * len(second)
    assert joined.ledger.following.tolist() == [len(tokens)]
    for kept, gone in (("T2", ("system", "T1")), ("system", ("T1", "T2"))):
        alone = tiny.prefill(tokens[tokens.span(kept)])
        alone = replace(alone, ledger=replace(alone.ledger, following=joined.ledger.following))
        assert_close(asked_after(tiny, joined.mask(*gone)), asked_after(tiny, alone), 1e-4)


def test_a_cache_that_still_owes_a_rotation_is_followed_exactly(tiny_llama: Model):
    tokens = random_tokens(0, SPANS)
    closed = tiny_llama.prefill(tokens).evict("T1").reindex()
    later = tiny_llama.prefill(ASKED.shifted(20))
    owed, carried = closed.append(later), tiny_llama.as_seen(closed).append(later)
    assert_close(asked_after(tiny_llama, owed), asked_after(tiny_llama, carried))


@pytest.mark.usefixtures("unchecked")
def test_caches_that_cannot_follow_one_another_are_refused(tiny_llama: Model):
    cache, later = random_cache(0), random_cache(1)
    moved = replace(later, ledger=replace(later.ledger, positions=later.ledger.positions + 8))
    assert cache.append(moved).slots == 16
    refused(lambda: cache.append(later), "Position 0 of row 0", "which end at 7")
    refused(lambda: cache.append(random_cache(1, batch=1)), "give as many rows")
    refused(lambda: cache.append(random_cache(1, dtype=torch.float16)), "float16")
    refused(lambda: cache.append(random_cache(1, n_layers=2)), "same model")
    refused(lambda: replace(cache, made_by=Maker("a")).append(replace(moved, made_by=Maker("b"))), "another model")
    refused(lambda: cache.append("T2"), "give a KVCache")  # pyright: ignore[reportArgumentType]
    read = tiny_llama.prefill(random_tokens(0, SPANS))
    rounded = tiny_llama.apply(Quantise(4, group=4, tail=0), tiny_llama.prefill(random_tokens(1, SPANS, 40)))
    refused(lambda: read.append(rounded), "quantise afterwards")
