"""Editing a cache: splice, join, replace, correct, sum up, fit, zero, steer, exact about positions and provenance."""

from kvprobe.editing.eraser import divergence, train_eraser
from kvprobe.editing.matching import attention_error, match_attention
from kvprobe.editing.numbers import steer, zero
from kvprobe.editing.rereading import erratum, recompute, replace_text
from kvprobe.editing.splicing import concatenate, splice
from kvprobe.editing.summaries import summarise

__all__ = [
    "attention_error",
    "concatenate",
    "divergence",
    "erratum",
    "match_attention",
    "recompute",
    "replace_text",
    "splice",
    "steer",
    "summarise",
    "train_eraser",
    "zero",
]
