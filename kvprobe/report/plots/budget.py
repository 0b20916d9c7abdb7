"""The plot of a memory budget: where memory goes as a conversation gets longer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvprobe.arguments import checked_arguments
from kvprobe.memory.budget import Budget
from kvprobe.memory.table import ENGINES
from kvprobe.report.plots.style import shown_once, styled
from kvprobe.units import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY_COLOURS = {
    "weights": "#7f7f7f",
    "activations and logits": "#e69f00",
    "prompt": "#0072b2",
    "generated": "#56b4e9",
    "headroom": "#009e73",
}
"""The parts of a memory budget, in the order in which they are stacked."""
CACHE = {"prompt": "cache of the prompt", "generated": "cache of what is generated"}
"""What the parts that are cache are called in the legend."""


@dataclass(frozen=True)
class Stack:
    """Where memory goes, by length.

    Attributes:
        lengths: tokens.
        parts: bytes at each length, by part, in the order in which they are stacked.
        usable: bytes that there are; None where that is not known.
        largest: tokens after which memory runs out; None where it does not.
        x_label, title: of the figure.
    """

    lengths: Sequence[int]
    parts: Mapping[str, Sequence[int | float]]
    usable: int | float | None
    largest: int | None
    x_label: str
    title: str


Along = Literal["context", "new"]


@checked_arguments
def memory(budget: Budget, along: Along = "context", measured: Sequence[tuple[int, int]] = ()) -> "Figure":
    """Where memory goes as the prompt gets longer (`context`) or as the model generates after it (`new`).

    Weights, cache of prompt and of generated tokens, what a pass needs beside them, and headroom are stacked; a line
    marks the length at which memory runs out.

    Args:
        measured: tokens and bytes of measured peaks, drawn as dots.
    """
    return draw_stack(stack_of(budget, along, max((tokens for tokens, _ in measured), default=0)), measured)


def stack_of(budget: Budget, along: Along, longest: int = 0, points: int = 161) -> Stack:
    """A budget at many lengths, up to where memory runs out, or to `longest` if that is longer."""
    import numpy as np

    largest = budget.largest_context if along == "context" else budget.largest_new
    lengths = np.unique(np.linspace(*_range(budget, along, largest, longest), points).astype(int)).tolist()
    budgets = [budget.at(length) if along == "context" else budget.generating(length) for length in lengths]
    parts = [_parts(point, along == "new") for point in budgets]
    request = budget.request
    return Stack(
        lengths,
        {name: [part[name] for part in parts] for name in MEMORY_COLOURS},
        budget.usable,
        largest,
        "tokens of context" if along == "context" else f"tokens generated after a prompt of {request.prompt:,}",
        f"{budget.config.name}, {request.batch:,} at once, {request.numbers.name}, {ENGINES[budget.engine]}",
    )


@shown_once
def draw_stack(stack: Stack, measured: Sequence[tuple[int, int | float]] = ()) -> "Figure":
    """The plot of a stack; see `memory`."""
    import matplotlib.pyplot as plt
    import numpy as np

    lengths, largest = stack.lengths, stack.largest
    with styled():
        figure, axis = plt.subplots(figsize=(5.6, 3.3), layout="constrained")
        shown = {name: np.array(part) / 1e9 for name, part in stack.parts.items() if any(part)}
        axis.stackplot(
            lengths, *shown.values(), labels=[CACHE.get(name, name) for name in shown],
            colors=[MEMORY_COLOURS[name] for name in shown],
            alpha=0.85, lw=0,
        )  # fmt: skip
        if measured:
            axis.plot(*zip(*((x, y / 1e9) for x, y in measured), strict=True), "k.", ms=6, label="measured peak")
        if stack.usable is not None:
            axis.axhline(stack.usable / 1e9, color="0.2", lw=1, ls="--")
            axis.annotate(
                f"memory, {short(stack.usable)}", (lengths[0], stack.usable / 1e9), (4, 3),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
            if largest:
                axis.axvline(largest, color="#d55e00", lw=1.2)
                axis.annotate(
                    f"out of memory\nafter {largest:,} tokens", (largest, 0.04), (-4, 0),
                    xycoords=("data", "axes fraction"), textcoords="offset points", ha="right", fontsize=8,
                    color="#d55e00",
                )  # fmt: skip
        axis.set(xlabel=stack.x_label, ylabel="GB (10⁹ bytes)", xlim=(lengths[0], lengths[-1]), ylim=(0, None))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(stack.title)
        handles, labels = axis.get_legend_handles_labels()
        beside: Any = "outside center right"  # which matplotlib's types do not know
        figure.legend(handles[::-1], labels[::-1], frameon=False, loc=beside)
    return figure


def _range(budget: Budget, along: Along, largest: int | None, longest: int) -> tuple[int, int]:
    """The shortest and the longest length that are drawn."""
    asked = budget.request.context if along == "context" else max(budget.request.new, 64)
    first = budget.request.new + 1 if along == "context" else 0
    return first, max(longest, int(1.3 * largest) if largest else 2 * asked, first + 1)


def _parts(point: Budget, at_last_token: bool) -> dict[str, int]:
    """The bytes of a budget by name, as they are stacked: at its peak, or when the last token is read."""
    phase = point.phases[point.phase]
    if at_last_token:
        phase = point.phases.get("generating", phase)
    generated = min(sum(point.generated), phase.cache)
    return {
        "weights": point.weights,
        "activations and logits": phase.activations + phase.logits + phase.growth,
        "prompt": phase.cache - generated,
        "generated": generated,
        "headroom": 0 if point.usable is None else max(0, point.usable - point.weights - phase.total),
    }
