"""What edits make of the cache of a conversation, with the Python that does the same."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.app.address import Edit
from kvprobe.app.python import conversation_code
from kvprobe.attention.alignment import aligned
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import changed_slots
from kvprobe.editing import splice, summarise
from kvprobe.editing.splicing import refuse_quantised
from kvprobe.editing.summaries import REQUEST, SUMMARY, Writer
from kvprobe.errors import KvprobeWarning, UserError
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.faults.scope import Scope
from kvprobe.inference.rows import Readable
from kvprobe.inference.trials import Strikable, struck
from kvprobe.names import unknown
from kvprobe.patching import aligned as aligned_donor
from kvprobe.policies.policy import Policy, Scene
from kvprobe.policies.written import as_policy
from kvprobe.text.messages import Part
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript


@runtime_checkable
class EditingModel(Strikable, Writer, Protocol):
    """What edits ask of a model, wherever it runs."""

    def tokens(self, text: Readable, /) -> list[Tokens]: ...
    def watch(self, text: Readable, /, *, queries: int) -> Scene: ...
    def apply(self, policy: Policy | str, start: KVCache | Scene, /) -> KVCache: ...


@dataclass(frozen=True)
class EditedCache:
    """A cache after some edits.

    Attributes:
        whole: the cache of the conversation, and of the summaries that the model has written since, as it wrote them;
            its slots are those of the conversation.
        places: for each slot of the cache, which of these it is.
        written: the summaries, and which of these slots the model could not see when it wrote each.
        damaged: slots of the conversation that were struck and were not computed again since.
        patched: likewise, those that hold K and V of another conversation.
        notes: warnings of the library, in order.
        code: Python that makes this cache of a `model` and a `chat`, line by line.
    """

    whole: KVCache
    cache: KVCache
    places: Int[Tensor, "slots"]
    written: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    damaged: frozenset[int] = frozenset()
    patched: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    code: tuple[str, ...] = ("cache = model.prefill(chat)",)

    @property
    def untouched(self) -> bool:
        return self.cache is self.whole

    def then(self, cache: KVCache, *code: str, **changed: Any) -> "EditedCache":
        """After one more edit: the cache that it makes, the code, and what else of this it changes."""
        return replace(self, cache=cache, code=(*self.code, *code), **changed)

    def here(self, slots: Sequence[int]) -> list[int]:
        """The slots of the cache that are these of the conversation: the first, and the one after the last.

        Raises:
            UserError: none of them is left.
        """
        inside = (self.places >= slots[0]) & (self.places < slots[1])
        if not (left := inside.nonzero()[:, 0].tolist()):
            raise UserError(f"Slots {slots[0]}–{slots[1] - 1} are no longer in the cache; choose others.")
        return left


def edited(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    """The cache after one more edit.

    Args:
        chat: the conversation.

    Raises:
        UserError: the edit does not fit this cache or this model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = _ACTS[edit.kind](model, before, edit, chat)
    left = set(after.places.tolist())
    notes = tuple(
        dict.fromkeys([*before.notes, *(str(one.message) for one in caught if one.category is KvprobeWarning)])
    )
    return replace(after, damaged=after.damaged & left, patched=after.patched & left, notes=notes)


def _compact(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    return _ACTS[edit.then](model, _with_summary(model, before, edit.text), edit, chat)


def _with_summary(model: EditingModel, before: EditedCache, request: str) -> EditedCache:
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
    return before.then(
        cache,
        "from kvprobe.editing import summarise",
        f"cache = summarise(model, cache{arguments})",
        whole=whole,
        places=torch.cat([before.places, added]),
        written={**before.written, name: unseen},
    )


def _summary_names() -> Iterator[str]:
    yield SUMMARY
    yield from (f"{SUMMARY} {number}" for number in count(2))


def _where(before: EditedCache, edit: Edit) -> tuple[list[int] | None, str]:
    """The slots that an edit acts on, if it names no segments, and what it acts on as code."""
    if edit.segments:
        return None, ", ".join(map(repr, edit.segments))
    here = before.here(edit.slots)
    whole = here == [*range(here[0], here[-1] + 1)]
    return here, f"slots=range({here[0]}, {here[-1] + 1})" if whole else f"slots={here}"


def _mask(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    slots, code = _where(before, edit)
    return before.then(before.cache.mask(*edit.segments, slots=slots), f"cache = cache.mask({code})")


def _evict(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    slots, code = _where(before, edit)
    gone = before.cache.chosen(edit.segments, slots)[0]
    cache = before.cache.evict(slots=gone[None])
    if not cache.slots:
        raise UserError("Nothing would be left of the conversation; keep at least one slot.")
    return before.then(cache, f"cache = cache.evict({code})", places=before.places[~gone])


def _reindex(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    after = _evict(model, before, edit, chat)
    cache = after.cache.reindex()
    _ = model.as_seen(cache)  # refuses keys that cannot be rotated
    return replace(after, cache=cache, code=(*before.code, f"{after.code[-1]}.reindex()"))


def _restart(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    one, *more = edit.segments
    segments = edit.segments if more else one
    policy = f"RestartRebuilt({segments!r})"
    left = before.cache.ledger.live_somewhere & ~before.cache.ledger.in_segments(edit.segments)
    if not bool(left.any()):
        raise UserError("Nothing would be left of the conversation; keep at least one message.")
    cache, nothing = model.apply(policy, before.cache), frozenset[int]()
    code = f"cache = model.apply({policy!r}, cache)"
    return before.then(cache, code, places=before.places[left[0]], damaged=nothing, patched=nothing)


def _damage(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    named = CATALOGUE[edit.fault]
    where = {"segments": edit.segments} if edit.segments else {"slots": _where(before, edit)[0]} if edit.slots else {}
    scope: dict[str, object] = {"rate": edit.rate, **where, "parts": named.parts}
    fault = named.make(scope=Scope(**scope))  # pyright: ignore[reportArgumentType]
    settings = ", ".join(f"{name}={value!r}" for name, value in scope.items())
    code = [
        "from kvprobe.faults.catalogue import CATALOGUE",
        "from kvprobe.inference.trials import struck",
        f"fault = CATALOGUE[{edit.fault!r}].make(scope=kv.faults.Scope({settings}))",
        f"cache = struck(model, cache, fault, seed={edit.seed})",
    ]
    cache = struck(model, before.cache, fault, seed=edit.seed)
    seen = model.as_seen(before.cache)
    here = before.places[changed_slots(seen, cache)].tolist()
    return before.then(cache, *code, damaged=before.damaged.union(here))


def _patch(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    refuse_quantised(before.cache)
    slots, code = _where(before, edit)
    other = _other(chat, edit.of, edit.text)
    said, instead = model.tokens(chat)[0], model.tokens(other)[0]
    if said.segments != instead.segments:
        counts = [tokens.segments.count(edit.of) for tokens in (said, instead)]
        raise UserError(
            f"{edit.of} has {counts[0]} tokens with its delimiters, and with the other text {counts[1]}, so that slots "
            "do not stand for one another; write a text of as many tokens."
        )
    donor, kept = model.prefill(instead), before.places[before.places < len(said)]
    fits = aligned_donor(model, before.cache, donor.select(slots=kept.tolist()))
    chosen = before.cache.chosen(edit.segments, slots)
    if bool((fits.source[chosen[0]] < 0).any()):
        raise UserError("The other conversation has no summary; patch slots of messages.")
    messages = [{"role": message.role, "content": message.text} for message in other.messages]
    lines = conversation_code(messages, [message.segment for message in other.messages], "other")
    gone = "" if len(kept) == len(said) else f".select(slots={kept.tolist()})"
    lines += [
        "from kvprobe.patching import aligned",
        f"donor = aligned(model, cache, model.prefill(other){gone})",
        f"cache = donor.base.patch(donor.cache, {code})",
    ]
    here = before.places[chosen[0]].tolist()
    marks = {"damaged": before.damaged.difference(here), "patched": before.patched.union(here)}
    return before.then(fits.base.patch(fits.cache, slots=chosen), *lines, **marks)


def _other(chat: Transcript, segment: str, text: str) -> Transcript:
    """The conversation in which a message says something else."""
    if (count := [message.segment for message in chat.messages].count(segment)) != 1:
        raise UserError(
            unknown("segment", segment, chat.segments) if not count else f"{segment} is {count} messages; name one."
        )
    return replace(
        chat,
        messages=tuple(
            replace(message, parts=(Part(text),)) if message.segment == segment else message
            for message in chat.messages
        ),
    )


def _quantise(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    policy = f"Quantise({edit.bits}, tail=0)"
    return before.then(model.apply(policy, before.cache), f"cache = model.apply({policy!r}, cache)")


def _policy(model: EditingModel, before: EditedCache, edit: Edit, chat: Transcript) -> EditedCache:
    observes = as_policy(edit.policy).observes
    if observes is not None and not before.untouched:
        raise UserError(
            f"{edit.policy} decides by the attention that it saw while the conversation was read; make it the first "
            "edit."
        )
    start = before.cache if observes is None else model.watch(chat, queries=observes)
    cache = model.apply(edit.policy, start)
    if (kept := aligned(before.cache.ledger, cache.ledger)) is None:
        raise UserError(f"{edit.policy} leaves slots that the page cannot match to the conversation; use Python.")
    after = before.then(cache, f"cache = model.apply({edit.policy!r}, cache)", places=before.places[kept])
    if observes is None:
        return after
    return replace(after, code=(f"cache = model.prefill(chat, policy={edit.policy!r})",))


_ACTS: Mapping[str, Callable[[EditingModel, EditedCache, Edit, Transcript], EditedCache]] = {
    "mask": _mask,
    "evict": _evict,
    "re-index": _reindex,
    "restart": _restart,
    "compact": _compact,
    "patch": _patch,
    "damage": _damage,
    "quantise": _quantise,
    "policy": _policy,
}
