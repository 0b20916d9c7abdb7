"""Maps, token views and attention as interactive HTML that needs no network and treats tokens as text."""

from kvprobe.report.views.compare import comparison
from kvprobe.report.views.grids import heat_map, token_view
from kvprobe.report.views.page import Page, attention, heads, page, render, tokens
from kvprobe.report.views.patterns import attention_view, heads_view, patterns_view

__all__ = [
    "Page",
    "attention",
    "attention_view",
    "comparison",
    "heads",
    "heads_view",
    "heat_map",
    "page",
    "patterns_view",
    "render",
    "token_view",
    "tokens",
]
