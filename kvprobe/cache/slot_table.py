"""The slots of one row as a table, as results hold it in JSON."""

from kvprobe.cache.entries import entries
from kvprobe.cache.ledger import Ledger
from kvprobe.text.tokens import Decoder, token_texts


def slots_table(ledger: Ledger, tokenizer: Decoder | None, row: int = 0) -> dict[str, list[object]]:
    """One entry per slot under each name: `token`, its `text` (none without a tokenizer), `position`, `segment` (null
    for padding), `live` (in some layer and head), `recomputed` and `edited`."""
    ids = entries(ledger.tokens[row], int)
    texts = token_texts(ids, tokenizer)
    return {
        "token": [*ids],
        "text": [*texts] if texts else [None] * len(ids),
        "position": [*entries(ledger.positions[row], int)],
        "segment": [ledger.names[number] if number >= 0 else None for number in entries(ledger.segments[row], int)],
        "live": [*entries(ledger.live_somewhere[row], bool)],
        "recomputed": [*entries(ledger.recomputed[row], bool)],
        "edited": [*entries(ledger.edited[row], bool)],
    }
