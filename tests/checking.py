"""Annotations are checked, fast: types by beartype, shapes by jaxtyping where an annotation has any.

The import hook of jaxtyping decorates each function of kvprobe by `jaxtyping.jaxtyped`. For types alone that costs 7
microseconds a call, and beartype half a microsecond; for each time that a function is defined in another one's body it
costs 1.6 milliseconds. `checked` stands in for it. A function is checked in its first CALLS calls of each test, those
of its fixtures and of all its examples among them, and then in call 16, 32, 64 …: inner loops make thousands, and
checking them all was a third of the time that tests took.
"""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, isclass, isgeneratorfunction, signature
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, ParamSpecArgs, ParamSpecKwargs, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.door import die_if_unbearable
from jaxtyping import AbstractArray, TypeCheckError, config, install_import_hook, jaxtyped

CALLS = 8
_tests = 0
_CONF = BeartypeConf(violation_type=TypeCheckError)
_by_code: dict[CodeType, tuple[Signature, dict[str, Any]]] = {}


def check_annotations(package: str) -> None:
    """Check the annotations of all functions and dataclasses of a package that is not imported yet."""
    install_import_hook(package, "beartype.beartype")
    jaxtyping.jaxtyped = checked


def start_test() -> None:
    """From here on each function is checked anew."""
    global _tests
    _tests += 1


def checked(fn: Any = None, *, typechecker: object = None) -> Any:
    """A function whose arguments and result are checked, or a dataclass whose fields are."""
    if fn is None:
        return checked
    if isclass(fn):
        if is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = checked(fn.__init__)
        return fn
    if all(hint is Any or hint is object for hint in fn.__annotations__.values()):
        return fn  # anything fits
    # Functions that are defined in a function's body are one, however often it runs.
    count = _counts.setdefault(fn.__code__, _Count()) if _is_inner(fn) else _Count()
    ready = None

    @wraps(fn)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        nonlocal ready
        if count.test != _tests:
            count.test, count.calls = _tests, 0
        count.calls = calls = count.calls + 1
        if (calls > CALLS and calls & (calls - 1)) or config.jaxtyping_disable:
            return fn(*args, **kwargs)
        ready = ready or _checking(fn)  # what is never called is never compiled
        checking, shapes = ready
        if not shapes:
            return checking(*args, **kwargs)
        with jaxtyped("context"):  # sizes of named axes hold for this call
            return checking(*args, **kwargs)

    return with_checks


class _Count:
    """How often a function was called in a test."""

    __slots__ = ("calls", "test")

    def __init__(self) -> None:
        self.test, self.calls = -1, 0


_counts: dict[CodeType, _Count] = {}


def _is_inner(fn: FunctionType) -> bool:
    return "<locals>" in fn.__qualname__


def _checking(fn: FunctionType) -> tuple[Callable[..., Any], bool]:
    """The function with checks, and whether there are shapes among them."""
    # Beartype takes longer to compile an inner function than that runs, and what it makes of a generator checks its
    # arguments only when a value is drawn.
    checking, hints = _one_by_one(fn) if _is_inner(fn) or isgeneratorfunction(fn) else _compiled(fn)
    return checking if hints else fn, any(map(_has_axes, hints.values()))


def _compiled(fn: FunctionType) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function as beartype compiles it."""
    hints = _hints(fn)
    copy = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = fn.__kwdefaults__, fn.__qualname__, fn.__module__
    copy.__annotations__ = hints
    return beartype(copy, conf=_CONF), hints


def _one_by_one(fn: FunctionType) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function with its arguments checked one by one, which nothing is compiled for."""
    if fn.__code__ not in _by_code:
        _by_code[fn.__code__] = signature(fn), _hints(fn)
    expected, hints = _by_code[fn.__code__]

    def checking(*args: Any, **kwargs: Any) -> Any:
        for name, value in _arguments(expected.bind(*args, **kwargs).arguments, expected):
            if name in hints:
                die_if_unbearable(value, hints[name], conf=_CONF)
        result = fn(*args, **kwargs)
        if "return" in hints:
            die_if_unbearable(result, hints["return"], conf=_CONF)
        return result

    return checking, hints


def _arguments(bound: dict[str, Any], expected: Signature) -> Iterator[tuple[str, Any]]:
    """The name of a parameter, and a value that was given for it."""
    for name, value in bound.items():
        kind = expected.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            yield from ((name, item) for item in value)
        elif kind is Parameter.VAR_KEYWORD:
            yield from ((name, item) for item in value.values())
        else:
            yield name, value


def _hints(fn: FunctionType) -> dict[str, Any]:
    """The annotations of a function, less those that only a type checker can resolve, such as of circular imports and
    of what a decorated function takes."""
    hints: dict[str, Any] = {}
    for name, hint in fn.__annotations__.items():
        if isinstance(hint, ParamSpecArgs | ParamSpecKwargs):
            continue
        try:
            hints |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), fn.__globals__, include_extras=True)
        except Exception:
            continue
    return hints


def _has_axes(hint: Any) -> bool:
    """Whether a type is, or has in it, an array with named axes."""
    return (isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_has_axes, get_args(hint)))
