"""That annotations of kvprobe are checked in tests: types, and sizes of axes that one call shares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from kvprobe.names import one_line
from kvprobe.stats import Estimate
from tests.checking import CALLS, checked, start_test

Square = Float[Tensor, "side side"]
ROW, LONGER, SQUARE = torch.zeros(2), torch.zeros(3), torch.zeros(2, 2)


@checked
def plain(count: int, *others: str, **named: float) -> list[str]:
    return [*others, "" if count else 0]  # type: ignore[list-item] - what is to be caught


@checked
def shaped(row: Float[Tensor, "side"], square: Square | None = None) -> Float[Tensor, "side"]:
    return row if square is None else row.repeat(2)


@checked
def drawn(row: Float[Tensor, "side"], square: Square) -> Iterator[int]:
    yield 0


@checked
@dataclass
class Holding:
    row: Float[Tensor, "side"]
    squares: tuple[Square, ...]


def inner(row: Any, *squares: Any, **named: Any) -> Any:
    @checked
    def within(row: Float[Tensor, "side"], *squares: Square, **named: int) -> Float[Tensor, "side"]:
        return row if row is ROW else row.repeat(2)

    return within(row, *squares, **named)


def test_what_fits_passes():
    plain(1, "a", "b", some=0.5)
    shaped(ROW)
    drawn(ROW, SQUARE)
    Holding(ROW, (SQUARE, SQUARE))
    inner(ROW, SQUARE, SQUARE, count=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: plain("1"),
        lambda: plain(1, "a", 2),
        lambda: plain(1, some="half"),
        lambda: plain(0),
        lambda: shaped(SQUARE),
        lambda: shaped(LONGER, SQUARE),
        lambda: shaped(ROW, SQUARE),
        lambda: drawn(LONGER, SQUARE),
        lambda: Holding(LONGER, (SQUARE,)),
        lambda: inner(LONGER, SQUARE),
        lambda: inner(ROW, SQUARE, torch.zeros(3, 3)),
        lambda: inner(ROW, count="1"),
        lambda: inner(ROW.clone()),
        lambda: one_line("no error"),
        lambda: Estimate("a half"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any]):
    with pytest.raises(TypeCheckError):
        call()


def test_nothing_is_checked_where_a_test_asks_for_that(unchecked: None):
    assert plain(0) == [0]
    assert len(shaped(ROW, SQUARE)) == 4
    assert len(inner(LONGER, SQUARE)) == 6


def test_the_first_calls_of_each_test_are_checked_and_then_every_doubling():
    for call in range(1, 4 * CALLS + 1):
        if call <= CALLS or call in (2 * CALLS, 4 * CALLS):
            with pytest.raises(TypeCheckError):
                plain(0)
        else:
            assert plain(0) == [0]
    start_test()
    with pytest.raises(TypeCheckError):
        plain(0)
