"""A chat from a file: messages become segments, and any other content is refused in a sentence."""

from pathlib import Path

import pytest

from kvprobe.text.chat_file import MAX_BYTES, read_chat
from tests.refusals import refused


def test_messages_become_numbered_segments(tmp_path: Path):
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Héllo"}]', encoding="utf-8")
    chat = read_chat(path)
    assert chat.segments == ("m0", "m1")
    assert [(message.role, message.text) for message in chat.messages] == [("user", "Hi"), ("assistant", "Héllo")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'[{"role": "user", "content": "\\ud800"}]', "not JSON"),
        (b"{}", "not a list"),
        (b"[]", "not a list"),
        (b"[" + b",".join([b"1"] * 1001) + b"]", "1,000"),
        (b'["Hi"]', "message 0"),
        (b'[{"role": "user", "content": "Hi"}, {"role": "user"}]', "message 1"),
        (b'[{"role": "user", "content": ["Hi"]}]', "message 0"),
        (b'[{"role": "user", "content": " "}]', "empty"),
        (b" " * (MAX_BYTES + 1), "1 MiB"),
    ],
)
def test_a_file_that_is_not_a_chat_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    refused(lambda: read_chat(path), message)


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path):
    refused(lambda: read_chat(tmp_path), "no file")
