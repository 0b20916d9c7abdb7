"""Limited and atomic file access: what is read is bounded in size and depth, and what is written is whole or absent."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvprobe.errors import UserError
from kvprobe.names import one_line, shown

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_BYTES, MAX_DEPTH, MAX_NUMBER = 2**16, 16, 100
"""Of a settings file: its size, its levels, and the characters of a number or date in it."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` and `~name` as folders.

    Raises:
        UserError: there is no user of that name.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} names the home of an unknown user; give the whole path.") from error


def read_json(path: Path, limit: int, advice: str = "it was altered or cut") -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes.

    Args:
        advice: end of the error sentence, what to do.

    Raises:
        UserError: the file is too large, is not UTF-8 or JSON, or holds something else.
    """
    if path.stat().st_size > limit:
        raise UserError(f"{path} is larger than {limit / 2**20:g} MiB; {advice}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({one_line(error)}); {advice}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object; it holds {shown(content)}; {advice}.")
    return content


def read_yaml(path: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The mapping in a YAML file of bounded size and depth, without aliases.

    Raises:
        UserError: the file is missing, too large, not such YAML, or not a mapping.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}; give the path of a YAML file.")
    if path.stat().st_size > limit:
        raise UserError(f"{path} has {path.stat().st_size} bytes; a settings file has at most {limit}; shorten it.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Settings)
    # ValueError: a month that does not exist, bytes that are not UTF-8; TypeError: a key that is not hashable.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not readable YAML ({one_line(error, 300)}); correct it.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of settings; it holds a {type(content).__name__}.")
    return content


def read_table(path: Path) -> "DataFrame":
    """A parquet table that a run wrote.

    Raises:
        UserError: it is damaged.
    """
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError, TypeError, KeyError) as error:  # pyarrow raises all of these
        raise _damaged(path, error) from error


def refuse_damaged(path: Path) -> None:
    """Refuse a parquet or safetensors file that is damaged.

    Raises:
        UserError: it is; the sentence names the file and says to delete it.
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file to, which then replaces `path`: no half of a file is ever found there.

    A link that stands at either path is replaced, not followed.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    yield partial
    partial.replace(path)


def write_whole(path: Path, text: str) -> Path:
    """Write a text so that no half of it is ever found at `path`."""
    with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to fill, which then takes its place; nothing is left of one that could not be filled."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Settings(yaml.SafeLoader):
    """YAML of limited depth, with numbers of limited length, and without aliases, which can expand beyond memory."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
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


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({one_line(error)}); delete this file, and start the run again.")
