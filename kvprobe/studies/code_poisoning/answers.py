"""What an answer in code is: the function in it, its outcome test by test, and what a fix did to an error."""

import ast
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvprobe.studies.code_poisoning.sandbox import run_tests
from kvprobe.studies.code_poisoning.tasks import Function

Fix = Literal["right", "new", "same", "cosmetic", "repeated", "none"]
FIXES: dict[Fix, str] = {
    "right": "right",
    "new": "a new error",
    "same": "other code, the same error",
    "cosmetic": "a cosmetic change",
    "repeated": "the same code again",
    "none": "no code",
}
"""What a fix is, in words."""
LONGEST = 8_000
"""Characters of an answer that are read."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Answer:
    """An answer that was run.

    Attributes:
        code: the imports, constants and functions in it; empty where the function that was asked for is not there.
        outcomes: what each test gave.
        right: whether all tests gave what they must.
    """

    code: str
    outcomes: tuple[str, ...]
    right: bool


NOTHING = Answer("", (), False)
"""Where the function that was asked for is not there."""


def judged(function: Function, texts: Sequence[str]) -> list[Answer]:
    """Answers to one question, each run in a sandbox of its own."""
    return judged_all([(function, text) for text in texts])


def judged_all(asked: Sequence[tuple[Function, str]], helper: Sequence[str] = ()) -> list[Answer]:
    """Answers to several questions.

    Args:
        helper: code that stands before each answer's own, if any.
    """

    def judge(place: int) -> Answer:
        function, text = asked[place]
        code = code_in(text, function.name)
        if not code:
            return NOTHING
        whole = f"{helper[place]}\n\n{code}" if helper else code
        outcomes = run_tests(whole, function.name, function.tests)
        return Answer(code, outcomes, outcomes == function.expected)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(judge, range(len(asked))))


def code_in(text: str, name: str) -> str:
    """The code of an answer: of its last block that defines the function, or of the whole text where there is no block.

    Calls, tests and whatever else stands beside imports, constants and functions is left out. Empty where the function
    is not defined, or the code cannot be read.
    """
    text = text[:LONGEST]
    for block in reversed(_BLOCK.findall(text) or [text]):
        body = definitions(block)
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in body):
            with suppress(RecursionError):  # "1 + 1 + 1 …": nested too deeply to be written or compared
                substance(code := ast.unparse(ast.Module(body, [])))
                return code
    return ""


def definitions(block: str) -> list[ast.stmt]:
    """The imports, constants and functions of a block; what stands last and was cut off is left out."""
    lines = block.splitlines()
    starts = [place for place, line in enumerate(lines) if line[:1] not in ("", " ", "\t", "#", ")", "]", "}")]
    for end in (len(lines), *reversed(starts)):
        try:
            return [node for node in ast.parse("\n".join(lines[:end])).body if isinstance(node, _DEFINITIONS)]
        except _UNREADABLE:
            continue
    return []


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign)


def fix_of(before: Answer, after: Answer) -> Fix:
    """What a second answer made of a wrong first one."""
    if not after.code:
        return "none"
    if after.right:
        return "right"
    if after.outcomes != before.outcomes:
        return "new"
    if after.code == before.code:
        return "repeated"
    return "cosmetic" if substance(after.code) == substance(before.code) else "same"


def substance(code: str) -> str:
    """The code without names that it chose itself, annotations and documentation; comments and form are lost anyway."""
    tree = ast.parse(code)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            names.setdefault(node.name, f"name{len(names)}")
        elif isinstance(node, ast.arg):
            node.annotation = None
            names.setdefault(node.arg, f"name{len(names)}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, f"name{len(names)}")
    return ast.dump(_Renamed(names).visit(tree))


class _Renamed(ast.NodeTransformer):
    """The same code with other names."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.names[node.arg])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.names[node.name]
        return self.generic_visit(node)
