"""Pruning old tool results, as agent frameworks do between turns."""

from dataclasses import dataclass, field

import torch

from kvprobe.arguments import AtLeastOne, AtLeastZero
from kvprobe.cache.entries import entries
from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene


@dataclass(frozen=True)
class PruneToolResults(Policy):
    """Drop the text of all tool results but the last `keep_last`; the delimiters of their messages stay.

    Tool results are the segments whose name starts with `prefix` and whose text a row still holds, in order; results
    are named so where no names are given. With a `placeholder`, its tokens are read in place of the text and attend to
    everything before (this needs a model: `Model.apply`).

    By default the other slots are retained, as in the pruning by `cache_edits` of the Goldberg/Papailiopoulos exchange
    on masking prefixes. `provenance="recomputed", mode="contiguous"` is an API that edits the message list and reads it
    again.
    """

    keep_last: AtLeastZero
    placeholder: str | None = None
    prefix: str = "tool"
    every: AtLeastOne | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placeholder is not None and not self.placeholder.strip():
            raise UserError("PruneToolResults has an empty placeholder; give a text, or None for none.")

    def pruned(self, ledger: Ledger, row: int) -> tuple[str, ...]:
        """The segments of a row whose text is dropped.

        Raises:
            UserError: no segment of the cache has such a name.
        """
        if not any(name.startswith(self.prefix) for name in ledger.names):
            raise UserError(
                f"{self} finds no tool result: no segment of {', '.join(ledger.names[:8])} has a name that starts with "
                f"{self.prefix!r}; name the messages of tools so, with Transcript.from_messages(…, names=…), or give "
                "`prefix`."
            )
        text = ledger.live_somewhere[row] & ~ledger.delimiters[row]
        held = dict.fromkeys(ledger.names[segment] for segment in entries(ledger.segments[row, text], int))
        results = tuple(name for name in held if name.startswith(self.prefix))
        return results[: max(0, len(results) - self.keep_last)]

    def keep(self, scene: Scene) -> Live:
        ledger = scene.cache.ledger
        rows = [ledger.in_segments(self.pruned(ledger, row))[row] for row in range(ledger.batch)]
        gone = torch.stack(rows) & ~ledger.delimiters
        ledger.warn_of_sink(gone)
        return (~gone)[None, :, None, :].expand_as(scene.live)
