"""A task of the user's own: prompts and answers from a JSONL file.

Each line is an object with `prompt` (a text, or a list of `{"role": …, "content": …}` that ends in a message of the
user) and `answer`. It may also have `id`, `lead` (the beginning of the reply) and `chance` (accuracy of guessing; 0 by
default).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvprobe.arguments import AtLeastOne, check_fields
from kvprobe.checks import require_share
from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.tasks.json_lines import read_json_lines, text_of
from kvprobe.tasks.numerals import number_of, numbers
from kvprobe.tasks.task import Item, first_items
from kvprobe.text.transcript import Transcript

FIELDS = ("prompt", "answer", "id", "lead", "chance")


@dataclass(frozen=True)
class JSONLines:
    """The items of a file, in its order.

    Attributes:
        path: the file.
        max_new_tokens: enough for the longest answer.

    Raises:
        UserError: there is no such file, or a line is not as described above.
    """

    path: Path
    max_new_tokens: AtLeastOne = 64

    one_line = False
    scorers = ("contains", "exact")

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self._lines  # so that a bad file is refused before a model is loaded for it

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def chance(self) -> float:
        """The mean over the lines."""
        return sum(chance for _, chance in self._lines) / len(self._lines)

    @property
    def available(self) -> int:
        """The number of items."""
        return len(self._lines)

    def items(self, count: int, seed: int) -> list[Item]:
        """The first `count` items of the file, whatever the seed.

        Raises:
            UserError: the file does not hold so many.
        """
        return first_items([item for item, _ in self._lines], count, self.name)

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """`contains`: the answer is in the text as whole words, in any case; `exact`: it is the whole text.

        A number is no part of another: 500 is not in 1,500, 500.5 or -500; but it is in $500.00, of the same value.
        `exact` ignores only white space around the text.
        """
        value = number_of(item.answer)
        before = r"(?<!\w)(?<!\d[.,])(?<!(?<!\w)-)" if item.answer[:1].isdigit() else r"(?<!\w)"
        after = r"(?!\w)(?![.,]\d)" if item.answer[-1:].isdigit() else r"(?!\w)"
        whole_words = before + re.escape(item.answer) + after
        return {
            "contains": bool(re.search(whole_words, text, re.IGNORECASE))
            or (value is not None and value in numbers(text)),
            "exact": text.strip() == item.answer,
        }

    @cached_property
    def _lines(self) -> list[tuple[Item, float]]:
        """Each item with its chance."""
        line_of: dict[str, int] = {}

        def parse(number: int, entry: Mapping[str, Any]) -> tuple[Item, float]:
            item = _item(number, entry)
            first = line_of.setdefault(item.id, number)
            if first != number:
                raise UserError(f"The id {item.id!r} is also that of line {first}; give each line its own.")
            require_share("The line", "chance", entry.get("chance", 0))
            return item, float(entry.get("chance", 0))

        return read_json_lines(self.path, parse)


def _item(number: int, entry: Mapping[str, object]) -> Item:
    """The item on this line of the file."""
    for field in entry:
        if field not in FIELDS:
            raise UserError(unknown("field", field, FIELDS))
    prompt = entry.get("prompt")
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": text_of(entry, "prompt")}]
    messages = [_message(message) for message in prompt]
    lead = text_of(entry, "lead") if "lead" in entry else ""
    name = text_of(entry, "id") if "id" in entry else f"line-{number}"
    return Item(name, Transcript.from_messages(messages), text_of(entry, "answer"), lead)


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise UserError("The messages of 'prompt' must be objects with 'role' and 'content' and nothing else.")
    return {"role": text_of(message, "role"), "content": text_of(message, "content")}
