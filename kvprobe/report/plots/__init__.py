"""Plots: the house style, and for each instrument the figure of what it measured, in a module of its own."""

from kvprobe.report.plots.budget import MEMORY_COLOURS, memory
from kvprobe.report.plots.patch_map import patching
from kvprobe.report.plots.probing import leak
from kvprobe.report.plots.style import ARM_COLOURS, heat, save, styled

__all__ = ["ARM_COLOURS", "MEMORY_COLOURS", "heat", "leak", "memory", "patching", "save", "styled"]
