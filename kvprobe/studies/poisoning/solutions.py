r"""Word problems with worked solutions, as GSM8K writes them (arXiv 2110.14168), and what follows from a wrong value.

    Ann has 3 beads and gets 4 more. Max has 5 beads. Ben has 2 beads more than Ann. How many beads does Ben have?
    Ann has 3 + 4 = <<3+4=7>>7 beads.
    Max has 5 beads.
    Ben has 7 + 2 = <<7+2=9>>9 beads.
    #### 9

Marks such as `<<3+4=7>>` tell what is computed; models do not see them. A value that a later line needs may be stated
wrongly, with one digit changed. Because it stands nowhere else in the problem, what follows from it is known.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from kvprobe.errors import UserError
from kvprobe.tasks.gsm8k import entries
from kvprobe.tasks.json_lines import text_of

LONGEST = 200
"""Characters of an expression that is computed."""
BEADS, GSM8K = "beads", "gsm8k"
"""Problems that are drawn, and those of a file or of the hub."""
CONSTANTS = frozenset(map(Fraction, (2, 4, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000)))
"""Numbers that may stand for themselves: hours of a day, percent. A computed value that is one of them could not be
followed for certain."""

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_NUMBER = re.compile(r"(?<![\d.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)|(?<![\d.])\.\d+")
_EQUATION = re.compile(r"((?:[\d($]|\.\d|-[\d($.])[\d.,+*/x×()$ -]*?)=\s*\$?(-?[\d,]*\.?\d+)")
_SIGNS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def computed(expression: str) -> Fraction | None:
    """The value of a sum or product of decimal numbers; None if it is anything else."""
    text = re.sub(r"[x×]", "*", re.sub(r"[,$\s]", "", expression))
    if len(text) > LONGEST:
        return None
    try:
        return _value(ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", text), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no sum or product of numbers")


def number_of(text: str) -> Fraction | None:
    """A number as it is written, with or without sign and commas; None if it is none."""
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text.removeprefix("-")) else None


def numbers_in(text: str) -> list[Fraction]:
    return [Fraction(number.replace(",", "")) for number in _NUMBER.findall(text)]


def equations_in(text: str) -> list[tuple[Fraction, Fraction]]:
    """What each equation of a text says: the value of its left side, and the number on its right."""
    pairs = ((computed(left), number_of(right)) for left, right in _EQUATION.findall(text))
    return [(left, right) for left, right in pairs if left is not None and right is not None]


@dataclass(frozen=True)
class WorkedProblem:
    """A question and its solution.

    Attributes:
        lines: of the solution, with marks, without the last, which gives the answer.
    """

    question: str
    lines: tuple[str, ...]
    answer: str

    @cached_property
    def slip(self) -> "SlipPlace | None":
        """The first value that may be stated wrongly; None if what would follow from it is not known."""
        return next((place for place in _places(self) if self.wrongs(place)), None)

    def wrongs(self, place: "SlipPlace") -> list[tuple[int, str]]:
        """The wrong values that differ from the right one in one digit, with the number of that digit."""
        digits = place.right
        changed = (
            (at, f"{digits[:at]}{digit}{digits[at + 1 :]}")
            for at in range(len(digits))
            for digit in "0123456789"
            if digit != digits[at] and (at or len(digits) == 1 or digit != "0")
        )
        followed = ((at, wrong, self.following(place, wrong)) for at, wrong in changed)
        # What stands before the value where it is needed must not tell it.
        return [
            (at, wrong) for at, wrong, lines in followed if lines and lines.lines[place.user].startswith(place.lead)
        ]

    def following(self, place: "SlipPlace", wrong: str) -> "Following | None":
        """The solution as it goes on from a wrong value; None if that is not known."""
        changed = {Fraction(place.right): wrong}
        asked = numbers_in(self.question)
        known = {*asked, *(value for _, _, value in _calculations(self))}
        if Fraction(wrong) in known:
            return None
        lines = [shown(line) for line in self.lines[: place.line]]
        lines.append(place.before + wrong + place.after)
        for line in self.lines[place.line + 1 :]:
            for expression, stated in _MARK.findall(line):
                before, after = computed(expression), computed(_with(expression, changed))
                value = number_of(stated.strip())
                if before is None or after is None or value is None or before != value:
                    return None
                if after == before:
                    continue
                written = _written(after)
                if written is None or value in asked or after in known or written in changed.values():
                    return None
                changed[value] = written
            lines.append(_with(shown(line), changed))
        answer = changed.get(number_of(self.answer) or Fraction(-1))
        return Following(tuple(lines), answer) if answer else None


@dataclass(frozen=True)
class SlipPlace:
    """Where a solution states a value that a later line starts from.

    Attributes:
        line: its number.
        before: what stands before the value on its line, as models see it.
        user: the number of the first line that names the value again.
        lead: what stands before the value on that line.
    """

    line: int
    before: str
    right: str
    after: str
    user: int
    lead: str


@dataclass(frozen=True)
class Following:
    """A solution as it goes on from a wrong value.

    Attributes:
        lines: as models see them.
    """

    lines: tuple[str, ...]
    answer: str


def shown(line: str) -> str:
    """A line of a solution as models see it."""
    return _MARK.sub("", line)


def _calculations(problem: WorkedProblem) -> list[tuple[int, str, Fraction]]:
    """The line, expression and value of each mark that can be read."""
    marks = ((number, mark) for number, line in enumerate(problem.lines) for mark in _MARK.findall(line))
    values = ((number, expression, number_of(stated.strip())) for number, (expression, stated) in marks)
    return [(number, expression, value) for number, expression, value in values if value is not None]


def _places(problem: WorkedProblem) -> Iterator[SlipPlace]:
    """Values that stand once on their line, nowhere before it, and again on a later line."""
    values = [value for _, _, value in _calculations(problem)]
    asked = numbers_in(problem.question)
    for at, line in enumerate(problem.lines):
        marks = list(_MARK.finditer(line))
        if len(marks) != 1:
            continue
        (mark,) = marks
        stated, rest = mark[2].strip(), line[mark.end() :]
        value = number_of(stated)
        earlier = [number for before in problem.lines[:at] for number in numbers_in(shown(before))]
        if value is None or not stated.isdigit() or value in asked or value in earlier or values.count(value) > 1:
            continue
        if computed(mark[1]) != value or not re.match(rf"{stated}(?![\d.,]*\d)", rest):
            continue
        if numbers_in(shown(line)).count(value) != 1:
            continue
        for user in range(at + 1, len(problem.lines)):
            text = shown(problem.lines[user])
            needs = any(value in numbers_in(expression) for expression, _ in _MARK.findall(problem.lines[user]))
            again = next((match for match in _NUMBER.finditer(text) if number_of(match[0]) == value), None)
            if again and again[0] == stated and (user > at + 1 or len(text[: again.start()].split()) > 1):
                yield SlipPlace(at, line[: mark.start()], stated, rest[len(stated) :], user, text[: again.start()])
            if again or needs:
                break


def _with(text: str, changed: Mapping[Fraction, str]) -> str:
    """A text with other numbers in place of these."""
    return _NUMBER.sub(lambda match: changed.get(Fraction(match[0].replace(",", "")), match[0]), text)


def _written(value: Fraction) -> str | None:
    """A whole number of 0 or more as text; None for any other."""
    return str(value.numerator) if value.denominator == 1 and value >= 0 else None


# ---- where problems are from


def worked_problems(source: str, count: int, seed: int) -> list[WorkedProblem]:
    """The first problems in which a value may be stated wrongly.

    Args:
        source: beads, gsm8k, or gsm8k:FILE.jsonl, a file with `question` and `answer` as GSM8K has them.

    Raises:
        UserError: there is no such source, it is malformed, or has fewer such problems.
    """
    kind, _, file = source.partition(":")
    if source == BEADS:
        return [draw_beads(np.random.default_rng([seed, number])) for number in range(count)]
    if kind != GSM8K:
        raise UserError(f"There are no worked problems {source!r}; expected {BEADS}, {GSM8K} or {GSM8K}:FILE.jsonl.")
    problems = [problem for problem in entries(Path(file) if file else None, _problem) if _can_be_followed(problem)]
    if len(problems) < count:
        raise UserError(
            f"{count} problems of {source} were asked for; in {len(problems)} of its solutions it is known what "
            "follows from a wrong value, so ask for at most as many."
        )
    return problems[:count]


def _can_be_followed(problem: WorkedProblem) -> bool:
    values = [value for _, _, value in _calculations(problem)]
    return problem.slip is not None and CONSTANTS.isdisjoint(values[:-1])


def _problem(number: int, entry: Mapping[str, object]) -> WorkedProblem:
    """The problem on this line of a file."""
    solution, mark, answer = text_of(entry, "answer").strip().rpartition("#### ")
    if not mark or number_of(answer.strip().lstrip("-$")) is None:
        raise UserError(f"The answer of problem {number} does not end in '#### ' and a number; add it.")
    lines = tuple(line.strip() for line in solution.splitlines() if line.strip())
    return WorkedProblem(text_of(entry, "question").strip(), lines, answer.strip())


BASE = 10
"""Values of drawn problems are below it."""
NAMES = ("Ann", "Ben", "Max", "Sue", "Tom", "Kim", "Joe", "Eve")
THINGS = ("beads", "books", "cards", "coins", "apples", "shells", "stamps", "eggs")


def draw_beads(rng: np.random.Generator) -> WorkedProblem:
    """Two sums below 10 of which the second starts from the first, and a line between that has nothing to do with
    them."""
    while True:
        has, more, extra, other = rng.integers(2, 7, 4).tolist()
        first, last = has + more, has + more + extra
        one, two, three = rng.permutation(NAMES)[:3].tolist()
        things = rng.choice(THINGS)
        question = (
            f"{one} has {has} {things} and gets {more} more. {two} has {other} {things}. {three} has {extra} {things} "
            f"more than {one} has then. How many {things} does {three} have?"
        )
        lines = (
            f"{one} has {has} + {more} = <<{has}+{more}={first}>>{first} {things}.",
            f"{two} has {other} {things}.",
            f"{three} has {first} + {extra} = <<{first}+{extra}={last}>>{last} {things}.",
        )
        problem = WorkedProblem(question, lines, str(last))
        if last < BASE and problem.slip:
            return problem
