"""Payload or pointer: whether a summary's slots hold the thing that it names, or only where that stands.

The summary's K and V are exchanged for those of a run in whose list the named thing had changed places with another. A
payload then gives the thing that the summary saw; a pointer gives what stands at that place now.
"""

from collections.abc import Sequence

import pandas as pd

from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.tasks.ordinal import Memo
from kvprobe.text.tokens import Tokens


@checked_arguments
def payload_or_pointer(model: Model, memos: Sequence[tuple[Memo, Memo]]) -> pd.DataFrame:
    """One row per `memo` (its number) and `arm`: whether the answer is the `payload`, and whether it is what a
    `pointer` finds. The two are one but where the summary was exchanged.

    Arms: `seen` (nothing is changed), `masked` (the list is hidden from the question), `crossed` (the summary's K and V
    are those of the other memo).

    Args:
        memos: each with what its summary saw in the arm `crossed`; see `kvprobe.tasks.ordinal.draw_exchanged`.
    """
    rows = []
    for number, (memo, other) in enumerate(memos):
        (cache, suffix), (donor, _) = (_read(model, chosen) for chosen in (memo, other))
        arms = {"seen": cache, "masked": cache.mask("block"), "crossed": cache.patch(donor, "summary")}
        _, logits = model.extend(KVCache.join(list(arms.values())), [suffix] * len(arms))
        said = [model.tokenizer.decode([int(token)]).strip() for token in logits[:, -1].argmax(-1)]
        for arm, word in zip(arms, said, strict=True):
            payload = (other if arm == "crossed" else memo).answer
            rows.append({"memo": number, "arm": arm, "payload": word == payload, "pointer": word == memo.answer})
    return pd.DataFrame(rows)


def _read(model: Model, memo: Memo) -> tuple[KVCache, Tokens]:
    """The cache before the question, and the question."""
    tokens = memo.conversation().tokens(model.tokenizer)
    cut = tokens.span("question").start
    return model.prefill(tokens[:cut]), tokens[cut:]
