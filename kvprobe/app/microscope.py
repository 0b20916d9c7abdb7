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
from kvprobe.app.backend import Backend, ModelBackend, OfFirst
from kvprobe.app.edited import EditedCache, edited
from kvprobe.app.measures import Rows, change, slots_now
from kvprobe.app.page import offline_page
from kvprobe.app.python import script
from kvprobe.app.readings import ExchangeReadings
from kvprobe.app.refusals import Refusal
from kvprobe.app.server_backend import ServerBackend
from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.comparison import Reply
from kvprobe.engines.served_model import ServedModel
from kvprobe.errors import UserError
from kvprobe.exported import Exported
from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView
from kvprobe.report.views.page import Showable
from kvprobe.report.views.patterns import patterns_view
from kvprobe.text.tokens import Tokens, token_texts
from kvprobe.text.transcript import Transcript

KEPT, KEPT_BYTES = 24, 2**31
"""Caches, replies, patterns and readings that are kept at a time, of each kind; and bytes of caches."""
MOST_SLOTS = 1024
"""Of a conversation on a page."""
MOST_QUERIES = 12
"""Tokens of question and reply whose attention is shown: the last of the question, and the first of the reply."""

Kept = TypeVar("Kept")
OnStep = Callable[[str], object]


@dataclass(frozen=True)
class AppState(Exported, Showable):
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
        contamination_left_out: why that is not there, where it cannot be measured.
        hidden: the slots that no later query sees.
        refused: what cannot be done next.
        memory: see `kvprobe.app.backend.Backend.memory`; and `slots` in view, `of` all.
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
    contamination_left_out: str
    hidden: tuple[int, ...]
    refused: tuple[Refusal, ...] = field(repr=False)
    memory: Mapping[str, object]
    attention: AttentionView | None = field(repr=False)
    attention_left_out: str
    readings: ExchangeReadings | None = field(repr=False)
    readings_left_out: str
    notes: tuple[str, ...]
    python: str = field(repr=False)
    seconds: float

    @property
    def html(self) -> str:
        """The page of this state, which needs no other."""
        state = self.to_plain()
        return offline_page({"start": {**state["address"], "edits": []}, "states": [state], "at": state["address"]})

    @property
    def height(self) -> int:
        return 60


class Microscope:
    """A model, and what was computed for the last addresses.

    Attributes:
        backend: of the model.
    """

    def __init__(self, model: Model | ServedModel, load: str | None = None) -> None:
        """Args:
        load: the Python that gives a model in this process; by default that of its name.
        """
        self.backend: Backend = ServerBackend(model) if isinstance(model, ServedModel) else ModelBackend(model, load)
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
        spread, no_spread = self._measured("contamination", True, lambda: self.backend.contamination(now))
        if attention:
            step("recording attention")
        asked = question.answered(first.ids)
        view, no_view = self._measured("attention", attention, lambda: self._attention(address, asked, now))
        if read:
            step("asking probes")
        known, unknown = self._measured(
            "readings", read, lambda: self._once("readings", address, lambda: self.backend.readings(address, now))
        )
        tokenizer = self.backend.model.tokenizer
        return AppState(
            model=self.backend.facts,
            address=address,
            edits=tuple(map(str, address.edits)),
            slots={"text": [*token_texts(now.whole.ledger.tokens[0].tolist(), tokenizer)], **places},
            written=now.written,
            expected=first.tokens,
            replies=replies,
            change=change(now),
            contamination=spread,
            contamination_left_out=no_spread,
            hidden=tuple(slot for slot, seen in enumerate(places["seen"]) if not seen),
            refused=self._refused(full, now),
            memory={
                **self.backend.memory(full.cache, now.cache),
                "slots": int(now.cache.ledger.live_somewhere.sum()),
                "of": now.whole.slots,
            },
            attention=view,
            attention_left_out=no_view,
            readings=known,
            readings_left_out=unknown,
            notes=(*now.notes, *self.backend.notes),
            python=script(self.backend.load, address, now.code, attention=attention, read=read),
            seconds=round(time.perf_counter() - began, 3),
        )

    def _refused(self, full: EditedCache, now: EditedCache) -> tuple[Refusal, ...]:
        by_model = self._once("refused", "by the model", lambda: tuple(self.backend.refused(full)))
        return (*by_model, *self.backend.refused_after(now))

    def _read(self, address: Address) -> EditedCache:
        """The cache of the whole conversation."""

        def read() -> EditedCache:
            history = self.backend.model.tokens(address.chat)[0]
            if len(history) > MOST_SLOTS:
                raise UserError(
                    f"The conversation has {len(history):,} tokens, and the page shows at most {MOST_SLOTS:,}; give a "
                    "shorter one, or use Python."
                )
            cache = self.backend.model.prefill(history)
            return EditedCache(cache, cache, torch.arange(cache.slots, device=cache.ledger.tokens.device))

        return self._once("read", address.messages, read)

    def _after(self, address: Address, count: int, before: EditedCache, edit: Edit) -> EditedCache:
        """The cache after the first edits of an address."""
        key, backend = (address.messages, address.edits[:count]), self.backend
        return self._once("edited", key, lambda: edited(backend.model, before, edit, address.chat))

    def _first(self, address: Address, full: KVCache) -> tuple[Tokens, OfFirst, Reply]:
        """The question, and the reply to it with everything in view."""

        def answer() -> tuple[Tokens, OfFirst, Reply]:
            question = self.backend.prompt(full, address.ask)
            return (question, *self.backend.first(full, question, address.new))

        return self._once("first", replace(address, edits=()), answer)

    def _reply(self, address: Address, question: Tokens, first: OfFirst, cache: KVCache) -> Reply:
        return self._once("reply", address, lambda: self.backend.reply(cache, question, first, address.new))

    def _measured(self, name: str, wanted: bool, measure: Callable[[], Kept]) -> tuple[Kept | None, str]:
        """What is wanted of this name, and why it is not there: that it cannot be is said unasked."""
        if why := self.backend.missing.get(name):
            return None, why
        try:
            return (measure() if wanted else None), ""
        except UserError as error:
            return None, str(error)

    def _attention(self, address: Address, asked: Tokens, now: EditedCache) -> AttentionView:
        """Attention of the question's last tokens and the reply, before and after."""
        asked = asked.shifted(int(now.whole.ledger.following[0]))
        rows = range(len(asked))[-MOST_QUERIES:]
        last = max((number for number, edit in enumerate(address.edits, 1) if edit.kind == "compact"), default=0)
        key, attend = replace(address, edits=address.edits[:last]), self.backend.attend
        patterns = self._once("attention", key, lambda: attend(asked, now.whole, rows))
        following = int(now.cache.ledger.following[0])
        after = attend(asked.shifted(following), now.cache, rows) if address.edits else None
        return patterns_view(patterns, after, chat=address.chat, caption=_CAPTION)

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


@checked_arguments
def look(
    model: Model | ServedModel,
    chat: Transcript,
    ask: str,
    *edits: Edit,
    new: int = 24,
    attention: bool = False,
    read: bool = False,
) -> AppState:
    """What the page shows of a conversation and a question after some edits; `.show()` of it is the same view.

    Args:
        new: the most tokens of a reply.
        attention: see `Microscope.state`, as for `read`.

    Raises:
        UserError: see `Microscope.state` and `Address`.
    """
    address = replace(Address.of_chat(chat, ask), edits=edits, new=new)
    return Microscope(model).state(address, attention=attention, read=read)
