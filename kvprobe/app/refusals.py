"""What a state refuses to have done to it next, so that the page offers it to nobody, and says why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvprobe.app.address import EditKind
from kvprobe.app.edited import EditedCache, EditingModel
from kvprobe.editing.splicing import refuse_quantised
from kvprobe.errors import UserError
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.policies.policy import Policy
from kvprobe.policies.rebudgeted import Rebudgeted
from kvprobe.policies.written import kinds

UNEVEN = tuple(name for name, kind in kinds().items() if issubclass(kind, Rebudgeted))
"""Policies that keep other slots in each layer or head."""
OBSERVERS = tuple(name for name, kind in kinds().items() if kind.observes is not Policy.observes and name not in UNEVEN)
"""Policies that decide by attention."""


@dataclass(frozen=True)
class Refusal:
    """An edit that is refused.

    Attributes:
        kind: of the edit.
        why: in a sentence.
        what: which fault or kind of policy; all where empty.
        slots: it is refused where one of these slots of the conversation is chosen; in any case where there are none.
    """

    kind: EditKind
    why: str
    what: str = ""
    slots: tuple[int, ...] = ()


def refused_by_model(model: EditingModel, whole: EditedCache) -> Iterator[Refusal]:
    """What a model refuses, whatever was done before: it is tried on the cache of a conversation."""
    cache = whole.cache
    if why := _why(lambda: model.as_seen(cache.evict(slots=[1]).reindex()) if cache.slots > 1 else None):
        yield Refusal("re-index", why)
    if why := _why(lambda: model.apply("Quantise(4, tail=0)", cache)):
        yield Refusal("quantise", why)
    for name, named in CATALOGUE.items():
        if (fault := named.make()).needs and (why := _why(partial(model.fault_context, cache, [fault], {}))):
            yield Refusal("damage", why, name)


def refused_by_state(now: EditedCache) -> Iterator[Refusal]:
    """What cannot be done to a cache any more."""
    if why := _why(lambda: refuse_quantised(now.cache)):
        yield Refusal("patch", why)
    if not now.cache.ledger.uniform:
        yield Refusal("restart", "Layers or heads keep different slots, and a restart reads the same in all of them.")
    for name in OBSERVERS if not now.untouched else ():
        yield Refusal("policy", f"{name} decides by attention while the conversation is read; make it first.", name)


def _why(act: Callable[[], object]) -> str:
    """Why something is refused; empty if it is not."""
    try:
        act()
    except UserError as error:
        return str(error)
    return ""
