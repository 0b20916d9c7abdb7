"""Mementos: blocks of random digits, each hidden once a memento of three digits has been written after it.

    = 0 0 0                    memento 0, given
    3 7 1 9 2 = 0 2 2          block 1, memento 1
    5 0 0 8 4 = 0 3 9          block 2, memento 2
    …

This is the toy of "Memento" (arXiv 2604.09852), whose mementos are cumulative sums. So part of what can be read of a
hidden digit is in the text: with two neighbouring sums in view, the five digits between them are no longer uniform.
`bayes_accuracy` is how often the best guess from text alone is right. Where mementos are copies of memento 0, which is
random, the text holds nothing about any digit.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from kvprobe.arguments import check_fields
from kvprobe.errors import UserError
from kvprobe.text.transcript import Transcript

Content = Literal["sum", "copy"]
"""What a memento states: the sum of all digits up to there, or memento 0 again."""

Change = Literal["digits", "sum"]
"""What is changed of a block: its digits, to others that the text fits as well, or their sum, which the text denies."""

BASE = 10
DIGITS = 5
"""Of a block."""
PLACES = 3
"""Digits of a memento."""
BLOCKS = 10
"""Of a trace of the published toy."""
MOST = (BASE**PLACES - 1) // ((BASE - 1) * DIGITS)
"""Blocks whose sum always fits into a memento."""
WRITE = "="
"""Comes before each memento."""


@dataclass(frozen=True)
class Trace:
    """Blocks of digits and the mementos after them.

    Attributes:
        blocks: the digits of block 1, 2, ….
        start: what memento 0 states.
    """

    blocks: tuple[tuple[int, ...], ...]
    content: Content = "sum"
    start: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= len(self.blocks) <= MOST or any(len(block) != DIGITS for block in self.blocks):
            raise UserError(
                f"A trace has 1 to {MOST} blocks of {DIGITS} digits; got blocks of {[*map(len, self.blocks)]}."
            )
        if any(not 0 <= digit < BASE for block in self.blocks for digit in block):
            raise UserError("A block holds something else than digits; give whole numbers from 0 to 9.")
        if not 0 <= self.start < BASE**PLACES or (self.start and self.content == "sum"):
            raise UserError(f"Memento 0 cannot state {self.start}; sums start from 0, copies from any of 0 to 999.")

    @property
    def mementos(self) -> tuple[int, ...]:
        """What memento 0, 1, … states."""
        if self.content == "copy":
            return (self.start,) * (1 + len(self.blocks))
        return tuple(np.cumsum([0, *map(sum, self.blocks)]).tolist())

    def messages(self) -> Iterator[tuple[str, str, str]]:
        """Role, segment and text of each block and memento, in order."""
        for number, memento in enumerate(self.mementos):
            if number:
                yield "block", block_name(number), " ".join(map(str, self.blocks[number - 1]))
            yield "memento", memento_name(number), " ".join(f"{memento:0{PLACES}}")

    def conversation(self) -> Transcript:
        """The trace as a transcript, each block and each memento a segment; see `block_name`, `memento_name`."""
        roles, names, texts = zip(*self.messages(), strict=True)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        return Transcript.from_messages(messages, names)

    def words(self) -> tuple[str, ...]:
        """The words of the whole trace, from the start token on, as a model of `vocabulary` reads them."""
        texts = (text if role == "block" else f"{WRITE} {text}" for role, _, text in self.messages())
        return ("<bos>", *" ".join(texts).split())


def block_name(number: int) -> str:
    """The segment of block 1, 2, …."""
    return f"block {number}"


def memento_name(number: int) -> str:
    """The segment of memento 0, 1, …: the sign before it and its digits."""
    return f"memento {number}"


def hidden_blocks(number: int, keep: int = 0) -> range:
    """The blocks that are hidden while block `number` and its memento are read.

    Args:
        keep: how many blocks before that one stay in view (keep-n).
    """
    return range(1, number - keep)


def draw_trace(rng: np.random.Generator, content: Content = "sum", blocks: int = BLOCKS) -> Trace:
    """A random trace: all digits are independent and uniform, and so is memento 0 of copies."""
    digits = rng.integers(BASE, size=(blocks, DIGITS)).tolist()
    start = int(rng.integers(BASE**PLACES)) if content == "copy" else 0
    return Trace(tuple(map(tuple, digits)), content, start)


def draw_alike(trace: Trace, rng: np.random.Generator) -> Trace:
    """A trace of the same text but for its blocks, whose digits are uniform among those that fit the mementos."""
    if trace.content == "copy":
        blocks = rng.integers(BASE, size=(len(trace.blocks), DIGITS))
    else:
        digits, ends = _by_sum()
        totals = np.array([sum(block) for block in trace.blocks])
        blocks = digits[rng.integers(ends[totals], ends[totals + 1])]
    return replace(trace, blocks=tuple(map(tuple, blocks.tolist())))


def draw_changed(
    rng: np.random.Generator, block: int, content: Content = "sum", blocks: int = BLOCKS
) -> tuple[Trace, Mapping[Change, Trace]]:
    """A random trace, and the same with other digits in one block, by kind of change."""
    while True:
        trace, other = (draw_trace(rng, content, blocks) for _ in range(2))
        alike = with_block(trace, block, draw_alike(trace, rng).blocks[block - 1])
        other = with_block(trace, block, other.blocks[block - 1])
        # A block of zeros, or of nines, has no others that fit the text.
        if alike != trace and (content == "copy" or other.mementos != trace.mementos):
            changed: dict[Change, Trace] = {"digits": alike}
            if content == "sum":
                changed["sum"] = other
            return trace, changed


def with_block(trace: Trace, number: int, digits: tuple[int, ...]) -> Trace:
    """The trace with other digits in one block; sums are those of the new digits."""
    return replace(trace, blocks=(*trace.blocks[: number - 1], digits, *trace.blocks[number:]))


@cache
def _by_sum() -> tuple[Int[np.ndarray, "all digits"], Int[np.ndarray, "ends"]]:
    """The digits of all possible blocks, smallest sum first, and where those of each sum begin."""
    digits = np.stack(np.unravel_index(np.arange(BASE**DIGITS), (BASE,) * DIGITS), 1)
    totals = digits.sum(1)
    ends = np.searchsorted(np.sort(totals), np.arange((BASE - 1) * DIGITS + 2))
    return digits[np.argsort(totals, kind="stable")], ends


def vocabulary() -> tuple[str, ...]:
    """Every word of every trace, after the control tokens; a word's id is its index here."""
    return ("<unk>", "<bos>", "<eos>", WRITE, *map(str, range(BASE)))


# ---- what text says


def bayes_accuracy(block: int, mementos: Collection[int], blocks: Collection[int] = ()) -> float:
    """How often the best guess of one digit of a block is right, given text alone: these mementos, which state sums,
    and these blocks. All digits of a block are alike in this.

    Only the nearest sums in view on both sides count; what is hidden between them is as many digits of a known sum.
    Before block 1 the sum is known to be 0.

    Args:
        block: number of the block, from 1.
        mementos: numbers of the mementos in view.
        blocks: numbers of the blocks in view.

    Raises:
        UserError: there is no such block or memento.
    """
    for name, numbers, first in (("block", (block, *blocks), 1), ("memento", mementos, 0)):
        if wrong := [number for number in numbers if not first <= number <= MOST]:
            raise UserError(f"There is no {name} {wrong[0]}; they are numbered from {first} to {MOST}.")
    if block in blocks:
        return 1.0
    after = min((number for number in mementos if number >= block), default=None)
    if after is None:
        return 1 / BASE
    before = max((number for number in mementos if number < block), default=0)
    return accuracy_given_sum(DIGITS * sum(number not in blocks for number in range(before + 1, after + 1)))


def visible_accuracy(content: Content, block: int, number: int, keep: int = 0) -> float:
    """How often the best guess of a digit of a block is right, from all that is in view of memento `number`: the
    mementos up to it, its own block, and so many blocks (`keep`) before that."""
    seen = range(max(1, number - keep), number + 1)
    if content == "copy":
        return 1.0 if block in seen else 1 / BASE
    return bayes_accuracy(block, range(number + 1), seen)


def accuracy_given_sum(count: int) -> float:
    """How often the best guess of one of so many uniform digits is right, given their sum."""
    others, span = ways(count - 1), (BASE - 1) * count + 1
    return sum(max(others.get(total - digit, 0) for digit in range(BASE)) for total in range(span)) / BASE**count


def posterior(total: int, count: int) -> Float[np.ndarray, "digits"]:
    """The probability of each value of one of `count` uniform digits whose sum is `total`.

    Raises:
        UserError: they cannot have this sum.
    """
    others = ways(count - 1) if count > 0 else {}
    left = [others.get(total - digit, 0) for digit in range(BASE)]
    if not any(left):
        raise UserError(f"{count} digits cannot have the sum {total}; give 0 to {(BASE - 1) * max(0, count)}.")
    return np.array([number / sum(left) for number in left])


def expected_digits(traces: Sequence[Trace], block: int) -> Float[np.ndarray, "traces places_and_values"]:
    """The probability of each value of each digit of a block, given what the text states: the sum of its digits, or
    nothing in a trace of copies."""
    if traces[0].content == "copy":
        return np.full((len(traces), DIGITS * BASE), 1 / BASE)
    return np.tile([posterior(sum(trace.blocks[block - 1]), DIGITS) for trace in traces], DIGITS)


@cache
def ways(count: int) -> Mapping[int, int]:
    """In how many ways so many digits have each sum that they can have."""
    if count == 0:
        return {0: 1}
    fewer = ways(count - 1)
    return {total: sum(fewer.get(total - digit, 0) for digit in range(BASE)) for total in range((BASE - 1) * count + 1)}
