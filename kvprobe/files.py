"""Limited and atomic file access: what is read is bounded in size and depth, and what is written is whole or absent."""

import errno
import json
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvprobe.errors import UserError
from kvprobe.names import one_line, shown

if TYPE_CHECKING:
    from pandas import DataFrame

LOCK, HOLDER, PARTIAL = ".lock", ".holder", ".partial"
"""The file in a folder that is claimed while it is used, the one that says by whom, and the ending of one that is being
written."""
MAX_BYTES, MAX_DEPTH, MAX_NUMBER = 2**16, 16, 100
"""Of a settings file: its size, its levels, and the characters of a number or date in it."""
_FULL = "free some space and do the same again, as what was written before is kept"
_ELSEWHERE = "choose another place"
_OPEN = ("too many files are open", "close some, or raise the limit (ulimit -n)")
_REASONS = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("the quota of disk space is used up", _FULL),
    errno.EFBIG: ("it would be larger than files may be here", f"raise the limit (ulimit -f), or {_ELSEWHERE}"),
    errno.EMFILE: _OPEN,
    errno.ENFILE: _OPEN,
    errno.EROFS: ("the disk is read-only", _ELSEWHERE),
    errno.EACCES: ("permission is missing", f"change the permission, or {_ELSEWHERE}"),
    errno.EPERM: ("permission is missing", f"change the permission, or {_ELSEWHERE}"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter one"),
    errno.EISDIR: ("a folder is there", _ELSEWHERE),
    errno.ENOTDIR: ("a file stands where a folder is expected", _ELSEWHERE),
    errno.EEXIST: ("something else is there", _ELSEWHERE),
    errno.ENOTEMPTY: ("something else is there", _ELSEWHERE),
    errno.ENOENT: ("it is not there", "correct the path"),
    errno.EIO: ("the disk fails", _ELSEWHERE),
    errno.ELOOP: ("its links lead in a circle", _ELSEWHERE),
}
"""Why the system refuses a file, and what to do; of other numbers, what the system itself says."""


def refusal(error: BaseException, path: object) -> str | None:
    """What the system reports about a file, in a sentence; None of an error of another kind.

    Args:
        path: the file, where the error does not name it.
    """
    number = re.search(r"os error (\d+)", str(error))  # as safetensors words it
    code = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
    if code is None or isinstance(error, UserError | ConnectionError | TimeoutError):
        return None
    reason, advice = _REASONS.get(code, (f"the system says: {os.strerror(code)}", _ELSEWHERE))
    names = [str(name) for place in ("filename2", "filename") if (name := getattr(error, place, None))]
    named = next((name for name in names if not name.endswith(PARTIAL)), str(path))
    named = re.sub(rf"\.\w+{re.escape(PARTIAL)}/", "", named)
    return f"{named[:200]}{'…' * (len(named) > 200)} cannot be used, because {reason}; {advice}."


@contextmanager
def told(path: Path) -> Generator[None]:
    """While this lasts, what the system refuses is a `UserError`, which names this path if the system names none."""
    try:
        yield
    except Exception as error:
        if (sentence := refusal(error, path)) is None:
            raise
        raise UserError(sentence) from error


@contextmanager
def folder_claimed(folder: Path) -> Generator[None]:
    """While this lasts, no other process or thread claims this folder, which is made; a claim ends with its process.

    Raises:
        UserError: another one has claimed it, or it cannot be written to.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, is_singleton=False)
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0.1, poll_interval=0.02)  # `claimed_by` holds it for a moment
        except Timeout as error:
            raise UserError(
                f"{folder} is in use by another command that is still running{_named(folder)}; wait for it, or choose "
                "another name."
            ) from error
        (folder / HOLDER).write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    try:
        yield
    finally:
        for name in (HOLDER, LOCK):
            with suppress(OSError):
                (folder / name).unlink()
        lock.release()


def claimed_by(folder: Path) -> str | None:
    """What claims a folder now, such as `process 7 on node`; None if nothing does."""
    if not (folder / LOCK).is_file():
        return None
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, is_singleton=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _named(folder).strip(" ()") or "another process"
    except OSError:  # a folder of someone else
        return None
    lock.release()
    return None


def _named(folder: Path) -> str:
    """Which process claims the folder, in brackets; nothing if it has not said so yet."""
    try:
        with (folder / HOLDER).open(encoding="utf-8", errors="replace") as file:
            return f" ({' '.join(file.read(200).split())})"
    except OSError:
        return ""


@dataclass(frozen=True)
class FileVersion:
    """A file as it was when its beginning was read, so that the rest is not read of another one.

    Attributes:
        stamp: by which a file that was written again is known; None where there was none.
    """

    path: Path
    stamp: tuple[int, int, int] | None

    @classmethod
    def of(cls, path: Path) -> "FileVersion":
        """The one that is there now."""
        return cls(path, _stamp(path))

    def refuse_another(self) -> None:
        """Refuse a file that was written again since.

        Raises:
            UserError: it was.
        """
        if (now := _stamp(self.path)) is not None and now != self.stamp:
            raise UserError(f"{self.path} was written again since it was opened; open it once more.")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # reading it says why
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` and `~name` as folders.

    Raises:
        UserError: there is no user of that name, or the system lets nobody look there.
    """
    try:
        whole = Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} names the home of an unknown user; give the whole path.") from error
    with told(whole):
        whole.is_file()
    return whole


def read_json(path: Path, limit: int, advice: str = "it was altered or cut", *, unique: bool = False) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes.

    Args:
        advice: end of the error sentence, what to do.
        unique: whether a key that is there twice is refused, or the last one counts.

    Raises:
        UserError: the file is too large, is not UTF-8 or JSON, or holds something else.
    """
    text = _read_within(path, limit)
    if len(text) > limit:
        raise UserError(f"{path} is larger than {limit / 2**20:g} MiB; {advice}.")
    try:
        content = json.loads(text.decode(), object_pairs_hook=_each_once if unique else None)
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
    path = expanded(path)
    if not path.is_file():
        raise UserError(f"There is no file {path}; give the path of a YAML file.")
    text = _read_within(path, limit)
    if len(text) > limit:
        raise UserError(f"{path} has more bytes than a settings file, at most {limit}; shorten it.")
    try:
        content = yaml.load(text.decode(), _Settings)
    # ValueError: a month that does not exist, bytes that are not UTF-8; TypeError: a key that is not hashable.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not readable YAML ({one_line(error, 300)}); correct it.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of settings; it holds a {type(content).__name__}.")
    return content


def _read_within(path: Path, limit: int) -> bytes:
    """A file, or a byte more of it than the limit."""
    with told(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a device or a pipe, which may have no end; give a file.")
        with path.open("rb") as file:
            return file.read(limit + 1)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values.

    Raises:
        ValueError: a key is there twice.
    """
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{shown(key)} is there twice")
        content[key] = value
    return content


def read_table(path: Path) -> "DataFrame":
    """A parquet table that a run wrote.

    Raises:
        UserError: it is damaged.
    """
    import pandas as pd

    try:
        with told(path):
            return pd.read_parquet(path)
    except UserError:
        raise
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
    """A path beside `path` to write a file to, which then replaces `path`: no half of a file is ever found there,
    however many write it at once.

    A link that stands at `path` is replaced, not followed.

    Raises:
        UserError: the system refuses the file, for want of space, say.
    """
    partial = _beside(path)
    try:
        with told(path):
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def refuse_unwritable(path: str | Path | None) -> None:
    """Refuse, before the work whose result is to be written to it, a path that `replacing` would refuse after it."""
    if path is None:
        return
    partial = _beside(path := expanded(path))
    with told(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        partial.touch(exist_ok=False)
        partial.unlink()


def _beside(path: Path) -> Path:
    """A path of its own in the same folder."""
    if not path.name:
        raise UserError("The path of the file to be written is empty; name a file.")
    with told(path):
        if not path.parent.exists():
            raise UserError(f"There is no folder {path.parent} to write {path.name} into; make it first.")
        leads_to = path.readlink() if path.is_symlink() else path.absolute()
        if leads_to.is_relative_to("/proc") or (path.exists() and not (path.is_file() or path.is_dir())):
            raise UserError(f"{path} is a device or a pipe, which a file would replace; name a file.")
    return path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder in `folder`, which is made, to write files to, which then move up, replacing those of their names; so
    that older ones stay unless all are written."""
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=PARTIAL) as made:
            yield Path(made)
            for path in Path(made).iterdir():
                path.replace(folder / path.name)


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a text or bytes so that no half of it is ever found at `path`, which is returned."""
    with replacing(path := expanded(path)) as partial, partial.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


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

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise yaml.YAMLError(f"{shown(key.value)} is there twice")
            names.add(key.value)
        return super().construct_mapping(node, deep)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({one_line(error)}); delete this file, and start the run again.")
