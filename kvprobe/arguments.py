"""Arguments of public calls: of another type than the annotation says, or under a name that is not there, they are
refused in a sentence before anything is done.

Numbers of NumPy and torch become Python's own, and arrays, tensors and iterators of them the list that is asked for.
True and False are no numbers, nor are NaN and infinity. `Annotated[kind, "words"]` holds the words for what to give.
"""

import builtins
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import Parameter, isclass, signature, unwrap
from itertools import chain, repeat
from pathlib import Path
from sys import modules
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from kvprobe.checks import is_whole
from kvprobe.errors import UserError
from kvprobe.names import unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Checked = TypeVar("Checked", bound=Callable[..., Any])
Reader = Callable[[Any], Any]
"""Gives a value as it is wanted, or `_MISFIT`."""
_MISFIT = object()
_LISTS = (list, tuple, Sequence, Collection, Iterable)
FORMER = {"mask": "hide", "hidden": "hide"}
"""What arguments were called in earlier versions, by which they are no match of what they are called now."""
_WORDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "True or False", NoneType: "None"}


@dataclass(frozen=True)
class Within:
    """The least and the most that an annotated number may be."""

    low: int
    high: int | float = math.inf

    def __str__(self) -> str:
        return f"of at least {self.low:,}" if self.high == math.inf else f"from {self.low:,} to {self.high:,}"


AtLeastZero = Annotated[int, Within(0)]
AtLeastOne = Annotated[int, Within(1)]
Share = Annotated[float, Within(0, 1)]
FARTHEST = 2**31 - 1
"""The last position that a slot can have."""
Position = Annotated[int, Within(0, FARTHEST)]
Distance = Annotated[int, Within(-FARTHEST, FARTHEST)]


def checked_arguments(function: Checked) -> Checked:
    """The function, or the class with its public methods, with arguments checked.

    Raises:
        TypeError: there is no argument of this name; near matches are named, as in Python from 3.13 on.
        UserError: an argument is of another type than its annotation.
    """
    if isclass(function):
        for name, member in [*vars(function).items()]:
            if not name.startswith("_") and isinstance(member, types.FunctionType):
                setattr(function, name, checked_arguments(member))
            elif not name.startswith("_") and isinstance(member, classmethod | staticmethod):
                setattr(function, name, type(member)(checked_arguments(member.__func__)))
        return cast(Checked, function)
    known = {name: one for name, one in signature(function).parameters.items() if name not in ("self", "cls")}
    several = {one.kind: name for name, one in known.items()}
    ahead = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    in_order = [name for name, one in signature(function).parameters.items() if one.kind in ahead]
    rest, others = several.get(Parameter.VAR_POSITIONAL, ""), several.get(Parameter.VAR_KEYWORD)
    owner, source = function.__qualname__, unwrap(function)

    @wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        if others is None and (wrong := next((name for name in keywords if name not in known), None)):
            meant = [name for name in known if name == FORMER.get(wrong)] or known
            near = f"There is no argument called {wrong!r}; did you mean {next(iter(meant))!r}?"
            raise TypeError(f"{owner}: {near if meant is not known else unknown('argument', wrong, known)}")
        readers = _readers(source)
        given = [
            _read(owner, name, value, readers) for name, value in zip(chain(in_order, repeat(rest)), args, strict=False)
        ]
        return function(*given, **{name: _read(owner, name, value, readers) for name, value in keywords.items()})

    return cast(Checked, called)


def check_fields(instance: "DataclassInstance") -> None:
    """Check what a dataclass was made with; to be called by its `__post_init__`.

    Raises:
        UserError: a field is of another type than its annotation.
    """
    kind = type(instance)
    readers = _readers(kind)
    for field in fields(instance):
        value = getattr(instance, field.name) if field.init else None
        if field.init and (read := _read(kind.__name__, field.name, value, readers)) is not value:
            object.__setattr__(instance, field.name, read)


def _read(owner: str, name: str, value: Any, readers: Mapping[str, tuple[Reader, Any]]) -> Any:
    """A value as its annotation wants it."""
    if name not in readers:
        return value
    reader, hint = readers[name]
    if (read := reader(value)) is not _MISFIT:
        return read
    choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
    *words, last = dict.fromkeys(_words(hint))
    if choices and isinstance(value, str) and {*words, last} <= {"None", *map(repr, choices)}:
        raise UserError(f"{owner}: {unknown(f'choice of {name}', value, choices)}")
    wanted = f"{', '.join(words)} or {last}" if words else last
    if "whole numbers" in wanted and _is_mask(value):
        wanted += "; of a Boolean mask give mask.nonzero().flatten()"
    shown = " ".join(repr(value)[:60].split())
    raise UserError(f"{owner} has {name}={shown}, {_a(type(value).__name__)}; give {wanted}.")


class _ByName:
    """A class of which only the name is known."""

    def __class_getitem__(cls, _: object) -> type:
        return cls


class _Names(dict[str, Any]):
    """The names of a module; one that it imports for type checkers alone stands for the class that is called so."""

    def __missing__(self, name: str) -> Any:
        known = vars(builtins)
        return known[name] if name in known else type(name, (_ByName,), {})


@cache
def _readers(source: Callable[..., Any]) -> dict[str, tuple[Reader, Any]]:
    """What reads each argument of a function or field of a class, and its annotation, where that can be resolved."""
    hints: dict[str, Any] = {}
    for owner in reversed(source.__mro__) if isclass(source) else [source]:
        for name, hint in vars(owner).get("__annotations__", owner.__annotations__ if owner is source else {}).items():
            alone = SimpleNamespace(__annotations__={name: hint})
            with suppress(Exception):  # an annotation that means something at another time
                hints |= get_type_hints(alone, {}, _Names(vars(modules[owner.__module__])), include_extras=True)
    return {name: (_reader(hint), hint) for name, hint in hints.items()}


@cache
def _reader(hint: Any) -> Reader:
    """What reads a value of this type, as far as its type can be seen at once."""
    origin, inner = get_origin(hint), get_args(hint)
    kind = origin or hint
    if isclass(kind) and issubclass(kind, _ByName):
        return lambda value: value if kind.__name__ in (base.__name__ for base in type(value).__mro__) else _MISFIT
    if kind is Mapping and inner:
        return _mapping(*map(_reader, inner))
    if origin is Annotated:
        return _within(_reader(inner[0]), inner[1]) if isinstance(inner[1], Within) else _reader(inner[0])
    if origin in (Union, types.UnionType):
        return _either([_reader(one) for one in inner])
    if origin is Literal:
        return lambda value: next((one for one in inner if type(one) is type(value) and one == value), _MISFIT)
    if kind is Callable:
        return lambda value: value if callable(value) and not isclass(value) else _MISFIT
    if kind is Path:
        return lambda value: value if isinstance(value, Path) else Path(value) if isinstance(value, str) else _MISFIT
    if kind in (int, float):
        return _whole if kind is int else _finite
    if not isclass(kind) or kind in (Any, object):
        return lambda value: value
    if hasattr(kind, "array_type"):
        return _array(kind)
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return lambda value: value
    if kind in _LISTS:
        fixed = kind is tuple and inner[-1] is not ...
        return _listed(kind, [_reader(one) for one in inner if one is not ...], fixed)
    return lambda value: value if isinstance(value, kind) else _MISFIT


def _within(reader: Reader, bounds: Within) -> Reader:
    def read(value: Any) -> Any:
        number = reader(value)
        return number if number is not _MISFIT and bounds.low <= number <= bounds.high else _MISFIT

    return read


def _either(readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        almost = _MISFIT
        for reader in readers:
            if (found := reader(value)) is value:
                return value
            almost = found if almost is _MISFIT else almost
        return almost

    return read


def _listed(kind: Any, readers: list[Reader], fixed: bool) -> Reader:
    others = (str, bytes, Mapping, *([] if issubclass(Set, kind) else [Set]))  # a set has no order

    def read(value: Any) -> Any:
        if type(value) in (list, tuple):
            entries = value
        elif isinstance(value, others) or isclass(value) or not hasattr(value, "__iter__"):
            return _MISFIT
        elif isinstance(value, kind) and isinstance(value, Iterator):
            return value  # its entries are seen once
        else:
            entries = value.tolist() if hasattr(value, "tolist") else [*value]
        if not isinstance(entries, (list, tuple)) or (fixed and len(entries) != len(readers)):
            return _MISFIT
        found = [reader(entry) for reader, entry in zip(readers if fixed else repeat(*readers), entries, strict=False)]
        if any(one is _MISFIT for one in found):
            return _MISFIT
        same = isinstance(value, kind) and not hasattr(value, "tolist") and all(map(operator.is_, found, entries))
        return value if same else found if kind is list else tuple(found)

    return read


def _mapping(key: Reader, entry: Reader) -> Reader:
    def read(value: Any) -> Any:
        fits = isinstance(value, Mapping) and all(
            key(name) is not _MISFIT and entry(held) is not _MISFIT for name, held in value.items()
        )
        return value if fits else _MISFIT

    return read


def _array(kind: Any) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, kind.array_type) or str(value.dtype).rpartition(".")[2] not in kind.dtypes:
            return _MISFIT
        least = len(kind.dims) - (kind.index_variadic is not None)
        fits = value.ndim >= least if kind.index_variadic is not None else value.ndim == least
        return value if fits else _MISFIT

    return read


def _whole(value: Any) -> Any:
    return value if type(value) is int else operator.index(value) if is_whole(value) else _MISFIT


def _finite(value: Any) -> Any:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        return _MISFIT
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # such as of a tensor of several
        return _MISFIT
    return _MISFIT if not math.isfinite(number) or _is_mask(value) else value if isinstance(value, float) else number


def _is_mask(value: Any) -> bool:
    """Whether this is a Boolean array, tensor or list."""
    dtype = str(getattr(value, "dtype", ""))
    return "bool" in dtype or (
        isinstance(value, list | tuple) and bool(value) and {type(one) for one in value} == {bool}
    )


def _choices(hint: Any) -> list[Any]:
    """The choices that an annotation names."""
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    return [choice for one in get_args(hint) for choice in _choices(one)]


def _words(hint: Any) -> list[str]:
    """What is expected, in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return [f"{_words(inner[0])[0]} {inner[1]}" if isinstance(inner[1], Within) else inner[1]]
    if origin in (Union, types.UnionType):
        return [word for one in inner for word in _words(one)]
    if origin is Literal:
        return [repr(choice) for choice in inner]
    kind = origin or hint
    if kind in _WORDS:
        return [_WORDS[kind]]
    if kind is Callable:
        return ["a function"]
    name: str = getattr(kind, "__name__", str(kind))
    if hasattr(kind, "array_type"):
        return [f"a tensor of {name.partition('[')[0].lower()}s"]
    if isclass(kind) and issubclass(kind, Mapping):
        return ["a mapping" + (f" to {' or '.join(_words(inner[1]))}" if inner[1:] not in ((Any,), (object,)) else "")]
    if kind in _LISTS:
        of = _words(inner[0])
        one = of[0].removeprefix("a finite ").removeprefix("a ")
        return [f"a list of {one}s" if len(of) == 1 and inner[0] is not object and "list" not in one else "a list"]
    return [_a(name)]


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
