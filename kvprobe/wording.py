"""How reports write numbers."""

from collections.abc import Callable
from math import isnan

from kvprobe.stats import FEWEST, Estimate


def percent(value: Estimate) -> str:
    return f"{number(100 * value.mean, '.1f')} % ({span(value, lambda share: number(100 * share, '.1f'))})"


def points(value: Estimate) -> str:
    return f"{number(100 * value.mean, '+.1f')} points ({span(value, lambda share: number(100 * share, '+.1f'))})"


def plain(value: Estimate, digits: int = 2) -> str:
    return formatted(f".{digits}f")(value)


def two_digits(value: Estimate) -> str:
    """For numbers that span many orders of magnitude."""
    return formatted(".2g")(value)


def signed(value: Estimate, digits: int = 3) -> str:
    return formatted(f"+.{digits}f")(value)


def formatted(form: str) -> Callable[[Estimate], str]:
    """How a number is written with its interval, all in this format."""
    return lambda value: f"{number(value.mean, form)} ({span(value, lambda end: number(end, form))})"


def share(value: Estimate) -> str:
    """A share that has no interval."""
    return f"{100 * value.mean:.3g} %"


def count(value: Estimate) -> str:
    return f"{value.mean:,.0f}"


def number(value: float, form: str) -> str:
    """A number in this format; one that rounds to zero has no sign."""
    text = format(value, form)
    return text.lstrip("+-") if text.lstrip("+-").strip("0.") == "" else text


def span(value: Estimate, written: Callable[[float], str]) -> str:
    """The interval, unless its ends are written alike; with too few clusters for one, their range and the reason."""
    if value.has_interval:
        low, high = written(value.low), written(value.high)
        return "no spread" if low == high else f"{low} to {high}"
    if isnan(value.smallest):
        return "no interval"
    return f"range {written(value.smallest)} to {written(value.largest)} over {value.clusters}; too few for an interval"


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
        f"{count} {of} are too few for an interval, which takes {FEWEST}. Ranges over {of} are given instead, and "
        f"nothing is claimed."
    )
    return [few] if count < FEWEST else []
