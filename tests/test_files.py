"""Files: what is written is whole or absent, and what a path names is known."""

import ast
import errno
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

import kvprobe
from kvprobe.files import expanded, filling, folder_claimed, read_json, read_yaml, replacing, write_whole
from kvprobe.probes.card import published_probes
from kvprobe.probes.probe import Probe
from kvprobe.report.plots.style import save
from kvprobe.report.views.page import tokens
from tests.refusals import refused

ROOM = Path(kvprobe.__file__).parent
WRITES = {"write_text", "write_bytes", "savefig", "save_file", "save_pretrained", "to_parquet", "to_csv", "touch"}
"""Names of functions that write files, wherever they are from."""
LEFT_OUT = {
    "files.py": "the functions that all others write with",
    "cli/entry.py": "the traceback of a defect, in a temporary file",
    "experiments/parts.py": "is given to Run.write_part, which names the file",
    "experiments/work.py": "the same",
    "studies/memento_toy/collect.py": "the same",
    "inference/measured.py": "silences the standard error of a library",
}


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
        (errno.EFBIG, "it would be larger than files may be here; raise the limit (ulimit -f)"),
        (errno.EMFILE, "too many files are open; close some"),
        (errno.ENFILE, "too many files are open; close some"),
        (errno.ENAMETOOLONG, "the path is too long; choose a shorter one"),
        (errno.ELOOP, "its links lead in a circle"),
        (errno.ESTALE, f"the system says: {os.strerror(errno.ESTALE)}; choose another place"),
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


@pytest.mark.parametrize(
    ("said", "words"),
    [("No space left on device (os error 28)", "the disk is full"), ("File too large (os error 27)", "ulimit -f")],
)
def test_what_the_system_refuses_in_the_words_of_safetensors_is_one_sentence(said: str, words: str, tmp_path: Path):
    def fails() -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {said}")

    refused(lambda: written(tmp_path / "cache", fails), words, str(tmp_path / "cache"))


def _figure(path: Path) -> None:
    from matplotlib.figure import Figure

    save(Figure(), path)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda path: tokens(["a"], {"b": [1.0]}).save(path), "old "),
        (_figure, "old.png"),
        (lambda path: Probe.load(sorted(published_probes())[0]).save(path.parent), "weights.safetensors"),
        (lambda path: write_whole(path, "more text than there is room for"), "old "),
    ],
    ids=["page", "figure", "probe", "text"],
)
def test_what_finds_no_room_leaves_what_was_there_and_is_named(
    write: Callable[[Path], object], named: str, tmp_path: Path
):
    names = ["old", "old.png", "old.svg", "card.yaml", "weights.safetensors", "README.md"]
    for name in names:
        (tmp_path / name).write_text(name, encoding="utf-8")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        refused(lambda: write(tmp_path / "old"), f"{tmp_path}/{named}", "would be larger", "ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        name: name for name in names
    }


def test_files_of_a_folder_are_replaced_once_all_are_written(tmp_path: Path):
    (tmp_path / "other").write_text("stays", encoding="utf-8")
    write_whole(tmp_path / "one", "old")

    def fails() -> None:
        with filling(tmp_path) as made:
            write_whole(made / "one", "new")
            raise OSError(errno.ENOSPC, "full")

    refused(fails, "the disk is full", str(tmp_path))
    assert (tmp_path / "one").read_text(encoding="utf-8") == "old"
    with filling(tmp_path) as made:
        write_whole(made / "one", "new")
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        "other": "stays",
        "one": "new",
    }


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to an open file"])
def test_what_is_no_file_is_not_replaced_by_one(kind: str, tmp_path: Path):
    path = tmp_path / "given"
    os.mkfifo(tmp_path / "pipe" if kind == "link to a pipe" else path) if "pipe" in kind else None
    if kind != "pipe":
        path.symlink_to(tmp_path / "pipe" if kind == "link to a pipe" else "/proc/self/fd/1")
    before = path.lstat()
    refused(lambda: write_whole(path, "text"), str(path), "is a device or a pipe", "name a file")
    after = path.lstat()  # a link that was followed has another time of access
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)


def _writes(tree: ast.AST) -> list[int]:
    """Lines that write a file other than within `replacing` or `filling`."""
    lines: list[int] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.With) and re.search("id='(replacing|filling)'", str([*map(ast.dump, node.items)])):
            continue
        name = getattr(node, "attr", getattr(node, "id", ""))
        opened = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "open"
        modes = ast.dump(node) if opened else ""
        lines += [getattr(node, "lineno", 0)] if name in WRITES or re.search(r"value='[wax]", modes) else []
        lines += _writes(node)
    return lines


def test_everything_is_written_with_one_function():
    found = {str(path.relative_to(ROOM)): _writes(ast.parse(path.read_text("utf-8"))) for path in ROOM.rglob("*.py")}
    assert {path for path, lines in found.items() if lines} <= LEFT_OUT.keys(), found


def test_places_that_take_no_file_are_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    write_whole(tmp_path / "file", "text")
    refused(lambda: write_whole(tmp_path / "folder", "text"), "a folder is there")
    refused(lambda: write_whole(tmp_path / "file" / "inside", "text"), "a file stands where a folder is expected")
    refused(lambda: write_whole(tmp_path / "none" / "inside", "text"), "There is no folder", "make it first")
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


def test_settings_that_say_something_twice_are_refused(tmp_path: Path):
    (path := tmp_path / "a.yaml").write_text("study: leakage\nsettings:\n  samples: 96\n  samples: 12\n")
    refused(lambda: read_yaml(path), "'samples' is there twice")
    path.write_text("x" * 65537)
    refused(lambda: read_yaml(path), "at most 65536")


def test_a_device_or_pipe_is_not_read_to_its_end(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        refused(lambda path=path: read_json(path, 100), "a device or a pipe")
        refused(lambda path=path: read_yaml(path), "There is no file")
