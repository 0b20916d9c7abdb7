"""Checks of what a user gives."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, TypeGuard, cast

from kvprobe.errors import UserError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether this is a whole number; `True`, `3.0` and NaN are not."""
    try:
        operator.index(cast(SupportsIndex, value))
    except TypeError:
        return False
    return not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", ""))


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether this is a list of anything."""
    return isinstance(value, list)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether this is a mapping of anything to anything."""
    return isinstance(value, Mapping)


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """The whole numbers of a list, tensor or another iterable, which is gone through once; None if it is another."""
    listed: object = cast(Any, values).tolist() if hasattr(values, "tolist") else values
    numbers = tuple(cast(Iterable[object], listed)) if isinstance(listed, Iterable) else (None,)
    return tuple(map(int, cast(Iterable[int], numbers))) if all(map(is_whole, numbers)) else None


def is_text(value: object) -> TypeGuard[str]:
    """Whether this is a text."""
    return isinstance(value, str)


def names_of(given: object, what: str = "segment") -> tuple[str, ...]:
    """Names as a tuple, of one text or of several in a list."""
    names = (given,) if is_text(given) else tuple(cast(Iterable[object], given)) if isinstance(given, Iterable) else ()
    if (names or not isinstance(given, Iterable)) and not (names and all(map(is_text, names))):
        raise UserError(f"{str(given)[:40]!r} names no {what}; give its name, or several in a list.")
    return cast(tuple[str, ...], names)


def require_share(owner: str, name: str, value: object) -> None:
    """Refuse anything but a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{owner} has {name}={repr(value)[:40]}; it must be a number from 0 to 1.")


def require(name: str, value: int | float, low: int | float, high: int | float | None = None) -> None:
    """Refuse a number outside `low` to `high`."""
    if not (value >= low and (high is None or value <= high)):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"Setting {name!r} is {value}; expected {expected}.")
