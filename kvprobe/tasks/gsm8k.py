r"""GSM8K: grade-school word problems (arXiv 2110.14168), scored as lm-evaluation-harness scores its task, and by value.

`flexible` takes the last piece of the text that looks like a number, `strict` the first number after `#### `; results
are about `flexible`, since many models end in `\boxed{72}` whatever they were asked for. Both are compared as strings,
after commas, dollar signs, everything up to the last `#### ` and one full stop at the end were removed. The harness's
quirks are reproduced: `3.00` is not `3`. `numeric` compares values, however a number is written; see
`kvprobe.tasks.numerals.final_number`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.json_lines import Entry, read_json_lines, text_of
from kvprobe.tasks.numerals import final_number
from kvprobe.tasks.task import Item, first_items

REPOSITORY, FILE = "openai/gsm8k", "main/test-00000-of-00001.parquet"

REQUEST = (
    "Reason step by step, then end with a last line of the form '#### <number>' that gives the answer as a number."
)

INVALID = "[invalid]"
"""The number of a text without one."""

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")


@dataclass(frozen=True)
class GSM8K:
    """The test split, in the order of the file.

    Attributes:
        path: a local JSONL file with `question` and `answer` (which ends in `#### 72`); from the hub without one.

    Raises:
        UserError: there is no such file, or a line of it is not GSM8K.
    """

    path: Path | None = None

    chance = 0.0
    max_new_tokens = 512
    one_line = False
    scorers = ("flexible", "strict", "numeric")

    def __post_init__(self) -> None:
        if self.path is not None:
            _ = self._items  # so that a bad file is refused before a model is loaded for it

    @property
    def name(self) -> str:
        return "gsm8k" if self.path is None else f"gsm8k:{self.path}"

    @property
    def available(self) -> int:
        """The number of items."""
        return len(self._items)

    def items(self, count: int, seed: int) -> list[Item]:
        """The first `count` items of the file, whatever the seed.

        Raises:
            UserError: the published split could not be fetched, or the file does not hold so many.
        """
        return first_items(self._items, count, self.name)

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """`flexible`, `strict` and `numeric`, see above."""
        reference = _normalised(item.answer)
        numbers = {"flexible": _flexible(text), "strict": _strict(text)}
        by_text = {name: _normalised(number) == reference for name, number in numbers.items()}
        return {**by_text, "numeric": final_number(text) == final_number(item.answer)}

    @cached_property
    def _items(self) -> list[Item]:
        return entries(self.path, _item)


def entries(path: Path | None, parse: Callable[[int, Mapping[str, object]], Entry]) -> list[Entry]:
    """What `parse` makes of the number and the fields of each line of a file, or of the published test split.

    Raises:
        UserError: the split could not be fetched, there is no such file, or a line of it is refused.
    """
    return read_json_lines(path, parse) if path is not None else _from_hub(parse)


def _from_hub(parse: Callable[[int, Mapping[str, object]], Entry]) -> list[Entry]:
    """The published test split."""
    import pandas as pd
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(REPOSITORY, FILE, repo_type="dataset")
    except Exception as error:  # the hub client raises many kinds; all mean that there is no file
        raise UserError(
            f"{FILE} of {REPOSITORY!r} could not be fetched from the hub ({type(error).__name__}); download it "
            f"elsewhere, write its questions and answers to a JSONL file, and name the task gsm8k:/path/to/file.jsonl."
        ) from error
    table = pd.read_parquet(path, columns=["question", "answer"])
    return [
        parse(number, {str(key): row[key] for key in row}) for number, row in enumerate(table.to_dict("records"), 1)
    ]


def _item(number: int, entry: Mapping[str, object]) -> Item:
    """The item on this line of the file."""
    question, solution = text_of(entry, "question").strip(), text_of(entry, "answer").strip()
    _, mark, answer = solution.rpartition("#### ")
    if not mark or not re.search(r"\d", _normalised(answer)):
        raise UserError(f"The answer ends in {solution[-40:]!r}; end it in '#### ' and a number.")
    return Item(f"gsm8k-{number}", talk(("question", f"{question}\n\n{REQUEST}")), answer)


def _strict(text: str) -> str:
    match = _STRICT.search(text)
    return match[1].strip() if match else INVALID


def _flexible(text: str) -> str:
    # As the harness does: the last match, and of its two groups the first that is not empty.
    matches = _FLEXIBLE.findall(text)
    return next(filter(None, matches[-1])).strip() if matches else INVALID


def _normalised(text: str) -> str:
    for ignored in _IGNORED:
        text = re.sub(ignored, "", text)
    return text.lower()
