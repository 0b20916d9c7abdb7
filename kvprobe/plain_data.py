"""Values of a type from plain data of untrusted origin: every key, type, length and number is checked."""

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from kvprobe.errors import UserError
from kvprobe.names import shown, unknown

MOST_WHOLE = 2**53
"""Beyond this, whole numbers are no longer exact as floats."""


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
    if dataclasses.is_dataclass(kind):
        return _filled_dataclass(kind, content, where, limits)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (tuple, Sequence):
        if not isinstance(content, list | tuple) or len(content) > limits.entries:
            raise UserError(f"{where} must be a list of at most {limits.entries:,} entries.")
        entries = [filled(arguments[0], entry, f"an entry of {where}", limits) for entry in content]
        return tuple(entries) if origin is tuple else entries
    if origin is Mapping:
        if not isinstance(content, Mapping) or len(content) > limits.entries:
            raise UserError(f"{where} must be a mapping of at most {limits.entries:,} entries.")
        keys = [filled(arguments[0], key, f"a key of {where}", limits) for key in content]
        return {
            key: filled(arguments[1], value, repr(key), limits)
            for key, value in zip(keys, content.values(), strict=True)
        }
    if origin is Literal:
        if content not in arguments:
            raise UserError(f"{where} is {shown(content)}; expected one of {', '.join(map(repr, arguments))}.")
        return content
    if origin is UnionType:
        if content is None and NoneType in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not NoneType]
        return filled(type(content) if type(content) in kinds else kinds[-1], content, where, limits)
    if kind is float and type(content) is int and abs(content) < MOST_WHOLE:
        content = float(content)
    if type(content) is not kind:
        raise UserError(f"{where} is {shown(content)}, a {type(content).__name__}; expected a {kind.__name__}.")
    if isinstance(content, str) and len(content) > limits.text:
        raise UserError(f"{where} has {len(content):,} characters; expected at most {limits.text:,}.")
    if isinstance(content, str) and limits.one_line and not content.isprintable():
        raise UserError(f"{where} holds characters that cannot be printed; expected one line of text.")
    if isinstance(content, float) and not math.isfinite(content):
        raise UserError(f"{where} is {content}; expected a finite number.")
    if isinstance(content, int) and abs(content) > MOST_WHOLE:
        raise UserError(f"{where} is beyond {MOST_WHOLE:,}; expected a smaller number.")
    return content


def _filled_dataclass(kind: Any, content: object, where: str, limits: Limits) -> Any:
    if not isinstance(content, Mapping):
        raise UserError(f"{where} must be a mapping, not a {type(content).__name__}.")
    types, needed = _fields(kind, limits.whole)
    for key in content:
        if key not in types:
            raise UserError(unknown(f"key of {where}", str(key)[:40], types))
    if missing := [name for name in needed if name not in content]:
        raise UserError(f"{where} lacks {', '.join(map(repr, missing))}.")
    return kind(**{key: filled(types[key], value, repr(key), limits) for key, value in content.items()})


@cache
def _fields(kind: Any, whole: bool) -> tuple[dict[str, Any], list[str]]:
    """The types of a dataclass' fields, and the names of the fields that must be given."""
    missing = dataclasses.MISSING
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if whole or (field.default is missing and field.default_factory is missing)
    ]
    return typing.get_type_hints(kind), needed
