"""Maps, token views and attention as HTML: they answer the mouse and the keyboard, need no network, and run nothing that a
token says.

A page carries one copy of the scripts that draw all its views: kvprobe's own, and CircuitsVis' bundle from its wheel for
token views and attention patterns.
"""

from kvprobe.report.views.attention import attention_view, heads_view, patterns_view
from kvprobe.report.views.grids import heat_map, token_view
from kvprobe.report.views.page import Page, heads, page, render, tokens

__all__ = [
    "Page",
    "attention_view",
    "heads",
    "heads_view",
    "heat_map",
    "page",
    "patterns_view",
    "render",
    "token_view",
    "tokens",
]
