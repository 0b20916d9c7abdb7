"""A conversation from an untrusted JSON file, read within limits."""

import json
from pathlib import Path

from kvprobe.checks import is_list, is_mapping
from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.names import one_line
from kvprobe.text.transcript import Transcript

MAX_BYTES, MAX_MESSAGES = 2**20, 1_000


def read_chat(path: Path) -> Transcript:
    """The conversation of a JSON list of `{"role": …, "content": …}`; its messages are the segments `m0`, `m1`, ….

    Raises:
        UserError: there is no such file, it is too large or not such a list, or see `Transcript.from_messages`.
    """
    path = expanded(path)
    # Not a folder, and not a device, which may never end.
    if not path.is_file():
        raise UserError(f"There is no file {path}; give a JSON list of messages.")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} is larger than {MAX_BYTES // 2**20} MiB; give a shorter conversation.")
    try:
        messages = json.loads(content.decode("utf-8"))
        # A lone half of a surrogate pair can be written in JSON, but no tokenizer takes it.
        json.dumps(messages, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON in UTF-8 ({one_line(error)}); write a list of messages.") from error
    if not is_list(messages) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise UserError(
            f'{path} is not a list of 1 to {MAX_MESSAGES:,} messages; write [{{"role": …, "content": …}}, …].'
        )
    for number, message in enumerate(messages):
        if not is_mapping(message) or not all(isinstance(message.get(field), str) for field in ("role", "content")):
            raise UserError(
                f'In {path}, message {number} is not of the form {{"role": text, "content": text}}; rewrite it.'
            )
    return Transcript.from_messages(messages)
