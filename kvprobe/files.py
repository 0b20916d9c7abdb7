"""Values of a type from plain data that anyone may have written: every key, type, length and number is checked."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml

from kvprobe.errors import UserError
from kvprobe.names import unknown

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_WHOLE = 2**53
"""Beyond this, whole numbers are no longer exact as floats."""


MAX_BYTES, MAX_DEPTH, MAX_NUMBER = 2**16, 16, 100
"""Of a settings file: its size, its levels, and the characters of what is no text in it."""


@dataclass(frozen=True)
class Limits:
    """What is read at all.

    Attributes:
        text: characters of a text.
        entries: of a list.
        one_line: whether texts must be printable and of one line.
        whole: whether keys that have a default must be there as well.
    """

    text: int
    entries: int
    one_line: bool = False
    whole: bool = False


def filled(kind: Any, content: Any, where: str, limits: Limits) -> Any:
    """A value of this type (dataclass, list, literal, number, text), from what YAML or JSON gave.

    Args:
        where: what the value is called in a refusal.

    Raises:
        UserError: a key is unknown or missing, or a value is of the wrong type, too long or out of bounds.
    """
    if dataclasses.is_dataclass(kind):
        return _filled_dataclass(kind, content, where, limits)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (tuple, Sequence):
        if not isinstance(content, list | tuple) or len(content) > limits.entries:
            raise UserError(f"{where} must be a list of at most {limits.entries:,}.")
        entries = [filled(arguments[0], each, f"an entry of {where}", limits) for each in content]
        return tuple(entries) if origin is tuple else entries
    if origin is Literal:
        if content not in arguments:
            raise UserError(f"{where} is {_shown(content)}; expected one of {', '.join(map(repr, arguments))}.")
        return content
    if origin is UnionType:
        if content is None and NoneType in arguments:
            return None
        kinds = [each for each in arguments if each is not NoneType]
        return filled(type(content) if type(content) in kinds else kinds[-1], content, where, limits)
    if kind is float and type(content) is int and abs(content) < MOST_WHOLE:
        content = float(content)
    if type(content) is not kind:
        raise UserError(f"{where} is {_shown(content)}, a {type(content).__name__}; expected a {kind.__name__}.")
    if isinstance(content, str) and len(content) > limits.text:
        raise UserError(f"{where} has {len(content):,} characters; expected at most {limits.text:,}.")
    if isinstance(content, str) and limits.one_line and not content.isprintable():
        raise UserError(f"{where} holds characters that cannot be printed; expected one line of text.")
    if isinstance(content, float) and not math.isfinite(content):
        raise UserError(f"{where} is {content}; expected a finite number.")
    if isinstance(content, int) and abs(content) > MOST_WHOLE:
        raise UserError(f"{where} is beyond {MOST_WHOLE:,}; expected a smaller number.")
    return content


def read_json(path: Path, limit: int, advice: str = "it was altered or cut") -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes.

    Args:
        advice: how a refusal ends.

    Raises:
        UserError: the file is too large, is not UTF-8 or JSON, or holds something else.
    """
    if path.stat().st_size > limit:
        raise UserError(f"{path} is larger than {limit / 2**20:g} MiB; {advice}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({' '.join(str(error).split())[:100]}); {advice}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object; it holds {_shown(content)}; {advice}.")
    return content


class _Settings(yaml.SafeLoader):
    """YAML of settings: no aliases, of which a few lines stand for more than memory holds, no depth, and no endless numbers."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds aliases, which settings do not need")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it nests deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str") and len(node.value) > MAX_NUMBER:
            raise yaml.YAMLError(f"a number or date in it is longer than {MAX_NUMBER} characters")
        self.depth -= 1
        return node


def read_yaml(path: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The mapping in a YAML file of bounded size and depth, without aliases.

    Raises:
        UserError: the file is missing, too large, not such YAML, or not a mapping.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    if path.stat().st_size > limit:
        raise UserError(f"{path} has {path.stat().st_size} bytes; a settings file has at most {limit}.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Settings)
    # ValueError: a month that does not exist, bytes that are no text; TypeError: a key that cannot be one.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not readable YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of settings; it holds a {type(content).__name__}.")
    return content


def write_whole(path: Path, text: str) -> Path:
    """Write a text beside its place and then move it there: no half of it is ever found, and no link is followed."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with partial.open("x", encoding="utf-8") as file:
        file.write(text)
    return partial.replace(path)


def read_table(path: Path) -> "DataFrame":
    """A table that a run has kept.

    Raises:
        UserError: it is damaged.
    """
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError, TypeError, KeyError) as error:  # all of them of pyarrow
        raise _damaged(path, error) from error


def refuse_damaged(path: Path) -> None:
    """Refuse a table or tensors that cannot be read to their end.

    Raises:
        UserError: the sentence says which file, and to delete it.
    """
    if path.suffix == ".parquet":
        read_table(path)
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            file.keys()
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200].rstrip(".")
    return UserError(f"{path} is damaged ({reason}); delete this file, and start the run again to make it anew.")


def _filled_dataclass(kind: Any, content: Any, where: str, limits: Limits) -> Any:
    if not isinstance(content, Mapping):
        raise UserError(f"{where} must be a mapping, not a {type(content).__name__}.")
    types, needed = _fields(kind, limits.whole)
    for key in content:
        if key not in types:
            raise UserError(unknown("key", str(key)[:40], types))
    if missing := [name for name in needed if name not in content]:
        raise UserError(f"{where} lacks {', '.join(map(repr, missing))}.")
    return kind(**{key: filled(types[key], each, repr(key), limits) for key, each in content.items()})


@cache
def _fields(kind: Any, whole: bool) -> tuple[dict[str, Any], list[str]]:
    """The types of a dataclass' fields, and the names of those that must be given."""
    none = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    needed = [each.name for each in fields if whole or (each.default is none and each.default_factory is none)]
    return typing.get_type_hints(kind), needed


def _shown(content: Any) -> str:
    return f"of {len(content)} entries" if isinstance(content, list | dict) else repr(content)[:60]
