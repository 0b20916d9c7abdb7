"""Maps, token views and attention as interactive HTML that needs no network and treats tokens as text."""

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
