"""Values of a type from plain data of untrusted origin: every key, type, length and number is checked."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kvprobe.errors import UserError
from kvprobe.names import shown, unknown

MOST_WHOLE = 2**53
"""Beyond this, whole numbers are no longer exact as floats."""


Reader = Callable[[object, str], Any]
"""Gives the value, from the content and its name in an error sentence."""


@dataclass(frozen=True)
class Limits:
    """What is accepted.

    Attributes:
        text: most characters of a text.
        entries: most entries of a list.
        one_line: whether texts must be printable and of one line.
        whole: whether keys that have a default are required as well.
    """

    text: int
    entries: int
    one_line: bool = False
    whole: bool = False


def filled(kind: Any, content: object, where: str, limits: Limits) -> Any:
    """A value of this type (dataclass, list, literal, number, text), from the content of YAML or JSON.

    Args:
        where: name of the value in an error sentence.

    Raises:
        UserError: a key is unknown or missing, or a value is of the wrong type, too long or out of bounds.
    """
    return _reader(kind, limits)(content, where)


def _reader(kind: Any, limits: Limits) -> Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return partial(_fields, kind, limits)
    if origin in (tuple, Sequence):
        return partial(_entries, origin, _reader(arguments[0], limits), limits.entries)
    if origin is Mapping:
        return partial(_mapping, _reader(arguments[0], limits), _reader(arguments[1], limits), limits.entries)
    if origin is Literal:
        return partial(_choice, arguments)
    if origin in (UnionType, Union):
        readers = {argument: _reader(argument, limits) for argument in arguments if argument is not NoneType}
        *_, last = readers.values()
        return partial(_either, readers, last, NoneType in arguments)
    return partial(_plain, kind, limits)


def _fields(kind: Any, limits: Limits, content: object, where: str) -> Any:
    if not isinstance(content, Mapping):
        raise UserError(f"{where} must be a mapping, not a {type(content).__name__}.")
    readers, needed = _readers(kind, limits)
    for key in content:
        if key not in readers:
            raise UserError(unknown(f"key of {where}", str(key)[:40], readers))
    if missing := [name for name in needed if name not in content]:
        raise UserError(f"{where} lacks {', '.join(map(repr, missing))}.")
    return kind(**{key: readers[key](value, repr(key)) for key, value in content.items()})


@cache
def _readers(kind: Any, limits: Limits) -> tuple[dict[str, Reader], list[str]]:
    """Of a dataclass' fields, and the names of the fields that must be given; made once, since a run's page reads
    thousands of findings."""
    missing = dataclasses.MISSING
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if limits.whole or (field.default is missing and field.default_factory is missing)
    ]
    return {name: _reader(hint, limits) for name, hint in typing.get_type_hints(kind).items()}, needed


def _entries(origin: Any, reader: Reader, most: int, content: object, where: str) -> Any:
    if not isinstance(content, list | tuple) or len(content) > most:
        raise UserError(f"{where} must be a list of at most {most:,} entries.")
    name = f"an entry of {where}"
    entries = [reader(entry, name) for entry in content]
    return tuple(entries) if origin is tuple else entries


def _mapping(key_reader: Reader, reader: Reader, most: int, content: object, where: str) -> dict[Any, Any]:
    if not isinstance(content, Mapping) or len(content) > most:
        raise UserError(f"{where} must be a mapping of at most {most:,} entries.")
    name = f"a key of {where}"
    keys = [key_reader(key, name) for key in content]
    return {key: reader(value, repr(key)) for key, value in zip(keys, content.values(), strict=True)}


def _choice(choices: tuple[Any, ...], content: object, where: str) -> Any:
    if content not in choices:
        raise UserError(f"{where} is {shown(content)}; expected one of {', '.join(map(repr, choices))}.")
    return content


def _either(readers: Mapping[Any, Reader], last: Reader, or_none: bool, content: object, where: str) -> Any:
    if content is None and or_none:
        return None
    return readers.get(type(content), last)(content, where)


def _plain(kind: Any, limits: Limits, content: object, where: str) -> Any:
    if kind is float and type(content) is int and abs(content) < MOST_WHOLE:
        return float(content)
    if type(content) is not kind:
        raise UserError(f"{where} is {shown(content)}, a {type(content).__name__}; expected a {kind.__name__}.")
    if isinstance(content, str):
        if len(content) > limits.text:
            raise UserError(f"{where} has {len(content):,} characters; expected at most {limits.text:,}.")
        if limits.one_line and not content.isprintable():
            raise UserError(f"{where} holds characters that cannot be printed; expected one line of text.")
    elif isinstance(content, float) and not math.isfinite(content):
        raise UserError(f"{where} is {content}; expected a finite number.")
    elif isinstance(content, int) and abs(content) > MOST_WHOLE:
        raise UserError(f"{where} is beyond {MOST_WHOLE:,}; expected a smaller number.")
    return content
