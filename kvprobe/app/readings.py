"""What messages after hidden ones know of them: what published probes read there, and whether the reply needs it.

Both are held against the same text read without the hidden messages, at the same positions: only what goes beyond it
comes from them.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvprobe.app.address import Address
from kvprobe.app.edited import EditedCache
from kvprobe.comparison import replies_under
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.under_policy import tokens_at
from kvprobe.patching import aligned
from kvprobe.probes.scan import LEAK, NONE, Scan, scan
from kvprobe.text.transcript import Transcript

HIDING = ("mask", "evict", "re-index", "compact")
READ = ("probe", "place", "reads", "probability", "base_rate", "restart_probability", "bits", "gain", "verdict")
"""Columns of a scan that are shown."""


@dataclass(frozen=True)
class ExchangeReading:
    """What some later messages know of the hidden ones.

    Attributes:
        segments: the messages: an exchange, as probes read them.
        probes: what each probe reads; see `kvprobe.probes.scan.Scan`.
        readable: whether one of them shows a leak; None where no probe is for this.
        kl: how far the reply moves if what they hold of the hidden messages is taken out, nats per token.
        reply: what the model then says.
        used: whether that is something else than it says now.
    """

    segments: tuple[str, ...]
    probes: tuple[Mapping[str, object], ...]
    readable: bool | None
    kl: float
    reply: str
    used: bool


@dataclass(frozen=True)
class ExchangeReadings:
    """What is known of hidden messages by those after them.

    Attributes:
        exchanges: in order; where there are several, the last one is all of them at once.
        left_out: why no probe was asked; empty if some were.
    """

    exchanges: tuple[ExchangeReading, ...] = field(repr=False)
    left_out: str = ""


def readings(model: Model, address: Address, now: EditedCache) -> ExchangeReadings:
    """What later messages know of the hidden ones.

    Raises:
        UserError: something else was done than to hide whole messages, or nothing comes after them.
    """
    hidden, later = _parted(address, now)
    chat, found, left_out = address.chat, None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slot 0, which the page has shown
        try:
            found = scan(model, chat, hidden, until=chat.segments[-1])
        except UserError as error:
            left_out = str(error)
    groups = [*_exchanges(chat, found, later), *((name,) for name in later if name in now.written)]
    groups += [tuple(later)] if len(groups) > 1 else []
    live = now.cache.ledger.live_somewhere
    left = now.cache.take(*now.cache.ledger.order(live))
    fresh = model.prefill(tokens_at(now.whole.ledger, 0, now.places[live[0]].sort().values))
    fits = aligned(model, left, fresh)
    caches = {"now": fits.base} | {
        str(number): fits.base.patch(fits.cache, *group) for number, group in enumerate(groups)
    }
    question = model.prompts(fits.base, address.ask)[0]
    _, replies = replies_under(model, caches, question, max_new_tokens=address.new)
    exchanges = []
    for number, group in enumerate(groups):
        rows = [] if found is None else _rows(found, group)
        reply = replies[str(number)]
        verdicts = {row["verdict"] for row in rows}
        readable = LEAK in verdicts if verdicts & {LEAK, NONE} else None
        used = reply.tokens != replies["now"].tokens
        exchanges.append(ExchangeReading(tuple(group), tuple(rows), readable, reply.kl, reply.text, used))
    return ExchangeReadings(tuple(exchanges), left_out)


def _parted(address: Address, now: EditedCache) -> tuple[list[str], list[str]]:
    """The messages that are hidden, and those after the first of them, with summaries, that are not.

    Raises:
        UserError: see `readings`.
    """
    ledger, whole = now.cache.ledger, now.whole.ledger
    seen = torch.zeros(whole.slots, dtype=torch.bool)
    seen[now.places[ledger.live_somewhere[0]].cpu()] = True
    in_view = {name: seen[whole.in_segments(name)[0].cpu()] for name in (*address.chat.segments, *now.written)}
    hidden = [name for name in address.chat.segments if not in_view[name].any()]
    partly = [name for name, slots in in_view.items() if name not in hidden and not slots.all()]
    if partly or not ledger.uniform or any(edit.kind not in HIDING for edit in address.edits):
        raise UserError(
            "What is read and used is shown where whole messages are hidden and nothing else was done; undo the rest."
        )
    first = min(map(address.chat.segments.index, hidden), default=len(in_view))
    later = [name for name in list(in_view)[first:] if name not in hidden and in_view[name].any()]
    if not hidden or not later:
        raise UserError("No message in view comes after a hidden one; hide an earlier message.")
    return hidden, later


def _exchanges(chat: Transcript, found: Scan | None, later: Sequence[str]) -> list[tuple[str, ...]]:
    """The later messages in groups, as probes read them; each by itself where none was asked."""
    groups: dict[str, list[str]] = {}
    joined = chat.messages if found is None else found.chat.messages
    for message, within in zip(chat.messages, joined, strict=True):
        if message.segment in later:
            groups.setdefault(within.segment, []).append(message.segment)
    return [tuple(dict.fromkeys(group)) for group in groups.values()]


def _rows(found: Scan, group: Sequence[str]) -> list[dict[str, object]]:
    table = found.df()
    return table.loc[table["segment"] == "+".join(group), list(READ)].to_dict("records")
