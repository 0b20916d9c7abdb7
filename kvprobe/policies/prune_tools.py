"""Pruning old tool results, as agent frameworks do between turns."""

from dataclasses import dataclass, field

from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene


@dataclass(frozen=True)
class PruneToolResults(Policy):
    """Drop the text of all tool results but the last `keep_last`; the delimiters of their messages stay.

    Tool results are the segments whose name starts with `prefix`, in order of first appearance. With a `placeholder` its
    tokens are read where the text stood, seeing what stands before (this needs a model: `Model.apply`). Retained, as here
    by default, is a `cache_edits` pruning (seed 003); `provenance="recomputed", mode="contiguous"` is what an API does that
    edits the message list and reads it anew.
    """

    keep_last: int
    placeholder: str | None = None
    prefix: str = "tool"
    every: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("keep_last", 0)
        if self.placeholder is not None and not self.placeholder.strip():
            raise UserError("PruneToolResults has an empty placeholder; give a text, or None for none.")

    def pruned(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The segments, of these, whose text goes."""
        results = tuple(name for name in names if name.startswith(self.prefix))
        return results[: len(results) - self.keep_last] if self.keep_last < len(results) else ()

    def keep(self, scene: Scene) -> Live:
        ledger = scene.cache.ledger
        gone = ledger.in_segments(self.pruned(ledger.names)) & ~ledger.delimiters
        return (~gone)[None, :, None, :].expand_as(scene.live)
