"""What edits make of the cache of a conversation, with the Python that does the same."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.app.address import Edit
from kvprobe.attention.alignment import aligned
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import changed_slots
from kvprobe.editing import splice, summarise
from kvprobe.editing.summaries import REQUEST, SUMMARY
from kvprobe.errors import UserError
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.faults.scope import Scope
from kvprobe.inference.model import Model
from kvprobe.inference.trials import struck
from kvprobe.policies.written import as_policy
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True)
class EditedCache:
    """A cache after some edits.

    Attributes:
        whole: the cache of the conversation, and of the summaries that the model has written since, as it wrote them;
            its slots are those of the conversation.
        places: for each slot of the cache, which of these it is.
        written: the summaries, and which of these slots the model could not see when it wrote each.
        damaged: slots of the conversation that were struck and were not computed again since.
        notes: warnings of the library, in order.
        code: Python that makes this cache of a `model` and a `chat`, line by line.
    """

    whole: KVCache
    cache: KVCache
    places: Int[Tensor, "slots"]
    written: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    damaged: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    code: tuple[str, ...] = ("cache = model.prefill(chat)",)

    @property
    def untouched(self) -> bool:
        return len(self.code) == 1

    def here(self, slots: Sequence[int]) -> list[int]:
        """The slots of the cache that are these of the conversation: the first, and the one after the last.

        Raises:
            UserError: none of them is left.
        """
        inside = (self.places >= slots[0]) & (self.places < slots[1])
        if not (left := inside.nonzero()[:, 0].tolist()):
            raise UserError(f"Slots {slots[0]}–{slots[1] - 1} are no longer in the cache; choose others.")
        return left


Acted = tuple[KVCache, Int[Tensor, "slots"], list[str]]
"""A cache, the places of its slots, and the code."""


def edited(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> EditedCache:
    """The cache after one more edit.

    Args:
        history: the tokens of the conversation.

    Raises:
        UserError: the edit does not fit this cache or this model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if edit.kind == "compact":
            before = _with_summary(model, before, edit.text)
            edit = Edit(edit.then, edit.segments, edit.slots)
        cache, places, code = _ACTS[edit.kind](model, before, edit, history)
    damaged = before.damaged & set(places.tolist()) if edit.kind != "restart" else frozenset[int]()
    if edit.kind == "damage":
        seen = model.as_seen(before.cache) if before.cache.ledger.rotated else before.cache
        damaged |= set(places[changed_slots(seen, cache)].tolist())
    notes = dict.fromkeys([*before.notes, *(str(warning.message) for warning in caught)])
    code = code if edit.kind == "policy" and len(code) == 1 and "prefill" in code[0] else [*before.code, *code]
    return replace(before, cache=cache, places=places, damaged=damaged, notes=tuple(notes), code=tuple(code))


def _with_summary(model: Model, before: EditedCache, request: str) -> EditedCache:
    """The cache after the model wrote a summary with it."""
    name = next(name for name in _summary_names() if name not in before.whole.ledger.names)
    request = request or REQUEST
    cache = summarise(model, before.cache, request=request, segment=name)
    new = torch.arange(cache.slots, device=before.places.device)[None] >= before.cache.slots
    summary = cache.take(*cache.ledger.order(new))
    summary = replace(summary, ledger=replace(summary.ledger, quantisation=None))
    whole = model.as_seen(splice(before.whole, summary))
    added = torch.arange(before.whole.slots, whole.slots, device=before.places.device)
    in_view = set(before.places[before.cache.ledger.live_somewhere[0]].tolist())
    unseen = tuple(slot for slot in range(before.whole.slots) if slot not in in_view)
    arguments = f", {request=}" * (request != REQUEST) + f", segment={name!r}" * (name != SUMMARY)
    return replace(
        before,
        whole=whole,
        cache=cache,
        places=torch.cat([before.places, added]),
        written={**before.written, name: unseen},
        code=(*before.code, "from kvprobe.editing import summarise", f"cache = summarise(model, cache{arguments})"),
    )


def _summary_names() -> Iterator[str]:
    yield SUMMARY
    yield from (f"{SUMMARY} {number}" for number in count(2))


def _where(before: EditedCache, edit: Edit) -> tuple[dict[str, object], str]:
    """What edit acts on, as arguments and as code."""
    if edit.segments:
        return {"segments": edit.segments}, ", ".join(map(repr, edit.segments))
    here = before.here(edit.slots)
    whole = here == [*range(here[0], here[-1] + 1)]
    return {"slots": here}, f"slots=range({here[0]}, {here[-1] + 1})" if whole else f"slots={here}"


def _mask(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    where, code = _where(before, edit)
    cache = before.cache.mask(*edit.segments, slots=where.get("slots"))  # pyright: ignore[reportArgumentType]
    return cache, before.places, [f"cache = cache.mask({code})"]


def _evict(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    where, code = _where(before, edit)
    gone = before.cache.chosen(edit.segments, where.get("slots"))[0]  # pyright: ignore[reportArgumentType]
    cache = before.cache.evict(slots=gone[None])
    if not cache.slots:
        raise UserError("Nothing would be left of the conversation; keep at least one slot.")
    return cache, before.places[~gone], [f"cache = cache.evict({code})"]


def _reindex(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    if not model.lanes.can_reindex:
        raise UserError(f"Keys of {model.name} cannot be rotated to other positions; evict instead.")
    cache, places, (code,) = _evict(model, before, edit, history)
    return cache.reindex(), places, [f"{code}.reindex()"]


def _restart(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    one, *more = edit.segments
    segments = edit.segments if more else one
    policy = f"RestartRebuilt({segments!r})"
    left = before.cache.ledger.live_somewhere & ~before.cache.ledger.in_segments(edit.segments)
    if not bool(left.any()):
        raise UserError("Nothing would be left of the conversation; keep at least one message.")
    return model.apply(policy, before.cache), before.places[left[0]], [f"cache = model.apply({policy!r}, cache)"]


def _damage(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    named = CATALOGUE[edit.fault]
    where = {"segments": edit.segments} if edit.segments else _where(before, edit)[0] if edit.slots else {}
    scope: dict[str, object] = {"rate": edit.rate, **where, "parts": named.parts}
    fault = named.make(scope=Scope(**scope))  # pyright: ignore[reportArgumentType]
    settings = ", ".join(f"{name}={value!r}" for name, value in scope.items())
    code = [
        "from kvprobe.faults.catalogue import CATALOGUE",
        "from kvprobe.inference.trials import struck",
        f"fault = CATALOGUE[{edit.fault!r}].make(scope=kv.faults.Scope({settings}))",
        f"cache = struck(model, cache, fault, seed={edit.seed})",
    ]
    return struck(model, before.cache, fault, seed=edit.seed), before.places, code


def _quantise(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    policy = f"Quantise({edit.bits}, tail=0)"
    return model.apply(policy, before.cache), before.places, [f"cache = model.apply({policy!r}, cache)"]


def _policy(model: Model, before: EditedCache, edit: Edit, history: Tokens) -> Acted:
    observes = as_policy(edit.policy).observes
    if observes is not None and not before.untouched:
        raise UserError(
            f"{edit.policy} decides by the attention that it saw while the conversation was read; make it the first "
            "edit."
        )
    start = before.cache if observes is None else model.watch(history, queries=observes)
    cache = model.apply(edit.policy, start)
    if (kept := aligned(before.cache.ledger, cache.ledger)) is None:
        raise UserError(f"{edit.policy} leaves slots that the page cannot match to the conversation; use Python.")
    apply = f"cache = model.apply({edit.policy!r}, cache)"
    code = apply if observes is None else f"cache = model.prefill(chat, policy={edit.policy!r})"
    return cache, before.places[kept], [code]


_ACTS: Mapping[str, Callable[[Model, EditedCache, Edit, Tokens], Acted]] = {
    "mask": _mask,
    "evict": _evict,
    "re-index": _reindex,
    "restart": _restart,
    "damage": _damage,
    "quantise": _quantise,
    "policy": _policy,
}


def script(load: str, address_code: Sequence[str], code: Sequence[str], ask: str, new: int) -> str:
    """A whole Python script that makes the cache and asks the question; `load` is the Python that gives the model."""
    imports = [line for line in dict.fromkeys(code) if line.startswith("from ")]
    rest = [line for line in code if not line.startswith("from ")]
    end = f"print(model.generate(cache, {ask!r}, max_new_tokens={new}).text)"
    return "\n".join(["import kvprobe as kv", *imports, "", f"model = {load}", *address_code, *rest, end, ""])


def conversation_code(messages: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """The lines of Python that write a conversation."""
    lines = ["chat = kv.Transcript.from_messages(", "    ["]
    lines += [f"        {dict(message)!r}," for message in messages]
    plain_names = [f"m{number}" for number in range(len(names))]
    return [*lines, "    ]", *([] if [*names] == plain_names else [f"    , names={[*names]!r}"]), ")"]
