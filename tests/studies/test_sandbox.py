"""The sandbox in which answers run: what is right comes back, and nothing hostile gets out or holds it up."""

from pathlib import Path

import pytest

from kvprobe.studies.code_poisoning import sandbox, sandboxed
from kvprobe.studies.code_poisoning.sandbox import STOPPED, run_tests
from kvprobe.studies.code_poisoning.sandboxed import outcomes, shown
from tests.refusals import refused


def test_what_a_function_returns_comes_back_as_text_test_by_test():
    code = """
from typing import List
import math

def f(numbers: List[int]):
    print("not an outcome")
    return [math.floor(number) for number in sorted(numbers)], {"a": 1 / len(numbers)}
"""
    assert run_tests(code, "f", ["[2.5, 1]", "[]", "'a'"]) == (
        "([1, 2], {'a': 0.5})",
        "<ZeroDivisionError>",
        "<TypeError>",
    )


def test_equal_values_are_the_same_text():
    assert shown([True, 2.0, {3, 1}]) == shown([1, 2, {1, 3}])
    assert shown({"b": 1, "a": (1,)}) == shown({"a": (1,), "b": 1})
    assert len({shown(value) for value in ([1], (1,), {1}, "1", 1, None, "None", 1.5)}) == 8


REFUSED = {
    "an import": "import os",
    "an import from within": "from string import Formatter",
    "a module that a module imports": "import re\ndef f(): return re.enum.sys",
    "all of a module": "from math import *",
    "a dunder attribute": "def f(): return ().__class__.__base__.__subclasses__()",
    "a frame of a generator": "def f():\n    g = (g.gi_frame for _ in [1])\n    return list(g)[0].f_back.f_globals",
    "a traceback": "def f():\n    try:\n        1 / 0\n    except Exception as error:\n        return error.tb_frame",
    "a dunder name": "def f(): return __builtins__",
    "a class": "class A:\n    gi_frame = 1",
    "a pattern that reads attributes": "def f(x):\n    match x:\n        case int(real=y):\n            return y",
    "a coroutine": "async def f(): return 1",
    "attributes by text": "from operator import attrgetter",
}


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_holds_what_is_not_on_the_list_does_not_run(name: str):
    (outcome,) = outcomes(REFUSED[name], "f", [""])
    assert outcome.startswith("<refused"), outcome


MISSING = ("open('/etc/passwd')", "eval('1')", "exec('1')", "getattr(1, 'real')", "type(1)", "exit()",
           "globals()", "input()", "compile('1', '', 'eval')", "setattr(f, 'a', 1)", "vars()",
           "breakpoint()", "object()")  # fmt: skip


def test_what_opens_looks_up_or_ends_things_is_not_there():
    assert set(outcomes(f"def f(n): return [{', '.join(f'lambda: {call}' for call in MISSING)}][n]()", "f",
                        [str(place) for place in range(len(MISSING))])) == {"<NameError>"}  # fmt: skip


def test_a_text_that_names_attributes_reads_them_as_text_alone():
    assert list(outcomes("def f(): return '{0.__class__}'.format(1)", "f", [""])) == ["\"<class 'int'>\""]


HOSTILE = {
    "a loop that catches all": ("def f():\n    while True:\n        try: g()\n        except: pass", STOPPED),
    "a memory bomb": ("def f(): return [0] * 10**10", "<MemoryError>"),
    "recursion": ("def f(): return f()", "<RecursionError>"),
    "much output": ("def f(): return 'a' * 10**6", "<long>"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_ends_and_what_came_before_it_counts(name: str):
    code, outcome = HOSTILE[name]
    assert run_tests(f"{code}\ndef h(n): return f() if n else 0", "h", ["0", "1"]) == ("0", outcome)


def test_code_that_got_past_the_list_still_meets_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As if the list of names had a hole: no file, process or socket can be had, and much output is cut off."""
    source = Path(sandboxed.__file__).read_text(encoding="utf-8")
    hole = source.replace('"print": lambda', '"os": os, "socket": socket, "print": print, "_": lambda')
    assert hole != source
    (tmp_path / "hole.py").write_text(
        hole.replace("        check(tree)\n", "").replace("import string\n", "import socket, string\n"),
        encoding="utf-8",
    )
    monkeypatch.setattr(sandboxed, "__file__", str(tmp_path / "hole.py"))
    calls = ("os.open('/etc/passwd', 0)", "os.open('new', 65)", "os.fork()", "socket.socket()", "dict(os.environ)",
             "os.listdir('.')", "os.dup(0)")  # fmt: skip
    code = f"def f(n): return [{', '.join(f'lambda: {call}' for call in calls)}][n]()"
    found = run_tests(code, "f", [str(place) for place in range(len(calls))])
    assert set(found[:4] + found[5:]) <= {"<OSError>", "<BlockingIOError>", "<PermissionError>"}
    assert found[4] in ("{'PYTHONHASHSEED': '0'}", "{'LC_CTYPE': 'C.UTF-8', 'PYTHONHASHSEED': '0'}")
    flood = run_tests("def f():\n    for _ in range(10**5): print('x' * 100)\n    return 1", "f", ["", ""])
    assert set(flood) <= {STOPPED, "<OSError>"}


def test_a_system_that_cannot_limit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox.sys, "platform", "win32")
    refused(lambda: run_tests("def f(): return 1", "f", [""]), "this system does not have")


def test_limits_that_cannot_be_set_are_an_error_and_no_wrong_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As on macOS, where memory cannot be limited: every answer would look wrong."""
    source = Path(sandboxed.__file__).read_text(encoding="utf-8")
    (tmp_path / "mac.py").write_text(
        source.replace("    import resource\n", "    raise ValueError\n"), encoding="utf-8"
    )
    monkeypatch.setattr(sandboxed, "__file__", str(tmp_path / "mac.py"))
    refused(lambda: run_tests("def f(): return 1", "f", [""]), "this system does not have")


def test_sets_have_the_same_order_in_each_process():
    code = "def f(): return ''.join({*'abcdefghijklmnop'})"
    assert run_tests(code, "f", [""]) == run_tests(code, "f", [""])
