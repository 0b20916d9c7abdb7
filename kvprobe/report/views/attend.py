"""What a model attends to in a text or a conversation, as a page; and what it attends to once segments are masked."""

from collections.abc import Sequence

from kvprobe.attention import attend
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.names import unknown
from kvprobe.report.views.attention import patterns_view, refuse_sizes
from kvprobe.report.views.page import Page
from kvprobe.text.transcript import Transcript


def attend_page(model: Model, text: str | Transcript, mask: Sequence[str] = (), last: int | None = None) -> Page:
    """Attention of every token, in every layer and head; with `mask`, that of the last message (and the header of its answer)
    before and after these segments are masked in the cache of what stands before it.

    Args:
        last: only so many of the last of these tokens attend.

    Raises:
        UserError: there is nothing to mask or to read after it, no such segment, or more than a page holds.
    """
    tokens = model.prompts(text, None)[0]
    start = tokens.span(_final(text, mask)).start if mask else 0
    read = tokens[start:]
    if not len(read):
        raise UserError("The text has no tokens; give one that is not empty.")
    count = len(read) if last is None else last
    if not 1 <= count <= len(read):
        raise UserError(f"The last {count} of {len(read)} tokens were asked for; give 1 to {len(read)}.")
    queries = range(len(read) - count, len(read))
    refuse_sizes(model.geometry.n_layers, model.geometry.n_heads, [start + query for query in queries], len(tokens))

    shown: dict[str, KVCache | None] = {"": None}
    if mask:
        past = model.extend(None, tokens[:start])[0]
        masked = f"After {', '.join(mask)} was masked: struck through, and seen by no token of the last message."
        shown = {"With every message in view.": past, masked: past.mask(*mask)}
    views = [
        patterns_view(attend(model, read, cache, queries=queries), model.tokenizer, caption)
        for caption, cache in shown.items()
    ]
    return Page(views, f"Attention of {model.name}")


def _final(text: str | Transcript, mask: Sequence[str]) -> str:
    """The segment that is read after these are masked; those that cannot be masked before it are refused."""
    segments = () if isinstance(text, str) else text.segments
    if len(segments) < 2:
        raise UserError("There is nothing to mask before the last message; give a chat of two messages or more.")
    for name in mask:
        if name not in segments:
            raise UserError(unknown("segment", name, segments[:-1]))
        if name == segments[-1]:
            raise UserError(
                f"{name!r} is the last message, which is read after others are masked; mask an earlier one."
            )
    return segments[-1]
