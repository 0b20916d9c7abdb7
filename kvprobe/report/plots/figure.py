"""What a figure over findings is: `Lines`, `Heatmaps`, `Dots`, `Bars`, `Scatter`, or any class of this shape."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from kvprobe.report.findings import Findings, Key

Labels = Callable[[str, Key], str]
"""How a key's value is written, from the key and the value."""


@runtime_checkable
class Figure(Protocol):
    """A figure as a declaration over findings."""

    @property
    def file(self) -> str:
        """Its name, without suffix."""
        ...

    @property
    def caption(self) -> str: ...

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        """A matplotlib figure; None where nothing of it was measured."""
        ...
