"""Files: what is written is whole or absent, and what a path names is known."""

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from kvprobe.files import expanded, folder_claimed, read_json, read_yaml, replacing, write_whole
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
    path.symlink_to(target)
    assert write_whole(path, "new").read_text(encoding="utf-8") == "new"
    assert target.read_text(encoding="utf-8") == "untouched"
    assert not path.is_symlink()


def test_the_home_of_an_unknown_user_is_refused():
    refused(lambda: expanded("~nobody-of-that-name/chat.json"), "unknown user; give the whole path")


def test_two_writers_of_one_file_leave_one_of_them_whole(tmp_path: Path):
    with replacing(tmp_path / "text") as one, replacing(tmp_path / "text") as other:
        assert one != other
        one.write_text("one", encoding="utf-8")
        other.write_text("the other", encoding="utf-8")
    assert (tmp_path / "text").read_text(encoding="utf-8") == "one"  # which was closed last
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space and do the same again"),
        (errno.EDQUOT, "the quota of disk space is used up; free some"),
        (errno.EROFS, "the disk is read-only; choose another place"),
        (errno.EACCES, "permission is missing; change the permission"),
        (errno.EIO, "the disk fails"),
    ],
)
@pytest.mark.parametrize("where", ["write", "replace"])
def test_what_the_system_refuses_is_one_sentence(
    number: int, words: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_whole(tmp_path / "text", "old")

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    if where == "replace":
        monkeypatch.setattr(Path, "replace", fails)
        refused(lambda: write_whole(path, "new"), words, str(path))
    else:
        refused(lambda: written(path, fails), words, str(path))
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


def written(path: Path, write: Callable[[], object]) -> None:
    with replacing(path):
        write()


def test_a_full_disk_in_the_words_of_safetensors_is_one_sentence(tmp_path: Path):
    def fails() -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    refused(lambda: written(tmp_path / "cache", fails), "the disk is full")


def test_places_that_take_no_file_are_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    write_whole(tmp_path / "file", "text")
    refused(lambda: write_whole(tmp_path / "folder", "text"), "a folder is there")
    refused(lambda: write_whole(tmp_path / "file" / "inside", "text"), "a file stands where a folder is expected")
    refused(lambda: write_whole(tmp_path / "none" / "inside", "text"), "it is not there")
    refused(lambda: write_whole(tmp_path / ("x" * 300), "text"), "the path is too long")
    for read in (read_yaml, lambda path: read_json(path, 10**6)):
        refused(lambda read=read: read(tmp_path / "folder"), re.compile("a folder is there|There is no file"))


def test_a_folder_is_claimed_while_it_is_used(tmp_path: Path):
    with folder_claimed(tmp_path / "run"):
        refused(lambda: folder_claimed(tmp_path / "run").__enter__(), "is in use by another command", "wait for it")
    with folder_claimed(tmp_path / "run"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_the_claim_of_a_process_that_was_killed_ends(tmp_path: Path):
    read, write = os.pipe()
    if not (child := os.fork()):
        with folder_claimed(tmp_path):
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    refused(lambda: folder_claimed(tmp_path).__enter__(), "is in use")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with folder_claimed(tmp_path):
        pass
