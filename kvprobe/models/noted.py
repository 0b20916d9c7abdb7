"""Which models are loaded by name while something is at work, for what depends on which they are."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Loaded = TypeVar("Loaded")

_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


@contextmanager
def loads_noted() -> Generator[dict[str, Any]]:
    """While this lasts, the models that are loaded, by the name."""
    present: dict[str, Any] = {}
    token = _noted.set(present)
    try:
        yield present
    finally:
        _noted.reset(token)


def noted(source: object, model: Loaded) -> Loaded:
    """A model that was loaded, from a name or from something in hand, which is not noted; returns it."""
    if (present := _noted.get()) is not None and isinstance(source, str | os.PathLike):
        present[os.fspath(source)] = model
    return model
