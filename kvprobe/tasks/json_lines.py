"""Untrusted files with one JSON object a line, read within limits; errors name the line."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from kvprobe.errors import UserError
from kvprobe.files import expanded

MAX_FILE_BYTES = 64 * 2**20
MAX_LINE_BYTES = 2**20
MAX_LINES = 100_000

Entry = TypeVar("Entry")


def read_json_lines(path: Path, parse: Callable[[int, Mapping[str, object]], Entry]) -> list[Entry]:
    """The results of `parse` on each line's number and object; empty lines are skipped.

    Raises:
        UserError: there is no such file; the file or a line is too large, is not UTF-8 or JSON, or `parse` refuses it.
    """
    path = expanded(path)
    # Not a folder, and not a device, which may never end.
    if not path.is_file():
        raise UserError(f"There is no file {path}; give a JSONL file, one JSON object a line.")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; give a part of it.")
    lines = content.split(b"\n")
    if len(lines) - 1 > MAX_LINES:
        raise UserError(f"{path} has more than {MAX_LINES} lines; give a part of it.")
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append(parse(number, _object(line)))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    if not entries:
        raise UserError(f"{path} is empty; write one JSON object a line.")
    return entries


def text_of(entry: Mapping[str, object], field: str) -> str:
    """A field that must be present and a text."""
    if field not in entry:
        raise UserError(f"The field {field!r} is missing; add it.")
    text = entry[field]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"The field {field!r} is {_shown(text)}; it must be a text that is not empty.")
    return text


def _object(line: bytes) -> dict[str, object]:
    if len(line) > MAX_LINE_BYTES:
        raise UserError(f"The line is longer than {MAX_LINE_BYTES} bytes; shorten it.")
    try:
        content = json.loads(line.decode("utf-8"), parse_constant=_refuse)
        # A lone half of a surrogate pair can be written in JSON, but no tokenizer takes it.
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise UserError("The line is not UTF-8 text; save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise UserError(f"The line is not JSON ({reason}); write one JSON object a line.") from error
    if not isinstance(content, dict):
        raise UserError(f"The line is {_shown(content)}; write one JSON object a line.")
    return content


def _refuse(constant: str) -> None:
    raise UserError(f"{constant} is not a number of JSON")


def _shown(value: object) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "…"
