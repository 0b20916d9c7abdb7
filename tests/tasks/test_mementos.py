"""Mementos: what a trace states where, and what its text says of a hidden digit."""

from collections import Counter
from itertools import product
from typing import get_args

import numpy as np
import pytest
from scipy.stats import chisquare

from kvprobe.tasks.mementos import (
    BASE,
    DIGITS,
    MOST,
    PLACES,
    Content,
    Trace,
    accuracy_given_sum,
    bayes_accuracy,
    block_name,
    draw_alike,
    draw_changed,
    draw_trace,
    expected_digits,
    hidden_blocks,
    memento_name,
    posterior,
    visible_accuracy,
    vocabulary,
)
from tests.refusals import refused

TRACE = Trace(((3, 7, 1, 9, 2), (5, 0, 0, 8, 4)))
PUBLISHED = {15: 13.30, 20: 12.84, 25: 12.54, 30: 12.31, 35: 12.13, 40: 11.99, 45: 11.88, 50: 11.78}
"""Percent of best guesses of one digit that are right, given the sum of so many."""


def test_the_example_of_the_module_by_hand():
    assert TRACE.mementos == (0, 22, 39)
    assert " ".join(TRACE.words()) == "<bos> = 0 0 0 3 7 1 9 2 = 0 2 2 5 0 0 8 4 = 0 3 9"
    assert TRACE.conversation().segments == ("memento 0", "block 1", "memento 1", "block 2", "memento 2")


@pytest.mark.parametrize("content", ["sum", "copy"])
def test_every_digit_is_in_its_place(content: Content):
    trace = draw_trace(np.random.default_rng(3), content)
    messages = {name: text.split() for _, name, text in trace.messages()}
    assert set(trace.words()) <= set(vocabulary())
    assert len(trace.words()) == 1 + (1 + PLACES) + 10 * (DIGITS + 1 + PLACES) == 95
    for number, block in enumerate(trace.blocks, 1):
        assert messages[block_name(number)] == [*map(str, block)]
        stated = int("".join(messages[memento_name(number)]))
        assert stated == (sum(map(sum, trace.blocks[:number])) if content == "sum" else trace.start)


def test_draws_are_uniform_and_follow_their_seed():
    traces = [draw_trace(np.random.default_rng([7, number]), "copy") for number in range(300)]
    assert traces[5] == draw_trace(np.random.default_rng([7, 5]), "copy")
    counts = np.bincount([digit for trace in traces for block in trace.blocks for digit in block], minlength=BASE)
    assert np.abs(counts / counts.sum() - 0.1).max() < 0.02
    assert len({trace.start for trace in traces}) > 200
    assert draw_trace(np.random.default_rng(0)).start == 0


def test_a_block_is_hidden_once_its_memento_is_written_or_some_blocks_later():
    assert [*hidden_blocks(1)] == []
    assert [*hidden_blocks(4)] == [1, 2, 3]
    assert [*hidden_blocks(4, keep=1)] == [1, 2]
    assert [*hidden_blocks(2, keep=5)] == []


def test_no_other_traces_are_made():
    block = (1, 2, 3, 4, 5)
    refused(lambda: Trace(()), f"1 to {MOST} blocks")
    refused(lambda: Trace((block,) * (MOST + 1)), f"1 to {MOST} blocks")
    refused(lambda: Trace((block[:4],)), "5 digits", "[4]")
    refused(lambda: Trace(((1, 2, 3, 4, 10),)), "0 to 9")
    refused(lambda: Trace((block,), start=7), "sums start from 0")
    refused(lambda: Trace((block,), "copy", start=1000), "999")
    assert max(Trace(((9,) * DIGITS,) * MOST).mementos) < BASE**PLACES


def test_an_unknown_content_is_refused(unchecked: None):
    refused(lambda: Trace(((1, 2, 3, 4, 5),), "sums"), "'sum'")  # pyright: ignore[reportArgumentType]


# ---- what text says


@pytest.mark.parametrize(("count", "percent"), PUBLISHED.items())
def test_the_accuracy_given_one_sum_is_as_published(count: int, percent: float):
    assert 100 * accuracy_given_sum(count) == pytest.approx(percent, abs=0.005)
    number = count // DIGITS
    assert bayes_accuracy(number, [number]) == accuracy_given_sum(count)
    assert bayes_accuracy(1, [number]) == accuracy_given_sum(count)


def test_between_two_neighbouring_sums_it_is_that_of_five_digits_however_far_away_they_are_read():
    assert 100 * accuracy_given_sum(DIGITS) == pytest.approx(16.03, abs=0.005)
    for block in range(1, 9):
        for distance in (0, 1, 5):
            assert bayes_accuracy(block, range(block + distance + 1)) == accuracy_given_sum(DIGITS)
        assert bayes_accuracy(block, [block - 1, block]) == accuracy_given_sum(DIGITS)


def test_without_a_later_sum_a_digit_is_uniform_and_in_view_it_is_known():
    assert bayes_accuracy(3, [0, 1, 2]) == 0.1
    assert bayes_accuracy(3, []) == 0.1
    assert bayes_accuracy(3, [0, 1, 2], [3]) == 1


def test_blocks_in_view_are_taken_out_of_a_sum():
    assert bayes_accuracy(3, [2, 4], [4]) == accuracy_given_sum(5)
    assert bayes_accuracy(3, [2, 5], [4]) == accuracy_given_sum(10)
    assert bayes_accuracy(3, [2, 5], [1, 6]) == accuracy_given_sum(15)
    assert bayes_accuracy(3, [4]) == accuracy_given_sum(20)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_posteriors_count_all_digits_that_have_the_sum(count: int):
    combinations = [*product(range(BASE), repeat=count)]
    right = 0.0
    for total in range(9 * count + 1):
        first = [digits[0] for digits in combinations if sum(digits) == total]
        shares = np.bincount(first, minlength=BASE) / len(first)
        np.testing.assert_allclose(posterior(total, count), shares, atol=1e-15)
        right += shares.max() * len(first) / len(combinations)
    assert accuracy_given_sum(count) == pytest.approx(right, abs=1e-12)


def test_the_best_guess_on_drawn_traces_is_right_as_often():
    rng = np.random.default_rng(1)
    right = []
    for _ in range(4000):
        trace = draw_trace(rng, blocks=3)
        guess = int(posterior(trace.mementos[3] - trace.mementos[1], 2 * DIGITS).argmax())
        right += [guess == digit for digit in trace.blocks[1]]
    assert np.mean(right) == pytest.approx(bayes_accuracy(2, [1, 3]), abs=4 * np.std(right) / len(right) ** 0.5)


def test_what_does_not_exist_says_nothing():
    refused(lambda: bayes_accuracy(0, [1]), "no block 0", f"1 to {MOST}")
    refused(lambda: bayes_accuracy(1, [MOST + 1]), f"no memento {MOST + 1}")
    refused(lambda: bayes_accuracy(1, [1], [0]), "no block 0")
    refused(lambda: posterior(46, 5), "46", "0 to 45")
    refused(lambda: posterior(0, 0), "0 digits")


# Other digits of the same text


def test_other_digits_fit_the_text():
    rng = np.random.default_rng(0)
    for content in get_args(Content):
        for _ in range(20):
            trace = draw_trace(rng, content)
            alike = draw_alike(trace, rng)
            assert alike.mementos == trace.mementos
            assert alike.blocks != trace.blocks


def test_other_digits_are_uniform_among_those_that_fit():
    rng = np.random.default_rng(0)
    trace = Trace(((0, 0, 0, 1, 1), (9, 9, 9, 9, 9)))
    drawn = [draw_alike(trace, rng).blocks for _ in range(3000)]
    counts = Counter(block for block, _ in drawn)
    assert len(counts) == len(ways_of(2)) == 15
    assert chisquare([*counts.values()]).pvalue > 1e-3
    assert {last for _, last in drawn} == {(9, 9, 9, 9, 9)}


def ways_of(total: int) -> list[tuple[int, ...]]:
    return [block for block in product(range(total + 1), repeat=5) if sum(block) == total]


def test_a_changed_block_fits_the_text_or_does_not():
    for trace, changed in (draw_changed(np.random.default_rng(seed), 2, "sum", 4) for seed in range(20)):
        assert set(changed) == {"digits", "sum"}
        assert changed["digits"].mementos == trace.mementos
        assert changed["sum"].mementos != trace.mementos
        for other in changed.values():
            assert [one != two for one, two in zip(other.blocks, trace.blocks, strict=True)] == [0, 1, 0, 0]
    assert set(draw_changed(np.random.default_rng(0), 2, "copy", 4)[1]) == {"digits"}


@pytest.mark.parametrize("content", get_args(Content))
def test_what_is_expected_of_digits_is_what_the_text_says(content: Content):
    expected = expected_digits([draw_trace(np.random.default_rng(0), content), Trace(((9,) * 5,), content)], 1)
    assert expected.shape == (2, DIGITS * BASE)
    one = np.zeros(BASE) + 0.1 * (content == "copy")
    one[9] = 1.0 if content == "sum" else 0.1
    np.testing.assert_allclose(expected[1], np.tile(one, DIGITS))


@pytest.mark.parametrize(
    ("content", "number", "keep", "share"),
    [
        ("sum", 3, 0, 0.1603),
        ("sum", 9, 0, 0.1603),
        ("sum", 2, 0, 1.0),
        ("sum", 1, 0, 0.1),
        ("sum", 3, 1, 1.0),
        ("sum", 4, 1, 0.1603),
        ("copy", 3, 0, 0.1),
        ("copy", 2, 0, 1.0),
    ],
)
def test_what_a_memento_sees_is_counted_as_in_view(content: Content, number: int, keep: int, share: float):
    assert visible_accuracy(content, 2, number, keep) == pytest.approx(share, abs=1e-4)
