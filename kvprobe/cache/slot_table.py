"""The slots of one row as a table, as results hold it in JSON."""

from kvprobe.cache.ledger import Ledger
from kvprobe.text.tokens import Decoder, token_texts


def slots_table(ledger: Ledger, tokenizer: Decoder | None, row: int = 0) -> dict[str, list[object]]:
    """One entry per slot under each name: `token`, its `text` (none without a tokenizer), `position`, `segment` (null
    for padding), `live` (in some layer and head) and `recomputed`."""
    ids: list[int] = ledger.tokens[row].tolist()
    texts = token_texts(ids, tokenizer)
    return {
        "token": [*ids],
        "text": [*texts] if texts else [None] * len(ids),
        "position": ledger.positions[row].tolist(),
        "segment": [ledger.names[number] if number >= 0 else None for number in ledger.segments[row].tolist()],
        "live": ledger.live_somewhere[row].tolist(),
        "recomputed": ledger.recomputed[row].tolist(),
    }
