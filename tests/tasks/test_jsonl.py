"""Files of the user's own: what they may say, how answers to them are scored, and what is refused with its line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.tasks import json_lines
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.json_lines import read_json_lines
from kvprobe.tasks.jsonl import JSONLines
from tests.refusals import refused

GOOD = {"prompt": "Which colour is the sky?", "answer": "light blue"}

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1).filter(
    lambda text: text == text.strip()
)


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "own.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_a_line_may_have_all_fields(tmp_path: Path):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Is it noon?"},
    ]
    rich = {"id": "noon", "prompt": messages, "answer": "yes", "lead": "I say", "chance": 0.5}
    task = find_task(str(write(tmp_path, GOOD, b"", rich)))
    first, second = task.items(2, 0)
    assert (first.id, first.answer, first.lead) == ("line-1", "light blue", "")
    assert [(m.role, m.text) for m in first.chat.messages] == [("user", GOOD["prompt"])]
    assert (second.id, second.answer, second.lead) == ("noon", "yes", "I say")
    assert [{"role": m.role, "content": m.text} for m in second.chat.messages] == messages
    assert task.chance == 0.25
    assert task.items(1, 5) == [first]


@given(prompts=st.lists(st.tuples(words, words), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_a_written_item_is_read_and_its_answer_is_right(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[tuple[str, str]], seed: int
):
    entries = [{"prompt": said, "answer": answer} for said, answer in prompts]
    task = JSONLines(write(tmp_path_factory.mktemp("own"), *entries))
    assert task.available == len(entries)
    for (said, answer), item in zip(prompts, task.items(len(entries), seed), strict=True):
        assert (item.chat.messages[0].text, item.answer) == (said, answer)
        assert task.score(f"\n {answer} ", item) == {"contains": True, "exact": True}
        assert not any(task.score("", item).values())


def test_an_answer_is_found_as_whole_words_in_any_case(tmp_path: Path):
    task = JSONLines(write(tmp_path, GOOD))
    (item,) = task.items(1, 0)
    table = {
        "light blue": (True, True),
        " light blue\n": (True, True),
        "It is Light Blue.": (True, False),
        "Light blue": (True, False),
        "light bluebell": (False, False),
        "twilight blue": (False, False),
        "light  blue": (False, False),
        "blue": (False, False),
    }
    for text, (contains, exact) in table.items():
        assert task.score(text, item) == {"contains": contains, "exact": exact}


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (
            "500",
            ["500", "It is 500.", "$500, or so", "(500)", "500,", "A-500", "$500.00", "5e2", "**500**"],
            ["1,500", "500.5", "500,000", "-500", "2.500"],
        ),
        ("-5", ["-5", "It is -5.", "−5"], ["5", "-5.5", "-51"]),
        ("9500", ["9,500", r"9{,}500", "9 500"], ["95 00", "19,500"]),
        ("0500", ["0500"], ["500"]),
        ("2 b", ["2 b", "so 2 B."], ["1.2 b", "2 bc"]),
    ],
)
def test_a_number_is_no_part_of_another(tmp_path: Path, answer: str, right: list[str], wrong: list[str]):
    task = JSONLines(write(tmp_path, {**GOOD, "answer": answer}))
    (item,) = task.items(1, 0)
    assert [text for text in right + wrong if task.score(text, item)["contains"]] == right


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", "not JSON"),
        (b"prompt: x", "not JSON"),
        (b'{"prompt": "x", "answer": "y"} {}', "not JSON"),
        (b'{"prompt": "x", "answer": "y", "chance": NaN}', "NaN is not a number of JSON"),
        (b'{"prompt": "\xff", "answer": "y"}', "not UTF-8"),
        (b'{"prompt": "\\ud800", "answer": "y"}', "not UTF-8"),
        (b"[" * 200_000, "not JSON"),
        (b'{"chance": ' + b"1" * 5000 + b"}", "not JSON"),
        (b"[1, 2]", "is [1, 2]; write one JSON object"),
        (b'"' + b"x" * json_lines.MAX_LINE_BYTES + b'"', "longer than"),
        ({"answer": "y"}, "'prompt' is missing"),
        ({"prompt": "x"}, "'answer' is missing"),
        ({"prompt": "x", "answer": 5}, "'answer' is 5; it must be a text"),
        ({"prompt": "x", "answer": "  "}, "must be a text that is not empty"),
        ({"prompt": "x", "answer": "y\n"}, "begins or ends with white space"),
        ({"prompt": "x", "answer": "y", "lead": "So "}, "begins or ends with white space"),
        ({"prompt": "x", "answer": "y", "laed": "So"}, "did you mean 'lead'"),
        ({"prompt": "x", "answer": "y", "chance": 1.5}, "chance=1.5"),
        ({"prompt": "x", "answer": "y", "chance": True}, "chance=True"),
        ({"prompt": "x", "answer": "y", "chance": "0"}, "chance='0'; it must be a number from 0 to 1"),
        ({"prompt": "x", "answer": "y", "id": 7}, "'id' is 7"),
        ({"prompt": "x", "answer": "y", "id": "line-1"}, "also that of line 1"),
        ({"prompt": [], "answer": "y"}, "at least one message"),
        ({"prompt": {"role": "user"}, "answer": "y"}, '\'prompt\' is {"role": "user"}; it must be a text'),
        ({"prompt": ["x"], "answer": "y"}, "must be objects with 'role' and 'content'"),
        ({"prompt": [{"role": "user"}], "answer": "y"}, "must be objects with 'role' and 'content'"),
        ({"prompt": [{"role": "user", "content": [1]}], "answer": "y"}, "'content' is [1]; it must be a text"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "y"}, "must end in a message of the user"),
    ],
)
def test_a_bad_line_is_refused_in_one_sentence_with_its_number(tmp_path: Path, line: Any, sentence: str):
    path = write(tmp_path, GOOD, b"", line, GOOD)
    assert refused(lambda: JSONLines(path).items(1, 0), sentence).startswith(f"{path}, line 3: ")


def test_files_beyond_the_limits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, GOOD, GOOD, GOOD)
    monkeypatch.setattr(json_lines, "MAX_LINES", 3)
    assert JSONLines(path).available == 3
    monkeypatch.setattr(json_lines, "MAX_LINES", 2)
    refused(lambda: JSONLines(path).items(1, 0), "more than 2 lines")
    monkeypatch.setattr(json_lines, "MAX_FILE_BYTES", path.stat().st_size - 1)
    refused(lambda: JSONLines(path).items(1, 0), "is larger than")


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path):
    for path in (tmp_path / "none.jsonl", tmp_path, Path("/dev/zero")):
        refused(lambda path=path: read_json_lines(path, lambda number, entry: number), "There is no file")
    refused(lambda: JSONLines(write(tmp_path, b"", b"  ")).items(1, 0), "is empty")


def test_more_items_than_lines_and_no_new_tokens_are_refused(tmp_path: Path):
    path = write(tmp_path, GOOD)
    refused(lambda: JSONLines(path).items(2, 0), "2 items of", "were asked for; there are 1")
    refused(lambda: JSONLines(path, max_new_tokens=0), "max_new_tokens=0")
