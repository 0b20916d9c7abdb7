"""Editing a cache: splice, concatenate, replace, correct, fit, zero and steer, exact about positions and provenance."""

from kvprobe.editing.eraser import divergence, train_eraser
from kvprobe.editing.matching import attention_error, match_attention
from kvprobe.editing.numbers import steer, zero
from kvprobe.editing.rereading import erratum, recompute, replace_text
from kvprobe.editing.splicing import concatenate, splice

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
    "train_eraser",
    "zero",
]
