"""Little functions to be written, each with hidden tests, bugs of one line, and a step that it can be built from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from string import Template
from typing import Any

from kvprobe.shipped import shipped_entries
from kvprobe.studies.code_poisoning.sandboxed import outcomes

KINDS = ("base case", "operator", "off by one")
"""Of bugs."""


@dataclass(frozen=True)
class Function:
    """A function to be written.

    Attributes:
        call: its name and arguments.
        asks: what it does, after "that".
        code: a right solution.
        tests: arguments, as they would stand in a call; the first is shown as an example.
    """

    call: str
    asks: str
    code: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.call.partition("(")[0]

    @cached_property
    def expected(self) -> tuple[str, ...]:
        """What is right, test by test."""
        return tuple(outcomes(self.code, self.name, self.tests))

    @property
    def example(self) -> str:
        return f"For example, {self.name}({self.tests[0]}) returns {self.expected[0]}."

    @property
    def question(self) -> str:
        """What a user asks for."""
        return f"Write a Python function `{self.call}` that {self.asks} {self.example} {FORM}"


FORM = "Answer with the function alone, in a code block, without documentation, comments or tests."


@dataclass(frozen=True)
class Bug:
    """A solution with one wrong line.

    Attributes:
        kind: of the mistake.
        line: number of the line, from 0.
    """

    kind: str
    code: str
    line: int


@dataclass(frozen=True)
class CodeTask:
    """A function, its bugs, and a step that it can be built from.

    Attributes:
        template: which it was made from, as others were with other numbers.
    """

    template: int
    whole: Function
    bugs: tuple[Bug, ...]
    step: Function


def tasks(count: int) -> list[CodeTask]:
    """The first tasks: one of each template, then a second of each, and so on."""
    return list(all_tasks()[:count])


@cache
def all_tasks() -> tuple[CodeTask, ...]:
    templates = shipped_entries("studies/code_poisoning/tasks")
    most = max(len(template["variants"]) for template in templates)
    return tuple(
        _task(number, template, template["variants"][variant])
        for variant in range(most)
        for number, template in enumerate(templates)
        if variant < len(template["variants"])
    )


def _task(number: int, template: Mapping[str, Any], values: Mapping[str, Any]) -> CodeTask:
    def filled(text: str) -> str:
        return Template(text).substitute(values)

    def function(given: Mapping[str, Any]) -> Function:
        texts = {field: filled(given[field]) for field in ("call", "asks", "code")}
        return Function(**texts, tests=tuple(map(filled, given["tests"])))

    whole = function(template)
    bugs = tuple(_bug(whole.code, kind, *map(filled, template["bugs"][kind])) for kind in KINDS)
    return CodeTask(number, whole, bugs, function(template["step"]))


def _bug(code: str, kind: str, right: str, wrong: str) -> Bug:
    """The code with the first place of a text changed."""
    place = code.index(right)
    return Bug(kind, code.replace(right, wrong, 1), code[:place].count("\n"))
