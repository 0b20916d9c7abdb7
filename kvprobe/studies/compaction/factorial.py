"""Effects of a factorial design: how far an outcome depends on each of several factors, and on their combinations."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod

JOINED = " × "


def effects_of(factors: Sequence[str]) -> tuple[str, ...]:
    """The names of all effects: main effects, then interactions of two factors, of three …"""
    sizes = range(1, len(factors) + 1)
    return tuple(JOINED.join(chosen) for size in sizes for chosen in combinations(factors, size))


def contrast(effect: str, high: Mapping[str, bool]) -> int:
    """What the outcome of a cell of a full factorial design is multiplied by, for its mean over cells to be an effect.

    For one factor, the effect is the mean of the cells at its high level less that of the others; for several, half the
    change of that difference from the low to the high level of each other.

    Args:
        high: by factor, whether the cell is at its high level.
    """
    return 2 * prod(1 if high[factor] else -1 for factor in effect.split(JOINED))
