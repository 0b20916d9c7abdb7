"""Which models are loaded by name while something is at work, for what depends on which they are."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class _Computing(Protocol):
    @property
    def computes(self) -> str:
        """On which device and in which numbers, with a comma between."""
        ...


@dataclass(frozen=True)
class NotedFile:
    """A file that decides what a model computes, such as an adapter.

    Attributes:
        fingerprint: digest of what it holds.
        computes: of the model.
    """

    fingerprint: str
    computes: str


Loaded = TypeVar("Loaded", bound=_Computing)

_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


@contextmanager
def loads_noted() -> Generator[dict[str, Any]]:
    """While this lasts, the models that are loaded, by the name and the numbers that they are loaded in."""
    present: dict[str, Any] = {}
    token = _noted.set(present)
    try:
        yield present
    finally:
        _noted.reset(token)


def name_in(name: str, model: _Computing) -> str:
    """What a model is called that is loaded by its name as this one is: its fingerprint depends on its numbers."""
    return f"{name} in {model.computes.partition(', ')[2]}"


def noted(source: object, model: Loaded) -> Loaded:
    """A model that was loaded, from a name or from something in hand, which is not noted; returns it."""
    if (present := _noted.get()) is not None and isinstance(source, str | os.PathLike):
        present[name_in(os.fspath(source), model)] = model
    return model
