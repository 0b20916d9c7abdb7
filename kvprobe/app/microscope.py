"""From an address to its state, as plain data: everything that the page draws. Nothing here knows of the web.

What edits share is computed once: the caches after each beginning of a list of edits are kept, the last ones used.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from kvprobe.app.address import Address, Edit
from kvprobe.app.edited import EditedCache, edited
from kvprobe.app.measures import Rows, change, contamination, memory, slots_now
from kvprobe.app.python import conversation_code, script
from kvprobe.app.readings import ExchangeReadings, readings
from kvprobe.attention import Patterns, attend
from kvprobe.cache.cache import KVCache
from kvprobe.comparison import FirstReply, Reply, replies_under
from kvprobe.errors import UserError
from kvprobe.exported import Exported
from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView
from kvprobe.report.views.patterns import patterns_view
from kvprobe.text.tokens import Tokens, token_texts

KEPT, KEPT_BYTES = 24, 2**31
"""Caches, replies, patterns and readings that are kept at a time, of each kind; and bytes of caches."""
MOST_SLOTS = 1024
"""Of a conversation on a page."""
MOST_QUERIES = 12
"""Tokens of question and reply whose attention is shown: the last of the question, and the first of the reply."""

Kept = TypeVar("Kept")
OnStep = Callable[[str], object]


@dataclass(frozen=True)
class AppState(Exported):
    """What the page shows of one address.

    Attributes:
        model: `name`, `layers`, `dtype`.
        address: the conversation, the question, and what was done.
        edits: in words.
        slots: one entry per slot of the conversation, and of summaries that the model wrote, under each name; see
            `kvprobe.app.measures.slots_now`.
        written: the summaries, and the slots that the model could not see when it wrote each.
        expected: tokens of the reply with everything in view, as text.
        replies: the one with everything in view, and that with the cache as it is now.
        change: see `kvprobe.app.measures.change`.
        contamination: see `kvprobe.app.measures.contamination`.
        hidden: the slots that no later query sees.
        memory: see `kvprobe.app.measures.memory`.
        attention: the view of attention, before and after; None where it was not asked for or cannot be shown.
        attention_left_out: why it cannot.
        readings: see `kvprobe.app.readings`; None where they were not asked for or there are none.
        readings_left_out: why there are none.
        notes: warnings.
        python: a script that makes the same cache and asks the same question.
        seconds: that it took.
    """

    model: Mapping[str, object]
    address: Address
    edits: tuple[str, ...]
    slots: Mapping[str, list[object]] = field(repr=False)
    written: Mapping[str, tuple[int, ...]]
    expected: tuple[str, ...]
    replies: tuple[Reply, ...]
    change: Rows = field(repr=False)
    contamination: Rows | None = field(repr=False)
    hidden: tuple[int, ...]
    memory: Mapping[str, object]
    attention: AttentionView | None = field(repr=False)
    attention_left_out: str
    readings: ExchangeReadings | None = field(repr=False)
    readings_left_out: str
    notes: tuple[str, ...]
    python: str = field(repr=False)
    seconds: float


class Microscope:
    """A model, and what was computed for the last addresses.

    Attributes:
        load: the Python that gives the model; by default that of its name.
    """

    def __init__(self, model: Model, load: str | None = None) -> None:
        self.model, self.load = model, load or f"kv.load({model.name!r})"
        self._kept: dict[str, OrderedDict[Hashable, Any]] = {}

    def state(
        self, address: Address, *, attention: bool = False, read: bool = False, step: OnStep = lambda what: None
    ) -> AppState:
        """What there is to see at an address.

        Args:
            attention: whether to show attention too, which takes longer.
            read: whether to ask probes what later messages hold of hidden ones, and whether the reply needs it.
            step: is called with what is being done; an exception that it raises ends the work.

        Raises:
            UserError: the conversation cannot be read, or an edit does not fit.
        """
        began = time.perf_counter()
        step("reading the conversation")
        full = self._read(address)
        now = full
        for count, edit in enumerate(address.edits, 1):
            step(str(edit))
            now = self._after(address, count, now, edit)
        step("answering with everything in view")
        question, first, whole = self._first(address, full.cache)
        replies = (whole,)
        if address.edits:
            step("answering")
            replies = (whole, self._reply(address, question, first, now.cache))
        step("measuring")
        places = slots_now(now)
        view, left_out = None, ""
        if attention:
            step("recording attention")
            view, left_out = self._attention(address, question.answered(first.ids), now)
        known, unknown = None, ""
        if read:
            step("asking probes")
            try:
                known = self._once("readings", address, lambda: readings(self.model, address, now))
            except UserError as error:
                unknown = str(error)
        names, messages = address.names, [{"role": one.role, "content": one.content} for one in address.messages]
        return AppState(
            model={"name": self.model.name, "layers": full.cache.n_layers, "dtype": self.model.dtype},
            address=address,
            edits=tuple(map(str, address.edits)),
            slots={"text": [*token_texts(now.whole.ledger.tokens[0].tolist(), self.model.tokenizer)], **places},
            written=now.written,
            expected=first.tokens,
            replies=replies,
            change=change(now),
            contamination=contamination(self.model, now),
            hidden=tuple(slot for slot, seen in enumerate(places["seen"]) if not seen),
            memory=memory(full.cache, now),
            attention=view,
            attention_left_out=left_out,
            readings=known,
            readings_left_out=unknown,
            notes=now.notes,
            python=script(self.load, conversation_code(messages, names), now.code, address.ask, address.new),
            seconds=round(time.perf_counter() - began, 3),
        )

    def _read(self, address: Address) -> EditedCache:
        """The cache of the whole conversation."""

        def read() -> EditedCache:
            history = self.model.tokens(address.chat)[0]
            if len(history) > MOST_SLOTS:
                raise UserError(
                    f"The conversation has {len(history):,} tokens, and the page shows at most {MOST_SLOTS:,}; give a "
                    "shorter one, or use Python."
                )
            cache = self.model.prefill(history)
            return EditedCache(cache, cache, torch.arange(cache.slots, device=cache.ledger.tokens.device))

        return self._once("read", address.messages, read)

    def _after(self, address: Address, count: int, before: EditedCache, edit: Edit) -> EditedCache:
        """The cache after the first edits of an address."""
        key = (address.messages, address.edits[:count])
        return self._once("edited", key, lambda: edited(self.model, before, edit, address.chat))

    def _first(self, address: Address, full: KVCache) -> tuple[Tokens, FirstReply, Reply]:
        """The question, and the reply to it with everything in view."""

        def answer() -> tuple[Tokens, FirstReply, Reply]:
            question = self.model.prompts(full, address.ask)[0]
            first, replies = replies_under(self.model, {"full": full}, question, max_new_tokens=address.new)
            return question, first, replies["full"]

        return self._once("first", replace(address, edits=()), answer)

    def _reply(self, address: Address, question: Tokens, first: FirstReply, cache: KVCache) -> Reply:
        by_head = not cache.ledger.uniform or cache.ledger.quantisation is not None

        def answer() -> Reply:
            counted = ("now",) if by_head else ()
            _, replies = replies_under(
                self.model, {"now": cache}, question, first, max_new_tokens=address.new, priced=counted
            )
            return replies["now"]

        return self._once("reply", address, answer)

    def _attention(self, address: Address, asked: Tokens, now: EditedCache) -> tuple[AttentionView | None, str]:
        """Attention of the question's last tokens and the reply, before and after; or why it cannot be shown."""
        asked = asked.shifted(int(now.whole.ledger.following[0]))
        rows = range(len(asked))[-MOST_QUERIES:]

        def before() -> Patterns:
            return attend(self.model, asked, now.whole, queries=rows)

        try:
            _ = self.model.lanes.attention_proved
            last = max((number for number, edit in enumerate(address.edits, 1) if edit.kind == "compact"), default=0)
            patterns = self._once("attention", replace(address, edits=address.edits[:last]), before)
            following = int(now.cache.ledger.following[0])
            after = attend(self.model, asked.shifted(following), now.cache, queries=rows) if address.edits else None
            return patterns_view(patterns, after, chat=address.chat, caption=_CAPTION), ""
        except UserError as error:
            return None, str(error)

    def _once(self, kind: str, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What was made for this key before, or is made now."""
        kept = self._kept.setdefault(kind, OrderedDict())
        if key not in kept:
            kept[key] = make()
        kept.move_to_end(key)
        while len(kept) > 1 and (len(kept) > KEPT or sum(map(_nbytes, kept.values())) > KEPT_BYTES):
            kept.popitem(last=False)
        return kept[key]


def _nbytes(made: object) -> int:
    """Bytes of the caches in what was made."""
    if not isinstance(made, EditedCache):
        return 0
    return made.cache.nbytes + (made.whole.nbytes if made.written else 0)


_CAPTION = "Attention of the last tokens of question and reply."
