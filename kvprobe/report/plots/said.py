"""What a reader must know of a figure's panels: their letters, on how many clusters they rest, what intervals are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from string import ascii_lowercase
from textwrap import wrap
from typing import TYPE_CHECKING

from kvprobe.report.findings import Finding
from kvprobe.report.plots.figure import Labels
from kvprobe.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Shown = tuple["Axes", Sequence[Finding]]
"""A panel, and the findings that it shows."""


def say(figure: "Figure", panels: Sequence[Shown], labels: Labels, title: str, *more: str) -> None:
    """Letter the panels where there are several, and say above them what they rest on.

    Args:
        labels: also of the key `n`: what is counted, such as `{"n": "{} conversations".format}`.
        more: what else is to be said of the figure.
    """
    notes: dict[str, list[int]] = {}
    for place, ((axis, findings), letter) in enumerate(zip(panels, letters(), strict=False)):
        if len(panels) > 1:
            axis.set_title(letter, loc="left", x=-0.02, ha="right", weight="bold")
        if note := rests_on(findings, labels):
            notes.setdefault(note, []).append(place)
    said = [note if len(of) == len(panels) else f"{_spans(of)}: {note}" for note, of in notes.items()]
    width = int(13 * figure.get_figwidth())
    lines = wrap("; ".join(filter(None, [*said, *more])), width)
    figure.suptitle("\n".join(filter(None, [title, *lines])), fontsize=10)


def rests_on(findings: Sequence[Finding], labels: Labels) -> str:
    """On how many clusters numbers rest, and what their intervals are; empty where they have neither."""
    clusters = sorted({finding.value.clusters for finding in findings} - {0})
    counted = f"n = {labels('n', ' to '.join(map(str, clusters[:1] + clusters[1:][-1:])))}" if clusters else ""
    whole = [finding.comparisons for finding in findings if finding.value.has_interval]
    ranges = any(each.ends[0] == each.smallest and not each.has_interval for each in (of.value for of in findings))
    intervals = f"95 % intervals{_together(whole)}" if whole else ""
    ranged = f"{'where there is none, ' if whole else ''}ranges from the smallest to the largest" if ranges else ""
    return ", ".join(filter(None, [counted, intervals, ranged]))


def means_of(finding: Finding) -> Finding:
    """A finding as a figure shows it that shows no interval."""
    return replace(finding, value=Estimate(finding.value.mean, clusters=finding.value.clusters))


def letters() -> Iterator[str]:
    """a, b, …, z, aa, bb, …"""
    return (letter * times for times in count(1) for letter in ascii_lowercase)


def _spans(places: Sequence[int]) -> str:
    """The letters of panels, such as `a–c, f`."""
    named = list(islice(letters(), places[-1] + 1))
    first = [place for place in places if place - 1 not in places]
    last = [place for place in places if place + 1 not in places]
    return ", ".join(
        named[start] if start == end else f"{named[start]}–{named[end]}" for start, end in zip(first, last, strict=True)
    )


def _together(comparisons: Sequence[int]) -> str:
    """Over how many claims intervals hold together."""
    several = sorted({number for number in comparisons if number > 1})
    if not several:
        return ""
    some = "" if min(comparisons) > 1 else "some "
    return f" ({some}together over {' or '.join(map(str, several))} claims)"


def beyond(panels: Sequence[Shown], *, sideways: bool = False) -> str:
    """What is to be said where intervals reach further up or down than their panel, or to the sides."""
    reached = sorted(set().union(*(edges(axis, findings, sideways=sideways) for axis, findings in panels)))
    return f"intervals that reach the {' or '.join(reached)} edge go on beyond it" if reached else ""


def edges(axis: "Axes", findings: Sequence[Finding], *, sideways: bool = False) -> set[str]:
    """The edges of a panel that intervals cross."""
    low, high = axis.get_xlim() if sideways else axis.get_ylim()
    names = ("left", "right") if sideways else ("lower", "upper")
    lows, highs = zip(*(finding.value.ends for finding in findings), strict=True) if findings else ((), ())
    crossed = (any(end < low for end in lows), any(end > high for end in highs))
    return {edge for edge, is_crossed in zip(names, crossed, strict=True) if is_crossed}
