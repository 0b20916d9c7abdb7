"""States of recurrent layers that are known on the way through a text: a fold starts from the last of them before which
nothing is hidden, so that reading on after a long text, or hiding its end, does not fold the text.

A state belongs to the very tensors of which it was computed. Where any of them was replaced, taken apart or written to,
it is not known.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import weak

from kvprobe.cache.recurrence import Writes

_APART = 256
"""Slots from one state that is kept to the next; the last is kept in any case."""

State = tuple[int, Tensor]
"""After how many slots, none of them hidden; and the state."""


class _Read(NamedTuple):
    others: tuple[Tensor, ...]
    versions: tuple[int, ...]
    states: tuple[State, ...]


_weak: Any = weak  # torch gives its dictionary no type
_reads = _weak.WeakTensorKeyDictionary()
"""What was read, by the decay of its writes, for as long as that lives; so nothing here may hold it."""


def remember(writes: Writes, states: Sequence[State]) -> None:
    """Keep the states on the way through these writes."""
    apart = [state for state, later in pairwise(states) if later[0] - later[0] % _APART > state[0]]
    _reads[writes["decay"]] = _Read(_others(writes), _versions(writes), (*apart, *states[-1:]))


def known(writes: Writes) -> tuple[State, ...]:
    """The states that are known on the way through these writes, first ones first."""
    read: _Read | None = _reads.get(writes["decay"])
    if read is None or read.versions != _versions(writes):
        return ()
    same = all(one is other for one, other in zip(read.others, _others(writes), strict=True))
    return read.states if same else ()


def _others(writes: Writes) -> tuple[Tensor, ...]:
    return tuple(tensor for name, tensor in writes.items() if name != "decay")


def _versions(writes: Writes) -> tuple[int, ...]:
    """How often each was written in place."""
    return tuple(tensor._version for tensor in writes.values())
