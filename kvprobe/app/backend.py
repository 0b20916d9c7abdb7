"""What the microscope asks of a model: of one in this process, which can do all of it, or of one in a llama-server."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from kvprobe.app.address import Address
from kvprobe.app.edited import EditedCache, EditingModel
from kvprobe.app.measures import Rows, contamination, live_bytes, slot_bytes, state_bytes
from kvprobe.app.readings import ExchangeReadings, readings
from kvprobe.app.refusals import Refusal, refused_by_model, refused_by_state
from kvprobe.attention import Patterns, attend
from kvprobe.cache.cache import KVCache
from kvprobe.comparison import Reply, replies_under
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


@runtime_checkable
class OfFirst(Protocol):
    """What is known of the reply with everything in view."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...


class Backend(ABC):
    """A model, and what it can tell of its caches.

    Attributes:
        load: lines of Python that give the model its name, `model`.
        missing: measures (`attention`, `readings`, `contamination`) that it does not have, each with the reason in a
            sentence.
    """

    load: tuple[str, ...]
    missing: Mapping[str, str] = {}

    @property
    @abstractmethod
    def model(self) -> EditingModel:
        """That edits act with."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of its numbers."""
        return ()

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, object]:
        """Its `name`, `layers`, and `dtype`, in which it holds caches."""

    @abstractmethod
    def prompt(self, cache: KVCache, ask: str) -> Tokens:
        """The user's next message after a cache."""

    @abstractmethod
    def first(self, cache: KVCache, question: Tokens, new: int) -> tuple[OfFirst, Reply]:
        """The reply with everything in view, of at most `new` tokens."""

    @abstractmethod
    def reply(self, cache: KVCache, question: Tokens, first: Any, new: int) -> Reply:
        """The reply with an edited cache, held against the first one."""

    @abstractmethod
    def memory(self, full: KVCache, now: KVCache) -> Mapping[str, object]:
        """Bytes of the whole conversation (`full`) and of the cache as it is (`held`), each of `slots` and of `state`;
        of what later queries may read (`live`, None where that is not known apart); and a `note` in a sentence."""

    def refused(self, whole: EditedCache) -> Iterable[Refusal]:
        """The edits that it refuses, whatever was done before."""
        return refused_by_model(self.model, whole)

    def refused_after(self, now: EditedCache) -> Iterable[Refusal]:
        """Those that it refuses in a state."""
        return refused_by_state(now)

    def attend(self, asked: Tokens, cache: KVCache, queries: Sequence[int]) -> Patterns:
        """The attention of these queries of a text after a cache.

        Raises:
            UserError: it cannot be shown.
        """
        raise UserError(self.missing["attention"])

    def contamination(self, now: EditedCache) -> Rows | None:
        """See `kvprobe.app.measures.contamination`."""
        raise UserError(self.missing["contamination"])

    def readings(self, address: Address, now: EditedCache) -> ExchangeReadings:
        """See `kvprobe.app.readings.readings`."""
        raise UserError(self.missing["readings"])


class ModelBackend(Backend):
    """A model in this process."""

    def __init__(self, model: Model, load: str | None = None) -> None:
        self._model = model
        self.load = (f"model = {load or f'kv.load({model.name!r})'}",)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def facts(self) -> Mapping[str, object]:
        return {"name": self.model.name, "layers": self.model.geometry.n_layers, "dtype": self.model.dtype}

    def prompt(self, cache: KVCache, ask: str) -> Tokens:
        return self.model.prompts(cache, ask)[0]

    def first(self, cache: KVCache, question: Tokens, new: int) -> tuple[OfFirst, Reply]:
        first, replies = replies_under(self.model, {"full": cache}, question, max_new_tokens=new)
        return first, replies["full"]

    def reply(self, cache: KVCache, question: Tokens, first: Any, new: int) -> Reply:
        by_head = not cache.ledger.uniform or cache.ledger.quantisation is not None
        counted = ("now",) if by_head else ()
        _, replies = replies_under(self.model, {"now": cache}, question, first, max_new_tokens=new, priced=counted)
        return replies["now"]

    def memory(self, full: KVCache, now: KVCache) -> Mapping[str, object]:
        state = self._state_bytes
        note = "A mask hides slots and frees nothing; an eviction frees them."
        note += " A state is as large whatever it has read." * bool(state)
        sizes = {name: {"slots": slot_bytes(cache), "state": state} for name, cache in (("full", full), ("held", now))}
        return {**sizes, "live": live_bytes(now), "note": note}

    @cached_property
    def _state_bytes(self) -> int:
        return state_bytes(self.model)

    def attend(self, asked: Tokens, cache: KVCache, queries: Sequence[int]) -> Patterns:
        _ = self.model.lanes.attention_proved
        return attend(self.model, asked, cache, queries=queries)

    def contamination(self, now: EditedCache) -> Rows | None:
        return contamination(self.model, now)

    def readings(self, address: Address, now: EditedCache) -> ExchangeReadings:
        return readings(self.model, address, now)
