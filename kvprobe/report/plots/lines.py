"""Lines over findings: one key along the x axis, a line for each value of another, panels for others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.said import Shown, beyond, edges, say
from kvprobe.report.plots.style import styled
from kvprobe.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Style:
    """Colour, marker and dashes of a line."""

    colour: str
    marker: str = "o"
    dashes: str = "-"


Keys = Mapping[str, Key]
Row = tuple[str, tuple[Key, ...]]
"""A row of panels: its name, and which lines it has."""
MOST = 6
"""Lines that one panel can have before they hide each other."""
CYCLE = tuple(
    Style(colour, marker)
    for colour, marker in zip(("#56b4e9", "#0072b2", "#332288", "#7f7f7f", "#000000"), "osD^v", strict=True)
)
"""Of lines that have no style of their own."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A figure of lines with intervals; points of one x are drawn side by side, and not joined where x is a name. More
    lines than `MOST` are shared out among panels one below the other.

    Attributes:
        file, caption: of the figure.
        finding: what is drawn.
        x, line, panel: keys: along the axis; one line each, if there are several; one column of panels each, likewise.
        row: the name of the row of panels that a finding belongs to, from its keys; all in one by default.
        drawn: which values of `line` are drawn.
        where: the other keys; one of several values, where a tuple is given.
        band: a finding whose keys are the same in a whole panel, drawn as a dashed line with its interval, and its name
            in the legend.
        level: the same as a dotted line.
        beside: a finding with the same keys, drawn hollow and dashed, or not joined beside curves, and what to add to
            its names.
        rules: values of y at which a thin line is drawn, and their names in the legend, which may be empty; at 0 by
            default, where a number is negative.
        most: the most that a number can be at each x, drawn as a dotted line, and its name in the legend.
        upright: numbers on the x axis of curves at which a dotted line is drawn.
        above: such a finding by which x is multiplied on a second axis above, and that axis's label.
        y_label: of the y axis.
        x_label: of the x axis; the name of its key by default.
        log: whether the y axis is logarithmic.
        curves: for many x: whether the x axis is linear (it is logarithmic otherwise), and intervals are shaded.
        limits: of the y axis, which is longer where a number lies beyond; that an interval does is said.
        own_scales: whether each panel has a y axis of its own.
        styles: of lines, by value of their key; in their order by default.
        size: width and height of a panel, in inches.
        title: of the figure; what `draw` is given by default.
    """

    file: str
    caption: str
    finding: str
    x: str
    y_label: str
    x_label: str | None = None
    line: str = ""
    panel: str = ""
    styles: Mapping[Any, Style] = field(default_factory=dict)
    row: Callable[[Keys], str] = lambda _: ""
    drawn: Callable[[Key], bool] = lambda _: True
    where: Mapping[str, Key | tuple[Key, ...]] = field(default_factory=dict)
    band: tuple[str, str] | None = None
    level: tuple[str, str] | None = None
    beside: tuple[str, str] | None = None
    rules: Mapping[float, str] = field(default_factory=dict)
    most: tuple[Callable[[Any], float], str] | None = None
    upright: tuple[float, ...] = ()
    above: tuple[str, str] | None = None
    log: bool = False
    curves: bool = False
    limits: tuple[float, float] | None = None
    own_scales: bool = False
    size: tuple[float, float] = (2.9, 3.0)
    title: str = ""

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        known = self._known(findings, self.finding)
        panels = list(dict.fromkeys(finding.keys.get(self.panel, "") for finding in known))
        if not panels:
            return None
        rows = self._rows(known)
        beside = self._known(findings, self.beside[0]) if self.beside else []
        across = self._places([finding.keys[self.x] for finding in (*known, *beside)])
        width, height = self.size
        shown: list[Shown] = []
        with styled():
            figure, grid = plt.subplots(
                len(rows),
                len(panels),
                figsize=(3.0 + max(5.4, width * len(panels)), 0.5 + height * len(rows)),
                sharex=True,
                sharey=not self.own_scales,
                squeeze=False,
            )
            for axes, row in zip(grid, rows, strict=True):
                axes[0].annotate(
                    row[0], (0, 1), (0, 19), xycoords="axes fraction", textcoords="offset points",
                    fontsize=9.5, weight="bold",
                )  # fmt: skip
                axes[0].set_ylabel(self.y_label)
                for axis, panel in zip(axes, panels, strict=True):
                    axis.set_title(labels(self.panel, panel) if self.panel else "")
                    shown.append((axis, self._panel(axis, findings, (row, panel), across, labels)))
            for axis, own in shown if self.log else ():
                _logarithmic(axis, own if self.own_scales else known)
            for axis in grid[-1]:
                axis.set_xlabel(self.x if self.x_label is None else self.x_label)
            own = "each panel has a scale of its own" if self.own_scales and len(shown) > 1 else ""
            moved = any(self._crowded(of) for _, of in shown) and not any(isinstance(x, str) for x in across)
            aside = "points of one x stand side by side" if moved else ""
            say(figure, shown, labels, self.title or title, own, aside, beyond(shown))
            for axis, of in shown if self.curves else ():
                _fade(axis, edges(axis, of))
            _legends(grid)
            figure.tight_layout(h_pad=2.2)
        return figure

    def _rows(self, known: Sequence[Finding]) -> list[Row]:
        """The rows of panels: those of one name are several where they would have too many lines."""
        rows: dict[str, dict[Key, None]] = {}
        for finding in known:
            rows.setdefault(self.row(finding.keys), {})[finding.keys.get(self.line, "")] = None
        order = {line: place for place, line in enumerate(self.styles)}
        shares: list[Row] = []
        for name, lines in rows.items():
            ordered = sorted(lines, key=lambda line: order.get(line, len(order)))
            for share in np.array_split(np.arange(len(ordered)), -(-len(ordered) // MOST)):
                shares.append((name, tuple(ordered[place] for place in share)))
        return shares

    def _known(self, findings: Findings, name: str, place: tuple[Row, Key] | None = None) -> list[Finding]:
        """The findings of a name that are drawn: all, or those of one row and panel."""
        return [
            finding
            for finding in findings.where(name, **self.where)
            if not finding.value.unknown
            and self.drawn(finding.keys.get(self.line, ""))
            and (place is None or self._at(finding.keys, *place))
        ]

    def _at(self, keys: Keys, row: Row, panel: Key) -> bool:
        return self.row(keys) == row[0] and keys.get(self.line, "") in row[1] and keys.get(self.panel, panel) == panel

    def _places(self, values: Sequence[Key]) -> dict[Key, float]:
        """Where each x stands on the axis: names one after the other; numbers by their logarithm, but by themselves in
        curves and where one is not above 0."""
        known = list(dict.fromkeys(values))
        if any(isinstance(x, str) for x in known):
            return {x: float(place) for place, x in enumerate(known)}
        plain = self.curves or min(float(x) for x in known) <= 0
        return {x: float(x) if plain else float(np.log(float(x))) for x in known}

    def _panel(
        self,
        axis: "Axes",
        findings: Findings,
        place: tuple[Row, Key],
        across: Mapping[Key, float],
        labels: Labels,
    ) -> list[Finding]:
        """Draws a panel; gives what it shows, but for what stands beside it."""
        known = self._known(findings, self.finding, place)
        beside = self._known(findings, self.beside[0], place) if self.beside else []
        if self.band and (value := _common(findings, self.band[0], known)):
            axis.axhspan(*value.ends, color="0.92", lw=0, zorder=0)
            axis.axhline(value.mean, color="black", ls="--", lw=0.9, label=self.band[1])
        if self.level and (value := _common(findings, self.level[0], known)) and value.mean > 0:
            axis.axhline(value.mean, color="black", ls=":", lw=0.9, label=self.level[1])
        negative = any(finding.value.mean < 0 for finding in known)
        for value, name in (self.rules or ({0.0: ""} if negative else {})).items():
            axis.axhline(value, color="0.7", ls="--", lw=0.8, zorder=0, label=name or None)
        if self.most:
            ends = sorted((at, self.most[0](x)) for x, at in across.items())
            axis.plot(*np.transpose(ends), "k:", lw=0.9, label=self.most[1])
        for value in self.upright:
            axis.axvline(value, color="0.35", ls=":", lw=0.9, zorder=0)
        lines = [line for line in place[0][1] if any(finding.keys.get(self.line, "") == line for finding in known)]
        named = any(isinstance(x, str) for x in across)
        moved = named or self._crowded(known)
        shifts = _offsets(len(lines), across.values(), 0.0 if named else self.size[0]) if moved else [0.0] * len(lines)
        for number, (line, shift) in enumerate(zip(lines, shifts, strict=True)):
            name, style = labels(self.line, line), self.styles.get(line, CYCLE[number % len(CYCLE)])
            look = {"color": style.colour, "marker": style.marker}
            points, hollow_points = (
                [(across[finding.keys[self.x]], finding.value) for finding in some if self._on(finding, line, across)]
                for some in (known, beside)
            )
            if self.curves:
                _curve(axis, points, ls=style.dashes, ms=3.5, label=name, **look)
            else:
                dashes = "none" if named else style.dashes
                _points(axis, points, shift, ls=dashes, lw=1.3, ms=4.5, label=name, **look)
            if self.beside:
                counted = "".join(f" (n = {n})" for n in sorted({value.clusters for _, value in hollow_points} - {0}))
                called = f"{name}{self.beside[1]}{counted}"
                joined, aside = ("none", 0.0) if self.curves else ("--", shift + 0.03)
                hollow = {**look, "mfc": "white", "ls": joined, "lw": 0.9, "ms": 5, "label": called}
                _points(axis, hollow_points, aside, **hollow)
        if self.curves:
            axis.locator_params(axis="x", integer=all(place.is_integer() for place in across.values()))
        else:
            names = [labels(self.x, x) if isinstance(x, str) else f"{x:g}" for x in across]
            axis.set_xticks(
                list(across.values()), names, fontsize=7.5, rotation=90 if named else 45 * (max(map(len, names)) > 4)
            )
            first, last = min(across.values()), max(across.values())
            beside_it = max(0.3, 0.03 * (last - first))
            axis.set_xlim(first - beside_it, last + beside_it)
        if self.above and (value := _common(findings, self.above[0], known)):
            second = axis.secondary_xaxis("top")
            second.set_xticks(list(across.values()), [f"{float(x) * value.mean:.2g}" for x in across], fontsize=7.5)
            second.set_xlabel(self.above[1], fontsize=8)
        if self.limits:
            names = (self.finding, *((self.beside[0],) if self.beside else ()))
            of_all = [one for name in names for one in self._known(findings, name, place if self.own_scales else None)]
            means = [finding.value.mean for finding in of_all]  # of all panels that share the axis
            axis.set_ylim(min(self.limits[0], *means), max(self.limits[1], *means))
            for line in axis.lines:  # whose numbers the limits hold, but not their markers
                line.set_clip_on(False)
        return known

    def _crowded(self, known: Sequence[Finding]) -> bool:
        """Whether intervals of one x would cover each other."""
        places = {(finding.keys[self.x], finding.keys.get(self.line, "")) for finding in known}
        shared = len({x for x, _ in places}) < len(places)
        return not self.curves and shared and any(np.ptp(finding.value.ends) > 0 for finding in known)

    def _on(self, finding: Finding, line: Key, across: Mapping[Key, float]) -> bool:
        """Whether a finding is a point of a line."""
        return finding.keys.get(self.line, "") == line and finding.keys[self.x] in across


def _logarithmic(axis: "Axes", known: Sequence[Finding]) -> None:
    """A logarithmic axis that begins below all ends of intervals, but not far below all numbers."""
    axis.set_yscale("log")
    means, lows = np.array([(finding.value.mean, finding.value.ends[0]) for finding in known]).T
    if (means > 0).any():
        smallest = means[means > 0].min()
        axis.set_ylim(bottom=max(lows[lows > 0].min(initial=smallest), smallest / 30) / 1.5)


def _fade(axis: "Axes", reached: Iterable[str]) -> None:
    """Let shades vanish at edges that they cross, so that none seems to end there."""
    axis.autoscale(False)
    for edge in reached:
        ends = (0.0, 0.2) if edge == "lower" else (1.0, 0.8)
        white = np.ones((64, 1, 4))
        white[..., 3] = np.linspace(1, 0, 64)[:, None]
        axis.imshow(
            white, extent=(0, 1, *ends), origin="lower", transform=axis.transAxes, aspect="auto", zorder=1.5
        )  # fmt: skip


def _common(findings: Findings, name: str, known: Sequence[Finding]) -> Estimate | None:
    """The finding of a name whose keys all of these have."""
    fits = (
        finding.value
        for finding in findings.where(name)
        if known and all(finding.keys.items() <= place.keys.items() for place in known)
    )
    return next(fits, None)


Points = Sequence[tuple[float, Estimate]]
"""Numbers with their place along the x axis."""


def _points(axis: "Axes", points: Points, shift: float, **look: Any) -> None:
    """Points with their error bars; where there is no number there is no point."""
    if points:
        across, means, low, high = _numbers(points)
        bars = np.clip([means - low, high - means], 0, None)
        axis.errorbar(across + shift, means, yerr=bars, elinewidth=0.8, **look)


def _curve(axis: "Axes", points: Points, **look: Any) -> None:
    """A line with a shaded interval."""
    across, means, low, high = _numbers(points)
    axis.fill_between(across, low, high, color=look["color"], alpha=0.15, lw=0)
    axis.plot(across, means, **look)


def _numbers(points: Points) -> np.ndarray:
    """Places, means, and the ends of their intervals."""
    return np.array([(across, value.mean, *value.ends) for across, value in points]).T


def _offsets(count: int, across: Iterable[float], width: float) -> list[float]:
    """By how much the points of each of so many lines are moved, so that their intervals do not cover each other; on an
    axis of numbers no further than that takes in a panel of this width in inches."""
    places = sorted(across)
    nearest = min((high - low for low, high in pairwise(places)), default=1.0)
    far = 0.025 * (count - 1) / width * (places[-1] - places[0]) if width else 0.17
    half = min(far, 0.3 * nearest)
    return np.linspace(-half, half, count).tolist() if count > 1 else [0.0] * count


def _legends(grid: np.ndarray) -> None:
    """A legend to the right of each row, of what the rows above it have not named."""
    above: set[tuple[str, str]] = set()
    for row in grid:
        named = {label: line for axis in row for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        looks = {label: (label, str(getattr(line, "lines", (line,))[0].get_color())) for label, line in named.items()}
        new = [label for label in named if looks[label] not in above]
        above.update(looks.values())
        if new:
            row[-1].legend(
                [named[label] for label in new],
                new,
                loc="center left",
                bbox_to_anchor=(1.02, 0.5),
                frameon=False,
                handlelength=2.6,
            )
