"""A page of attention: what a model attends to in a text or a conversation, before and after segments are masked."""

from collections.abc import Sequence

from kvprobe.attention import attend
from kvprobe.checks import names_of
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.names import unknown
from kvprobe.report.views.packing import refuse_sizes
from kvprobe.report.views.page import Page, attention
from kvprobe.text.transcript import Transcript


def attend_page(model: Model, text: str | Transcript, hide: str | Sequence[str] = (), last: int | None = None) -> Page:
    """Attention of every token, in every layer and head.

    With `hide`, the tokens are those of the last message and of the header of its answer, and the page shows their
    attention before and after these segments are masked in the cache, and the difference.

    Args:
        last: show only so many of the last tokens.

    Raises:
        UserError: there is no message to mask or to read after the mask, no such segment, or more than a page holds.
    """
    hide = names_of(hide)
    tokens = model.prompts(text, None)[0]
    start = tokens.span(_final(text, hide)).start if hide else 0
    read = tokens[start:]
    if not len(read):
        raise UserError("The text has no tokens; give a text that is not empty.")
    count = len(read) if last is None else last
    if not 1 <= count <= len(read):
        raise UserError(f"The text has {len(read)} tokens, and last={last} was given; give 1 to {len(read)}.")
    queries = range(len(read) - count, len(read))
    sizes = len(model.geometry.attending), model.geometry.n_heads
    refuse_sizes(*sizes, [start + query for query in queries], len(tokens), 2 if hide else 1)

    settings = {"chat": None if isinstance(text, str) else text, "title": f"Attention of {model.name}"}
    if not hide:
        return attention(attend(model, read, queries=queries), **settings)
    past = model.extend(None, tokens[:start])[0]
    before, after = (attend(model, read, cache, queries=queries) for cache in (past, past.mask(*hide)))
    caption = (
        f"Before and after {', '.join(hide)} was masked: it is crossed out, and no token of the last message attends "
        "to it."
    )
    return attention(before, after, caption=caption, **settings)


def _final(text: str | Transcript, hide: Sequence[str]) -> str:
    """The last segment, which is read after these are masked.

    Raises:
        UserError: a segment cannot be masked before it.
    """
    segments = () if isinstance(text, str) else text.segments
    if len(segments) < 2:
        raise UserError("There is no message to mask before the last one; give a chat of two messages or more.")
    for name in hide:
        if name not in segments:
            raise UserError(unknown("segment", name, segments[:-1]))
        if name == segments[-1]:
            raise UserError(
                f"{name!r} is the last message, which is read after the others are masked; mask an earlier one."
            )
    return segments[-1]
