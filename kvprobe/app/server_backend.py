"""The microscope on a model in a llama-server: its slot is saved, edited here and restored, and the server answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvprobe.app.backend import Backend, OfFirst
from kvprobe.app.edited import EditedCache
from kvprobe.app.refusals import OBSERVERS, UNEVEN, Refusal
from kvprobe.cache.cache import KVCache
from kvprobe.comparison import Reply
from kvprobe.engines.served_model import LIKELIEST, NO_ATTENTION, RestoredSlot, ServedModel, divergence_at_least
from kvprobe.text.tokens import Tokens, token_texts

_WHY = "is not available from a llama-server"
MISSING = {
    "attention": f"Attention {_WHY}: it does not give its attention.",
    "contamination": f"This {_WHY}: it reads tokens without gaps in their positions alone, so there is nothing at the "
    "same positions to hold the slots against.",
    "readings": f"This {_WHY}: a reading is held against the same text at the same positions, which it cannot read.",
}
"""What a server's slot is not enough for, and why."""
_UNEVEN = "keeps other slots in each layer or head, which llama.cpp cannot express."
_LAST = "llama.cpp goes on right after a slot in view, so the last one cannot be hidden; re-index, or choose others."


@dataclass(frozen=True)
class ServedFirst:
    """The server's reply with everything in view.

    Attributes:
        ids: its tokens.
        tokens: as text.
        logprobs: before each of them, those of the likeliest tokens.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    logprobs: Sequence[Mapping[int, float]]


class ServerBackend(Backend):
    """A model in a llama-server."""

    missing = MISSING

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        where = [repr(model.server.url), f"slots={str(model.server.folder)!r}"]
        where += [] if model.gguf is None else [f"gguf={str(model.gguf)!r}"]
        code = f"model = ServedModel.at({', '.join(where)})"
        self.load = ("from kvprobe.engines.served_model import ServedModel", code)

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def notes(self) -> tuple[str, ...]:
        if self.model.server.vocabulary <= LIKELIEST:
            return ()
        return (
            f"The server gives its {LIKELIEST} likeliest tokens at each step; all others count as one, so KL is at "
            "least what is shown.",
        )

    @property
    def facts(self) -> Mapping[str, object]:
        kinds = {rows.kind.name.lower() for memory in self.model.held_slot.attention for rows in memory.keys}
        dtype = f"{' and '.join(sorted(kinds))} in a llama-server"
        return {"name": self.model.name, "layers": self.model.n_layers, "dtype": dtype}

    def refused(self, whole: EditedCache) -> Iterable[Refusal]:
        """Those of any model, and policies that decide by attention or by head."""
        yield from super().refused(whole)
        yield from (Refusal("policy", NO_ATTENTION, name) for name in OBSERVERS)
        yield from (Refusal("policy", f"{name} {_UNEVEN}", name) for name in UNEVEN)

    def refused_after(self, now: EditedCache) -> Iterable[Refusal]:
        """Those of any model, and to hide the last slot: llama.cpp goes on right after a live one."""
        yield from super().refused_after(now)
        last = (int(now.places[-1]),)
        yield from (Refusal(kind, _LAST, slots=last) for kind in ("mask", "evict"))

    def prompt(self, cache: KVCache, ask: str) -> Tokens:
        return self.model.prompts(cache, ask)[0]

    def first(self, cache: KVCache, question: Tokens, new: int) -> tuple[OfFirst, Reply]:
        start = self.model.restored(cache, question)
        (ids,) = self.model.answer(start, new).tokens
        first = ServedFirst(ids, token_texts(ids, self.model.tokenizer), start.logprobs(ids))
        return first, self._reply("full", cache, start, first, new)

    def reply(self, cache: KVCache, question: Tokens, first: ServedFirst, new: int) -> Reply:
        start = self.model.restored(cache, question.shifted(int(cache.ledger.following[0])))
        return self._reply("now", cache, start, first, new)

    def _reply(self, arm: str, cache: KVCache, start: RestoredSlot, first: ServedFirst, new: int) -> Reply:
        own, expected = self.model.answer(start, new), start.logprobs(first.ids)
        kls = [divergence_at_least(*pair) for pair in zip(first.logprobs, expected, strict=True)]
        return Reply(
            arm,
            own.text,
            tuple(logs[token] for logs, token in zip(expected, first.ids, strict=True)),
            sum(kls) / len(kls),
            int(cache.ledger.live_somewhere.sum()),
            sum(self._bytes(cache).values()),
            tuple(kls),
            token_texts(own.tokens[0], self.model.tokenizer),
            own.logprobs[0],
        )

    def memory(self, full: KVCache, now: KVCache) -> Mapping[str, object]:
        note = "The server holds no hidden slots: a mask frees them, as an eviction does."
        return {"full": self._bytes(full), "held": self._bytes(now), "live": None, "note": note}

    def _bytes(self, cache: KVCache) -> dict[str, int]:
        """Of the slots in view, as the server stores them."""
        live = cache.ledger.live.expand(cache.n_layers, -1, -1, -1)[:, 0, 0].sum(1).tolist()
        return {"slots": sum(map(int.__mul__, live, self.model.slot_bytes)), "state": 0}
