"""Which models are loaded by name while something is at work, for what depends on which they are."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


def name_in(name: str, numbers: str) -> str:
    """What a model is called that is loaded by its name in these numbers, which its fingerprint depends on."""
    return f"{name} in {numbers}"


def noted(source: object, numbers: str, model: object) -> None:
    """Note a model that was loaded from a name; from something in hand, it is not noted."""
    if (present := _noted.get()) is not None and isinstance(source, str | os.PathLike):
        present[name_in(os.fspath(source), numbers)] = model
