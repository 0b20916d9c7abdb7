"""Draw what each operation means for each kind of memory: python figures/memories.py."""

from pathlib import Path
from typing import Any

import matplotlib

from kvprobe.report.plots import save

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

HIDDEN, LIVE, GONE, POSITION = "#c7c7c7", "#4c78a8", "#ffffff", "#e0a030"
KINDS = ("K and V", "latent and rotated key", "writes to a state", "inputs of a convolution")
OPERATIONS = ("as read", "mask", "evict", "evict, then reindex")
SLOTS, CUT = 6, (3, 4)
"""Slots, and those that are hidden."""


def main() -> None:
    figure, axes = plt.subplots(len(OPERATIONS), len(KINDS), figsize=(11, 4.4))
    for row, operation in enumerate(OPERATIONS):
        for column, kind in enumerate(KINDS):
            panel(axes[row, column], operation, kind)
            if row == 0:
                axes[row, column].set_title(kind, fontsize=10)
        axes[row, 0].text(-0.6, 0.9, operation, ha="right", va="center", fontsize=10)
    figure.subplots_adjust(left=0.13, right=0.995, top=0.93, bottom=0.02, wspace=0.08, hspace=0.12)
    save(figure, Path(__file__).resolve().parent / "memories")


def panel(axes: Any, operation: str, kind: str) -> None:
    axes.set(xlim=(-0.5, 9.4), ylim=(-0.9, 2.3), aspect="equal")
    axes.axis("off")
    closed = operation.endswith("reindex")
    shown = [slot for slot in range(SLOTS) if not (closed and slot in CUT)]
    recurrent = kind.startswith("writes")
    for place, slot in enumerate(shown):
        cut = slot in CUT and operation != "as read"
        gone = cut and operation.startswith("evict")
        color = GONE if gone else HIDDEN if cut else LIVE
        box(axes, place, 0, color, gone)
        if kind in KINDS[:2]:
            # K, or the rotated key, knows its position; V, or the latent, does not.
            box(axes, place, 1, GONE if gone else HIDDEN if cut else POSITION, gone)
            axes.text(place + 0.4, 2.05, "" if gone else str(place if closed else slot), ha="center", fontsize=7)
        elif recurrent and not cut:
            arrow = {"arrowstyle": "-|>", "mutation_scale": 7, "color": LIVE, "lw": 0.7}
            axes.add_patch(FancyArrowPatch((place + 0.4, 0.85), (7.2, 1.25), connectionstyle="arc3,rad=-0.25", **arrow))
        elif not recurrent:
            last = slot in [slot for slot in shown if operation == "as read" or slot not in CUT][-2:]
            axes.text(place + 0.4, 1.15, "▾" if last else "", ha="center", fontsize=9, color=LIVE)
    if recurrent:
        axes.add_patch(Rectangle((7.2, 0.4), 1.7, 1.7, facecolor=LIVE, alpha=0.35, edgecolor=LIVE))
        axes.text(8.05, 1.25, "state", ha="center", va="center", fontsize=8)
    axes.text(-0.1, -0.65, said(operation, kind), fontsize=7, va="center")


def box(axes: Any, place: float, height: float, color: str, dashed: bool) -> None:
    line: dict[str, Any] = {"linestyle": (0, (2, 2)), "edgecolor": "#999999"} if dashed else {"edgecolor": "white"}
    axes.add_patch(Rectangle((place, height), 0.8, 0.8, facecolor=color, lw=0.8, **line))


def said(operation: str, kind: str) -> str:
    if kind == KINDS[2]:
        return {
            "as read": "the state is folded of all writes",
            "mask": "folded of live writes; others pass time",
            "evict": "the same state; the writes are freed",
            "evict, then reindex": "no time passes where slots are gone",
        }[operation]
    if kind == KINDS[3]:
        return "what is read next sees the last live inputs"
    turned = "K" if kind == KINDS[0] else "its key"
    return {
        "as read": f"yellow: {turned}, turned to its position",
        "mask": "later queries do not see them",
        "evict": "freed; positions stay",
        "evict, then reindex": f"{turned} is turned to its new position",
    }[operation]


if __name__ == "__main__":
    main()
