"""Plots: the house style, and for each instrument the figure of what it measured, in a module of its own."""

from kvprobe.report.plots.budget import MEMORY_COLOURS, memory
from kvprobe.report.plots.heads import by_head
from kvprobe.report.plots.patch_map import patching
from kvprobe.report.plots.probing import leak
from kvprobe.report.plots.replies import replies
from kvprobe.report.plots.style import ARM_COLOURS, heat, save, styled

__all__ = [
    "ARM_COLOURS",
    "MEMORY_COLOURS",
    "by_head",
    "heat",
    "leak",
    "memory",
    "patching",
    "replies",
    "save",
    "styled",
]


def __dir__() -> list[str]:
    return __all__
