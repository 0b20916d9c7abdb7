"""How reports write numbers."""

import dataclasses
from collections.abc import Callable, Mapping
from math import isnan, nan
from typing import Any

from kvprobe.stats import FEWEST, Estimate


def estimate_of(values: Mapping[str, Any]) -> Estimate:
    """An estimate as `metrics.json` holds it, whatever stands beside its numbers."""
    known = {field.name: values[field.name] for field in dataclasses.fields(Estimate) if field.name in values}
    missing: Any = nan
    return Estimate(**{name: missing if value is None else value for name, value in known.items()})


def percent(value: Estimate) -> str:
    return f"{100 * value.mean:.1f} % ({span(value, lambda share: f'{100 * share:.1f}')})"


def points(value: Estimate) -> str:
    return f"{100 * value.mean:+.1f} points ({span(value, lambda share: f'{100 * share:+.1f}')})"


def plain(value: Estimate, digits: int = 2) -> str:
    return f"{value.mean:.{digits}f} ({span(value, lambda number: f'{number:.{digits}f}')})"


def signed(value: Estimate, digits: int = 3) -> str:
    return f"{value.mean:+.{digits}f} ({span(value, lambda number: f'{number:+.{digits}f}')})"


def span(value: Estimate, written: Callable[[float], str]) -> str:
    """The interval; with too few clusters for one, the range of their values, and why."""
    if value.has_interval:
        return f"{written(value.low)} to {written(value.high)}"
    if isnan(value.smallest):
        return "no interval"
    return f"range {written(value.smallest)} to {written(value.largest)} over {value.clusters}; too few for an interval"


def ends(values: Mapping[str, Any]) -> tuple[float, float]:
    """What a figure draws about a number of `metrics.json`: its interval, or the range where there is none."""
    return estimate_of(values).ends


def whiskers(values: Mapping[str, Any]) -> list[list[float]]:
    """How far `ends` are below and above the number, as error bars take it."""
    low, high = ends(values)
    return [[values["mean"] - low], [high - values["mean"]]]


def verdict(value: Estimate, above: str, below: str, neither: str) -> str:
    """What is said of a number by the side of zero on which its interval lies; without an interval, `neither`."""
    return above if value.above() else below if value.below() else neither


def few_clusters(count: int, of: str) -> str | None:
    """What a report says where there are too few clusters for an interval, and so for a claim; None where there are enough."""
    if count >= FEWEST:
        return None
    return (
        f"{count} {of} are too few for an interval, which takes {FEWEST}. Ranges over {of} are given instead, and nothing is "
        f"claimed."
    )
