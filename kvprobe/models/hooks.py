"""Changes of a model that last for a while: its hooks are removed whatever happens, one thread has it at a time, and a
proof that becomes due meanwhile is of the model without them."""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from kvprobe.errors import UserError
from kvprobe.restoring import restoring

PATIENCE = 60.0
"""Seconds for which a thread waits for a model that another one uses; a claim lasts for a pass, not for a sweep."""
Hook = tuple[nn.Module, Literal["input", "output"], Callable[..., Any]]
"""A module, whether the function gets its input (with keywords) or its output, and the function."""

_claims: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_claiming = threading.Lock()
_depth = ContextVar("depth", default=0)


@contextmanager
def claimed(plain: nn.Module) -> Generator[None]:
    """While this lasts, no other thread runs this model or changes it.

    Raises:
        UserError: another thread uses it for longer than one waits.
    """
    with _claiming:
        claim = _claims.setdefault(plain, threading.RLock())
    if not claim.acquire(timeout=PATIENCE):
        raise UserError(
            f"Another thread has used this {type(plain).__name__} for more than {PATIENCE:g} seconds; use a model in "
            "one thread at a time, or load it once for each."
        )
    try:
        yield
    finally:
        claim.release()


@contextmanager
def bare() -> Generator[None]:
    """While this lasts, models compute as if nothing that was hooked or replaced before were there."""
    before = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(before)


def unless_bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which does nothing while a `bare` lasts that began later."""
    depth = _depth.get()

    @wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords) if _depth.get() == depth else None

    return called


@contextmanager
def hooked(hooks: Iterable[Hook]) -> Generator[None]:
    """While this lasts, modules call these functions; what a function returns replaces what it got."""
    hooks = [(module, end, unless_bare(function)) for module, end, function in hooks]

    def remove() -> None:
        for module, end, function in hooks:
            of_module: Any = vars(module)
            added = of_module["_forward_pre_hooks" if end == "input" else "_forward_hooks"]
            for number in [number for number, other in added.items() if other is function]:
                added.pop(number, None)
                of_module["_forward_pre_hooks_with_kwargs"].pop(number, None)

    with restoring(remove):
        for module, end, function in hooks:
            if end == "input":
                module.register_forward_pre_hook(function, with_kwargs=True)
            else:
                module.register_forward_hook(function)
        yield
