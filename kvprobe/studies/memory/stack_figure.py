"""The plot of a memory budget as findings, which are kept with a run: what `kvprobe.report.plots.budget` stacks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.memory.budget import Budget
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots.budget import Along, Stack, draw_stack, stack_of
from kvprobe.report.plots.figure import Labels
from kvprobe.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def stack_findings(budget: Budget, along: Along, longest: int = 0, points: int = 61) -> Iterator[Finding]:
    """Where memory goes by length: bytes that each part needs (`needed`), tokens after which memory runs out (`room`),
    and bytes that there are (`usable`).

    Args:
        longest: length up to which it is followed at least.
        points: number of lengths.
    """
    stack = stack_of(budget, along, longest, points)
    for part, sizes in stack.parts.items():
        for length, size in zip(stack.lengths, sizes, strict=True):
            yield Finding("needed", {"along": along, "length": length, "part": part}, Estimate(float(size)), "bytes")
    for name, number, unit in (("room", stack.largest, "tokens"), ("usable", stack.usable, "bytes")):
        yield Finding(name, {"along": along}, Estimate(float("nan") if number is None else float(number)), unit)


@dataclass(frozen=True, kw_only=True)
class StackFigure:
    """What `stack_findings` found, drawn.

    Attributes:
        file, caption: of the figure.
        along: whether the prompt gets longer or what is generated after it.
        measured: whether the measured peaks are drawn as dots.
    """

    file: str
    caption: str
    along: Along
    measured: bool = False

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        sizes: dict[str, list[float]] = {}
        for finding in findings.where("needed", along=self.along):
            sizes.setdefault(str(finding.keys["part"]), []).append(finding.value.mean)
        if not sizes:
            return None
        usable, room = (findings.at(name, along=self.along) for name in ("usable", "room"))
        stack = Stack(
            [int(length) for length in findings.values("needed", "length", along=self.along)],
            sizes,
            None if usable.unknown else usable.mean,
            None if room.unknown else int(room.mean),
            labels("along", self.along),
            title,
        )
        dots = findings.where("measured", what="peak") if self.measured else []
        return draw_stack(stack, [(int(dot.keys["context"]), dot.value.mean) for dot in dots])
