"""Memos: the answer by the text alone, splits that share no pair, and a swap that touches nothing but the block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.tasks.ordinal import ASKED, COLOURS, ITEMS, PLACES, SEGMENTS, VERBS, Memo, draw, is_held_out, vocabulary
from tests.refusals import refused

SPLITS = ("train", "held_out")
splits = st.sampled_from(SPLITS)
seeds = st.integers(0, 2**32)
THINGS = tuple(zip(COLOURS, ITEMS, strict=False))[: len(PLACES)]


def drawn(split: str, seed: int) -> Memo:
    return draw(split, np.random.default_rng(seed))  # pyright: ignore[reportArgumentType]


@given(split=splits, seed=seeds)
def test_the_answer_follows_from_the_text(split: str, seed: int):
    memo = drawn(split, seed)
    _, block, summary, question = (text.split() for text in memo.texts())
    (place,) = (PLACES.index(word) for word in summary if word in PLACES)
    thing = block[2 * place : 2 * place + 2]
    assert memo.answer == thing["item" in question]


@given(split=splits, seed=seeds)
def test_only_the_block_says_what_the_things_are(split: str, seed: int):
    texts = dict(zip(SEGMENTS, drawn(split, seed).texts(), strict=True))
    said = {name: {*COLOURS, *ITEMS}.intersection(text.split()) for name, text in texts.items()}
    assert said.pop("block") == {word for thing in drawn(split, seed).things for word in thing}
    assert not any(said.values())


@given(split=splits, seed=seeds)
def test_splits_share_no_pair_of_colour_and_item(split: str, seed: int):
    assert {is_held_out(*thing) for thing in drawn(split, seed).things} == {split == "held_out"}


@given(split=splits, seed=seeds)
def test_no_colour_and_no_item_comes_twice(split: str, seed: int):
    memo = drawn(split, seed)
    assert len({word for thing in memo.things for word in thing}) == 2 * len(PLACES)


def test_each_colour_and_each_item_is_in_both_splits():
    for held in (False, True):
        pairs = [(colour, item) for colour in COLOURS for item in ITEMS if is_held_out(colour, item) == held]
        assert {colour for colour, _ in pairs} == set(COLOURS)
        assert {item for _, item in pairs} == set(ITEMS)


@given(split=splits, seed=seeds, step=st.integers(1, len(PLACES) - 1))
def test_a_swap_exchanges_two_things_of_the_block_and_nothing_else(split: str, seed: int, step: int):
    memo = drawn(split, seed)
    other = (memo.place + step) % len(PLACES)
    swapped = memo.swapped(other)
    changed = [name for name, a, b in zip(SEGMENTS, memo.texts(), swapped.texts(), strict=True) if a != b]
    moved = [place for place in range(len(PLACES)) if memo.things[place] != swapped.things[place]]
    assert changed == ["block"]
    assert moved == sorted((memo.place, other))
    assert swapped.things[memo.place] == memo.things[other]
    assert swapped.answer != memo.answer
    assert swapped.swapped(other) == memo


@pytest.mark.parametrize("split", SPLITS)
def test_every_place_reference_and_question_is_drawn_about_equally_often(split: str):
    rng = np.random.default_rng(0)
    memos = [draw(split, rng) for _ in range(1200)]  # pyright: ignore[reportArgumentType]
    for drawn, kinds in (
        ([memo.place for memo in memos], len(PLACES)),
        ([memo.reference for memo in memos], len(VERBS)),
        ([memo.asked for memo in memos], len(ASKED)),
    ):
        counts = np.unique(np.array(drawn), return_counts=True)[1]
        # Five standard deviations of a fair draw.
        assert len(counts) == kinds
        assert np.abs(counts - 1200 / kinds).max() < 5 * (1200 / kinds * (1 - 1 / kinds)) ** 0.5


def test_a_memo_depends_on_the_seed_alone():
    assert drawn("train", 3) == drawn("train", 3)
    assert drawn("train", 3) != drawn("train", 4)


def test_no_word_has_two_numbers():
    assert len(set(vocabulary())) == len(vocabulary())


@pytest.mark.usefixtures("unchecked")
def test_an_inconsistent_memo_is_refused():
    refused(lambda: Memo(THINGS, 0, "value"), "reference called 'value'")
    refused(lambda: Memo(THINGS, 0, asked="price"), "question called 'price'")
    refused(lambda: Memo(THINGS, 6), "names place 6")
    refused(lambda: Memo(THINGS[:2], 0), "lists 2")


@pytest.mark.parametrize("other", [1, -1, 6])
def test_a_swap_with_itself_or_beyond_the_list_is_refused(other: int):
    refused(lambda: Memo(THINGS, 1).swapped(other), f"Place {other} cannot")
