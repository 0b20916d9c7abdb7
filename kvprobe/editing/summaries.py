"""The model's own summary, written into its cache: what a compaction puts in the place of what it hides."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.editing.splicing import one_row
from kvprobe.errors import UserError
from kvprobe.inference.rows import user_turn
from kvprobe.text.tokens import Tokens, refuse_reserved

SUMMARY = "summary"
"""Segment of a request for a summary, and of what the model answers."""
REQUEST = "Please summarise what I have said so far."


class WrittenAnswer(Protocol):
    """An answer, as `kvprobe.inference.generate.Generation` has it."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> Sequence[Sequence[int]]: ...
    @property
    def stopped(self) -> Sequence[bool]: ...


@runtime_checkable
class Writer(Protocol):
    """A model that answers after a cache and reads on, wherever it runs."""

    @property
    def tokenizer(self) -> Any: ...
    def prompts(self, cache: KVCache, ask: str, /) -> list[Tokens]: ...
    def generate(self, start: KVCache, ask: str, /, *, max_new_tokens: int) -> WrittenAnswer: ...
    def extend(self, cache: KVCache, text: Tokens, /) -> tuple[KVCache, object]: ...


@checked_arguments
def summarise(
    model: Writer,
    cache: KVCache,
    *,
    request: str = REQUEST,
    segment: str = SUMMARY,
    max_new_tokens: AtLeastOne = 48,
) -> KVCache:
    """The cache followed by a user's request for a summary and the one that the model writes with this cache.

    Both are one segment, as in the conversations of study `compaction`. Nothing before it changes: a compaction masks
    or evicts what was summed up afterwards, so that the summary still holds what was in view while it was written.
    `cache.rewind("summary")` is the inverse.

    Args:
        cache: of one row.
        segment: its name.
        max_new_tokens: of the summary, which is cut there.

    Raises:
        UserError: several rows, a segment of this name, no chat template, or a model that writes no summary.
    """
    one_row(cache)
    refuse_reserved([segment])
    if segment in cache.ledger.names and bool(cache.ledger.in_segments([segment]).any()):
        raise UserError(f"The cache has a segment {segment!r} already; give the summary another name.")
    (asked,) = model.prompts(cache, request)
    written = model.generate(cache, request, max_new_tokens=max_new_tokens)
    if not written.text.strip():
        raise UserError("The model wrote no summary; ask for it in other words, with request.")
    ids = [*written.tokens[0]]
    told = asked + Tokens.of(ids[:-1] if written.stopped[0] else ids, segment, asked.following)
    closing, _ = user_turn(request, model.tokenizer)
    told += closing.shifted(told.following)
    return model.extend(cache, replace(told, segments=(segment,) * len(told)))[0]
