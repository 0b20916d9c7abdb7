"""Conversations are read in batches: what their slots hold, and what the model answers when it is asked for the code.

An arm is a segment in a cache. Its features are K before rotation, so that where a slot stands does not matter, and V:
their mean over the segment at every layer, and those of its last slots at some layers.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.rotary import Rotation
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.progress import Bar
from kvprobe.tasks.grammar import Conversation
from kvprobe.tasks.passcode import CODE_LENGTH
from kvprobe.text.tokens import Tokens

HIDDEN = "T2"
ARMS = {"turn": HIDDEN, "summary": "summary", "masked": "T3", "late": "T3", "later": "T4"}
"""By arm, the segment that is read."""
RETAINED, RESTART = "retained", "restart"
STATES = (RETAINED, RESTART)
BEFORE = ("preamble", "system", "T1")


class ArmState(NamedTuple):
    """An arm as it was retained, or computed again without the hidden turn."""

    arm: str
    state: str

    @property
    def name(self) -> str:
        return f"{self.arm}.{self.state}"

    @property
    def source(self) -> "ArmState":
        """Where it is read: computed again, a turn is the same whether it saw the hidden one or not."""
        return ArmState("masked", RESTART) if self == ("late", RESTART) else self


def places_of(arms: Sequence[str]) -> list[ArmState]:
    """Every place that these arms have; there is no turn without the turn."""
    return [ArmState(arm, state) for arm in arms for state in STATES if (arm, state) != ("turn", RESTART)]


TURN = ArmState("turn", RETAINED)
READINGS: dict[ArmState, tuple[ArmState | None, tuple[str, ...], bool]] = {
    TURN: (None, (HIDDEN, "summary"), False),
    ArmState("summary", RETAINED): (TURN, (), True),
    ArmState("summary", RESTART): (None, ("summary",), False),
    ArmState("late", RETAINED): (TURN, ("T3",), True),
    **{ArmState("masked", state): (ArmState("summary", state), ("T3",), False) for state in STATES},
    **{ArmState("later", state): (ArmState("masked", state), ("T4",), False) for state in STATES},
}
"""By source: after which other its segments are read (None: after `BEFORE`), these, and whether the hidden turn is
masked then."""


def token_rows(model: Model, conversations: Sequence[Conversation]) -> list[Tokens]:
    """The tokens of conversations, a row each, in which each digit of the code is one token.

    Raises:
        UserError: the tokenizer joins digits.
    """
    digits, rows = digit_ids(model), []
    for conversation in conversations:
        row = conversation.transcript().tokens(model.tokenizer)
        wanted = tuple(digits[int(digit)] for digit in conversation.code)
        if any(row.ids[row.part(part)] != wanted for part in ("code", "answer")):
            raise UserError(f"The tokenizer of {model.name} does not make one token of each digit; give another model.")
        rows.append(row)
    return rows


def digit_ids(model: Model) -> list[int]:
    """The ids of the ten digits.

    Raises:
        UserError: the tokenizer joins digits.
    """
    ids = model.tokenizer("0123456789", add_special_tokens=False)["input_ids"]
    if len(ids) != 10:
        raise UserError(f"The tokenizer of {model.name} does not make one token of each digit; give another model.")
    return ids


def caches_of(model: Model, rows: Sequence[Tokens], sources: Collection[ArmState]) -> dict[ArmState, KVCache]:
    """The cache that each source is read from, and after which the model is asked."""
    pieces = {name: [row[row.span(name)] for row in rows] for name in rows[0].names}

    def extended(past: KVCache | None, names: Sequence[str]) -> KVCache:
        texts = (pieces[name] for name in names)
        return model.extend(past, [reduce(add, text) for text in zip(*texts, strict=True)])[0]

    needed: set[ArmState | None] = {*sources}
    for place in reversed(READINGS):
        needed |= {READINGS[place][0]} if place in needed else set()
    caches: dict[ArmState | None, KVCache] = {None: extended(None, [name for name in rows[0].names if name in BEFORE])}
    for place, (past, names, hidden) in READINGS.items():
        if place in needed:
            cache = extended(caches[past], names) if names else caches[past]
            caches[place] = cache.mask(HIDDEN) if hidden else cache
    return {source: caches[source] for source in sources}


def shown_alone(cache: KVCache, segment: str) -> KVCache:
    """The slots of a segment after the system prompt, and no others; what comes next stands where it did."""
    return cache.select(*(name for name in cache.ledger.names if name in ("preamble", "system", segment)))


def alone_of(model: Model, conversations: Sequence[Conversation], source: ArmState, batch: int) -> KVCache:
    """The slots of a source's segment after the system prompt, a row for each conversation, of which so many are read
    at once."""
    caches = []
    for start in Bar(range(0, len(conversations), batch), desc="Reading slots", unit="batch", leave=False):
        rows = token_rows(model, conversations[start : start + batch])
        caches.append(shown_alone(caches_of(model, rows, [source])[source], ARMS[source.arm]))
    return KVCache.join(caches)


def vectors(model: Model, cache: KVCache, segment: str) -> tuple[Float[Tensor, "rows layers slots width"], Tensor]:
    """K, unrotated, and V of a segment's slots, KV heads side by side, padded on the right with zeros; and how many
    slots each row has."""
    there = cache.ledger.in_segments([segment])
    taken = cache.take(*cache.ledger.order(there))
    shown = ~taken.ledger.padding
    at = taken.ledger.origins
    layers = []
    for keys, values, rotary in zip(taken.keys, taken.values, model.lanes.rotaries, strict=True):
        plain = keys if rotary is None else Rotation.between(rotary, at, torch.zeros_like(at)).of(keys)
        both = torch.cat([part.transpose(1, 2).flatten(2) for part in (plain, values)], -1).float()
        layers.append(both * shown[..., None])
    return torch.stack(layers, 1), shown.sum(1)


def last_slots(
    vectors: Float[Tensor, "rows layers slots width"], lengths: Tensor, count: int
) -> Float[Tensor, "rows layers count width"]:
    """The last so many slots of each row, zeros before the first."""
    index = lengths[:, None] - count + torch.arange(count, device=lengths.device)
    picked = vectors.gather(2, index.clamp(min=0)[:, None, :, None].expand(-1, vectors.shape[1], -1, vectors.shape[3]))
    return picked * (index >= 0)[:, None, :, None]


def asked(
    model: Model, cache: KVCache, rows: Sequence[Tokens], digits: Sequence[int]
) -> Float[Tensor, "rows places classes"]:
    """Log-probabilities of the ten digits at each place of the code, after the right ones before it."""
    texts = [row[: row.part("answer").stop - 1] for row in rows]
    starts = entries(cache.ledger.following, int)
    texts = [text[text.span("ask")].shifted(start) for text, start in zip(texts, starts, strict=True)]
    _, logits = model.extend(cache, texts, logits=CODE_LENGTH)
    return logits.float().log_softmax(-1)[..., list(digits)]


def neutral_rows(model: Model, conversations: Sequence[Conversation]) -> list[Tokens]:
    """One question for all, which names neither subject nor noun, with each conversation's code in its answer."""
    first = conversations[0]
    (row,) = token_rows(model, [replace(first, drawn={**first.drawn, "questions": -1})])
    span, digits = row.part("answer"), digit_ids(model)

    def coded(code: str) -> Tokens:
        return replace(
            row, ids=(*row.ids[: span.start], *(digits[int(digit)] for digit in code), *row.ids[span.stop :])
        )

    return [coded(conversation.code) for conversation in conversations]


def read_batch(
    model: Model, conversations: Sequence[Conversation], arms: Sequence[str], slots: Sequence[int], asks: Sequence[str]
) -> dict[str, Tensor]:
    """What is kept of each source: `pooled` features, those of its last `slots`, and what the model answers.

    Args:
        slots: how many of the last slots, and at which layers; none where it is empty.
        asks: `asked` with the whole context in view, `neutral` with only the segment's slots after the system prompt.
    """
    rows, digits = token_rows(model, conversations), digit_ids(model)
    plain = neutral_rows(model, conversations) if "neutral" in asks else []
    kept: dict[str, Tensor] = {}
    sources = dict.fromkeys(place.source for place in places_of(arms))
    for place, cache in caches_of(model, rows, sources).items():
        segment = ARMS[place.arm]
        read, lengths = vectors(model, cache, segment)
        tensors = {"pooled": (read.sum(2) / lengths[:, None, None]).half()}
        if slots:
            count, *layers = slots
            tensors["slots"] = last_slots(read[:, layers], lengths, count).half()
        if "asked" in asks:
            tensors["asked"] = asked(model, cache, rows, digits)
        if "neutral" in asks:
            tensors["neutral"] = asked(model, shown_alone(cache, segment), plain, digits)
        kept |= {f"{name}.{place.name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return kept


def labels_of(conversations: Sequence[Conversation]) -> Tensor:
    """The digits of each code, by place."""
    return torch.tensor([[int(digit) for digit in conversation.code] for conversation in conversations]).T.contiguous()


def spread(layers: int, count: int) -> list[int]:
    """So many layers, evenly spread, the last one among them."""
    return sorted({round((number + 1) * layers / count) - 1 for number in range(min(count, layers))})
