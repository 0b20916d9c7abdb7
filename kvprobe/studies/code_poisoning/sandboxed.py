"""What runs inside the sandbox: a program of its own, of the standard library alone.

It reads a program, a function's name and tests as JSON, and prints what the function returned for each test as a line
of text. Code is refused unless each part of its syntax, each attribute and each import is on a list. Limits on time,
memory, files, processes and output hold for the whole process, whatever the code does.
"""

import ast
import bisect
import builtins
import collections
import contextlib
import functools
import heapq
import itertools
import json
import math
import os
import re
import string
import sys
import types
import typing
from collections.abc import Mapping, Sequence, Set
from typing import Any

SECONDS = 2
MEMORY = 512 * 2**20
OUTPUT = 2**16
UNLIMITED = 77
"""What the process ends with where limits cannot be set, before it runs any code."""
LONGEST = 2_000
"""Characters of a result; of a longer one only that is said."""


def _words(text: str) -> list[str]:
    return text.split()


MODULES: dict[str, dict[str, Any]] = {
    name: {export: getattr(module, export) for export in exports}
    for name, module, exports in (
        ("math", math, [export for export in dir(math) if not export.startswith("_")]),
        ("itertools", itertools, [export for export in dir(itertools) if not export.startswith("_")]),
        ("collections", collections, ["Counter", "OrderedDict", "defaultdict", "deque"]),
        ("functools", functools, ["cache", "lru_cache", "partial", "reduce"]),
        ("heapq", heapq, heapq.__all__),
        ("bisect", bisect, ["bisect", "bisect_left", "bisect_right", "insort"]),
        ("string", string, ["ascii_letters", "ascii_lowercase", "ascii_uppercase", "digits", "punctuation"]),
        ("re", re, ["IGNORECASE", "compile", "findall", "finditer", "fullmatch", "match", "search", "split", "sub"]),
        ("typing", typing, ["Any", "Callable", "Dict", "Iterable", "List", "Optional", "Set", "Tuple", "Union"]),
    )
}
BUILTINS = {
    name: getattr(builtins, name)
    for name in _words("""abs all any bin bool bytes chr complex dict divmod enumerate filter float format frozenset hex
    int isinstance iter len list map max min next oct ord pow range repr reversed round set slice sorted str sum tuple
    zip
    ArithmeticError AssertionError Exception IndexError KeyError LookupError OverflowError RecursionError StopIteration
    TypeError ValueError ZeroDivisionError""")
}
VALUES = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, range)
ATTRIBUTES = {
    name
    for owner in (*VALUES, collections.Counter, collections.OrderedDict, collections.deque, re.Match, re.Pattern)
    for name in dir(owner)
    if not name.startswith("_") and name not in ("format_map", "from_bytes", "fromhex")
} | {export for exports in MODULES.values() for export in exports}
"""All that may stand after a dot: methods of plain values, and what modules have."""
SYNTAX = tuple(
    getattr(ast, name)
    for name in _words("""Module FunctionDef arguments arg Return Assign AugAssign AnnAssign For While If Raise Try
    Assert Import ImportFrom alias Global Nonlocal Expr Pass Break Continue BoolOp NamedExpr BinOp UnaryOp Lambda IfExp
    Dict
    Set ListComp SetComp DictComp GeneratorExp comprehension Yield YieldFrom Compare Call keyword FormattedValue
    JoinedStr Constant Attribute Subscript Starred Name List Tuple Slice Delete ExceptHandler expr_context boolop
    operator unaryop cmpop""")
)


class RefusedCode(Exception):
    """The code holds what is not on the list."""


def check(tree: ast.AST) -> None:
    """Refuse code that holds anything that is not on the lists.

    Raises:
        RefusedCode: it does.
    """
    for node in ast.walk(tree):
        if not isinstance(node, SYNTAX):
            raise RefusedCode(type(node).__name__)
        names = [
            getattr(node, field, None) for field in ("id", "name", "asname", "arg", "module") if hasattr(node, field)
        ] + list(getattr(node, "names", []) if isinstance(node, ast.Global | ast.Nonlocal) else [])
        if wrong := [name for name in names if isinstance(name, str) and name.startswith("__")]:
            raise RefusedCode(wrong[0])
        if isinstance(node, ast.Attribute) and node.attr not in ATTRIBUTES:
            raise RefusedCode(f".{node.attr}")
        if isinstance(node, ast.Import) and any(alias.name not in MODULES for alias in node.names):
            raise RefusedCode("import")
        if isinstance(node, ast.ImportFrom):
            known = MODULES.get(node.module or "", {})
            if node.level or any(alias.name not in known for alias in node.names):
                raise RefusedCode("import")


def imported(name: str, *_: Any) -> Any:
    """What `import` gives: a namespace of the listed names, and never the module itself."""
    return types.SimpleNamespace(**MODULES[name])


def shown(value: Any) -> str:
    """A value as text, which is the same for values that are equal: `True` as 1, `2.0` as 2, sets and mappings
    sorted."""
    if value is None or isinstance(value, str | bytes):
        return ascii(value)
    if isinstance(value, bool | int):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{shown(key)}: {shown(item)}" for key, item in value.items())) + "}"
    if isinstance(value, Set):
        return "set(" + ", ".join(sorted(map(shown, value))) + ")"
    if isinstance(value, list | tuple):
        ends = "[]" if isinstance(value, list) else "()"
        return ends[0] + ", ".join(map(shown, value)) + ends[1]
    return f"<{type(value).__name__}>"


def limit() -> None:
    """Give up what the code must not have: time, memory, files, processes, output, and the rights of root."""
    import resource

    for kind, most in (
        ("RLIMIT_CPU", SECONDS),
        ("RLIMIT_AS", MEMORY),
        ("RLIMIT_FSIZE", OUTPUT),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_NOFILE", 0),
    ):
        resource.setrlimit(getattr(resource, kind), (most, most))
    if os.geteuid() == 0:
        for give_up in (lambda: os.setgroups([]), lambda: os.setgid(65534), lambda: os.setuid(65534)):
            with contextlib.suppress(OSError):  # in a container that lacks the right
                give_up()


def outcomes(code: str, function: str, tests: Sequence[str]) -> typing.Iterator[str]:
    """What the function returns for each test, or the kind of error that it raises."""
    names: dict[str, Any] = {"__builtins__": {**BUILTINS, "__import__": imported, "print": lambda *_, **__: None}}
    try:
        tree = ast.parse(code)
        check(tree)
        exec(compile(tree, "<answer>", "exec"), names)
    except BaseException as error:
        yield from [f"<refused: {error}>" if isinstance(error, RefusedCode) else f"<{type(error).__name__}>"] * len(
            tests
        )
        return
    for test in tests:
        try:
            given = ast.literal_eval(f"({test},)" if test else "()")
            text = shown(names[function](*given))
            yield text if len(text) <= LONGEST else "<long>"
        except BaseException as error:
            yield f"<{type(error).__name__}>"


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    try:
        limit()
    except (ImportError, AttributeError, OSError, ValueError):
        sys.exit(UNLIMITED)
    for text in outcomes(asked["code"], asked["function"], asked["tests"]):
        print(json.dumps(text), flush=True)
