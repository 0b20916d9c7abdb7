"""Files: what is written is whole or absent, and what a path names is known."""

from pathlib import Path

import pytest

from kvprobe.files import expanded, replacing, write_whole
from tests.refusals import refused


def test_a_write_that_fails_leaves_the_older_file_whole(tmp_path: Path):
    path = write_whole(tmp_path / "text", "old")
    with pytest.raises(OSError, match="full"), replacing(path) as partial:  # noqa: PT012 - the write must begin
        partial.write_text("ne", encoding="utf-8")
        raise OSError("disk full")
    assert path.read_text(encoding="utf-8") == "old"
    assert write_whole(path, "new").read_text(encoding="utf-8") == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path):
    target = tmp_path / "target"
    target.write_text("untouched", encoding="utf-8")
    path = tmp_path / "text"
    for link in (path, tmp_path / "text.partial"):
        link.symlink_to(target)
    assert write_whole(path, "new").read_text(encoding="utf-8") == "new"
    assert target.read_text(encoding="utf-8") == "untouched"
    assert not path.is_symlink()


def test_the_home_of_an_unknown_user_is_refused():
    refused(lambda: expanded("~nobody-of-that-name/chat.json"), "unknown user; give the whole path")
