"""Conversations from an untrusted JSON or JSONL file, in the shapes that tools write, read within limits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvprobe.arguments import checked_arguments
from kvprobe.checks import is_list, is_mapping, is_text
from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.names import one_line, unknown
from kvprobe.text.foreign_messages import conversation_of, holds_messages, is_message
from kvprobe.text.transcript import Transcript, in_file

MAX_FILE_BYTES, MAX_BYTES = 64 * 2**20, 2**20
MAX_CONVERSATIONS, MAX_MESSAGES = 100_000, 1_000


@checked_arguments
def read_chat(path: Path, conversation: int | str | None = None, **arguments: object) -> Transcript:
    """A conversation of a file; its messages are the segments `m0`, `m1`, …, results of tools `tool2`, say.

    The file is JSON, or JSONL with one conversation or one message a line. A conversation is a list of messages, or an
    object with them in `messages` (OpenAI, or Anthropic with its `system` and `tools` beside), `conversations`
    (ShareGPT) or `prompt` and `completion`.

    Args:
        conversation: which of several: its number from 0, or its `id`.
        arguments: of the chat template, as in `Transcript.from_messages`; they replace those of the file.

    Raises:
        UserError: there is no such file or conversation, it is too large or of another shape, or see
            `Transcript.from_messages`.
    """
    path = expanded(path)
    # Not a folder, and not a device, which may never end.
    if not path.is_file():
        raise UserError(f"There is no file {path}; give JSON or JSONL with a conversation.")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; give a part of it.")
    entry = _chosen(_entries(content, path), conversation, path)
    with in_file(path):
        messages, of_file = conversation_of(entry)
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise UserError(f"It is not a list of 1 to {MAX_MESSAGES:,} messages; give a part of it.")
        if len(json.dumps(entry)) > MAX_BYTES:
            raise UserError(f"It is larger than {MAX_BYTES // 2**20} MiB; give a shorter conversation.")
        chat = Transcript.from_messages(messages, None, **{**of_file, **arguments})
    return replace(chat, source=str(path))


def _entries(content: bytes, path: Path) -> list[Any]:
    """The conversations of the file, each in whatever shape."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeError as error:
        raise UserError(f"{path} is not JSON in UTF-8 ({one_line(error)}); save it as UTF-8.") from error
    entries: list[Any] = []
    try:
        entries = _several(_json(text))
    except UserError as error:
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                entries += [_json(line)] if line.strip() else []
            except UserError as wrong:
                # The first line of JSONL is JSON by itself, and that of JSON is not.
                reason = f"line {number}: {wrong}" if entries else error
                raise UserError(f"{path} is not JSON ({reason}); correct it.") from wrong
        if entries and all(map(is_message, entries)):
            entries = [entries]
    if not 1 <= len(entries) <= MAX_CONVERSATIONS or entries == [[]]:
        raise UserError(f'{path} is not a list of messages; write [{{"role": …, "content": …}}, …].')
    return entries


def _several(data: object) -> list[Any]:
    """The conversations of a JSON text."""
    if is_list(data) and data and (is_list(data[0]) or holds_messages(data[0])):
        return data
    return [data]


def _json(text: str) -> Any:
    try:
        data = json.loads(text, parse_constant=_refuse)
        # A lone half of a surrogate pair can be written in JSON, but no tokenizer takes it.
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        before = text[: error.pos].rstrip()
        comma = ", after a comma that nothing follows" if before.endswith(",") else ""
        raise UserError(f"{error.msg} at line {error.lineno}, column {error.colno}{comma}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(one_line(error)) from error
    return data


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _chosen(entries: list[Any], conversation: int | str | None, path: Path) -> Any:
    names = [
        str(entry.get("id", entry.get("custom_id", number))) if is_mapping(entry) else str(number)
        for number, entry in enumerate(entries)
    ]
    if conversation is None and len(entries) == 1:
        return entries[0]
    if conversation is None:
        raise UserError(
            f"{path} holds {len(entries):,} conversations ({', '.join(names[:4])}{', …' if names[4:] else ''}); choose "
            f"one by its number from 0 or its id, with conversation= or --conversation."
        )
    if str(conversation) in names and is_text(conversation):
        return entries[names.index(conversation)]
    if not str(conversation).isdecimal() or int(conversation) >= len(entries):
        raise UserError(unknown("conversation", str(conversation), names))
    return entries[int(conversation)]
