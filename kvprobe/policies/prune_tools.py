"""Pruning old tool results, as agent frameworks do between turns."""

from dataclasses import dataclass, field

from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene


@dataclass(frozen=True)
class PruneToolResults(Policy):
    """Drop the text of all tool results but the last `keep_last`; the delimiters of their messages stay.

    Tool results are the segments whose name starts with `prefix`, in order of first appearance. With a `placeholder`,
    its tokens are read in place of the text and attend to everything before (this needs a model: `Model.apply`).

    By default the other slots are retained, as in the pruning by `cache_edits` of the Goldberg/Papailiopoulos exchange
    on masking prefixes. `provenance="recomputed", mode="contiguous"` is an API that edits the message list and reads it
    again.
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
        """The segments, of these, whose text is dropped."""
        results = tuple(name for name in names if name.startswith(self.prefix))
        return results[: len(results) - self.keep_last] if self.keep_last < len(results) else ()

    def keep(self, scene: Scene) -> Live:
        ledger = scene.cache.ledger
        gone = ledger.in_segments(self.pruned(ledger.names)) & ~ledger.delimiters
        return (~gone)[None, :, None, :].expand_as(scene.live)
