"""How reports write numbers."""

from collections.abc import Callable
from math import isnan

from kvprobe.stats import FEWEST, Estimate


def percent(value: Estimate) -> str:
    return _written(value, ".1f", 100, " %")


def points(value: Estimate) -> str:
    return _written(value, "+.1f", 100, " points")


def plain(value: Estimate, digits: int = 2) -> str:
    return _written(value, f".{digits}f")


def two_digits(value: Estimate) -> str:
    """For numbers that span many orders of magnitude."""
    return _written(value, ".2g")


def signed(value: Estimate, digits: int = 3) -> str:
    return _written(value, f"+.{digits}f")


def times(value: Estimate) -> str:
    """The factor of which this is the logarithm."""
    return two_digits(value.exponential)


def formatted(form: str) -> Callable[[Estimate], str]:
    """How a number is written with its interval, all in this format."""
    return lambda value: _written(value, form)


def share(value: Estimate) -> str:
    """A share that has no interval."""
    return f"{100 * value.mean:.3g} %"


def count(value: Estimate) -> str:
    return f"{value.mean:,.0f}"


def number(value: float, form: str) -> str:
    """A number in this format; one that rounds to zero has no sign."""
    text = format(value, form)
    return text.lstrip("+-") if text.lstrip("+-").strip("0.") == "" else text


def _written(value: Estimate, form: str, times: int = 1, unit: str = "") -> str:
    """The number and its interval, in as many more digits as it takes to tell the ends apart, and from zero."""
    if value.unknown:
        return "undefined"
    low, high, zero = (number(times * end, form) for end in (value.low, value.high, 0.0))
    digits = int(form[-2])
    if value.high > value.low and (low == high or (value.differs() and zero in (low, high))) and digits < 9:
        return _written(value, f"{form[:-2]}{digits + 1}{form[-1]}", times, unit)
    return f"{number(times * value.mean, form)}{unit} ({span(value, lambda end: number(times * end, form))})"


def span(value: Estimate, written: Callable[[float], str]) -> str:
    """The interval; with too few clusters for one, their range, whose reason `few_clusters` gives once."""
    if value.has_interval:
        low, high = written(value.low), written(value.high)
        return "no spread" if low == high else f"{low} to {high}"
    if isnan(value.smallest):
        return "no interval"
    return f"range {written(value.smallest)} to {written(value.largest)}"


def verdict(
    value: Estimate, above: str, below: str, neither: str, against: float = 0.0, *, negligible: float = 0.0
) -> str:
    """One of three phrases, by the side of a value on which the interval lies; without an interval, `neither`.

    Args:
        negligible: by how much the whole interval must lie beyond the value.
    """
    return above if value.above(against + negligible) else below if value.below(against - negligible) else neither


def few_clusters(count: int, of: str) -> list[str]:
    """A report's warning where there are too few clusters for an interval or a claim; none where there are enough."""
    few = (
        f"{count} {of} are too few to tell: an interval takes {FEWEST}. Ranges over {of} are given instead, and "
        f"nothing is claimed."
    )
    return [few] if count < FEWEST else []
