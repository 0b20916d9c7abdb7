"""What a user's study measures with: whatever of it changes, however it is reached, old rows do not pass for new."""

import os
import sys
from pathlib import Path

import pytest

from kvprobe.experiments import measuring as measuring_module
from kvprobe.fingerprint import tokenizer_digest
from kvprobe.studies import read_study
from tests.models import tiny_tokenizer

HEAD = """
import functools, importlib, importlib.util, json, os, pathlib, runpy, sys
from dataclasses import dataclass, field
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Study

@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    prompts: int = 8

def measure(model, config, run, strength=1):
    return strength

def conclude(rows, config, model):
    return Conclusion([])
"""
TAIL = 'STUDY = Study(name="s", title="t", question="q", config=Config, conclude=conclude, collect={collect})\n'
WAYS: dict[str, tuple[str, str]] = {
    "the function": ("measure", "def measure(model, config, run):\n    return 1"),
    "partial": ("functools.partial(measure, strength=1)", ""),
    "partial of partial": ("functools.partial(functools.partial(measure, strength=1))", ""),
    "lambda": ("lambda *given: measure(*given, strength=1)", ""),
    "default": ("measure", "def measure(model, config, run, strength=1):\n    return strength"),
    "constant": ("measure", "STRENGTH = 1"),
    "computed constant": ("measure", "STRENGTH = json.loads('[1]')"),
    "closure": ("made(1)", "def made(strength):\n    return lambda *given: measure(*given, strength)"),
    "nested": ("made()", "def made():\n    def inner(*given):\n        return measure(*given, 1)\n    return inner"),
    "decorator": (
        "times(1)(measure)",
        "def times(count):\n    def wrap(inner):\n        @functools.wraps(inner)\n"
        "        def called(*given):\n            return count * inner(*given)\n        return called\n    return wrap",
    ),
    "cached": ("functools.lru_cache(functools.partial(measure, strength=1))", ""),
    "method": (
        "Measure(1).collect",
        "class Measure:\n    def __init__(self, by): self.by = by\n    def collect(self, *_): 0",
    ),
    "callable": (
        "Measure(1)",
        "class Measure:\n    def __init__(self, by): self.by = by\n    def __call__(self, *_): 0",
    ),
    "slots": (
        "Measure(1)",
        "class Measure:\n    __slots__ = ('by',)\n    def __init__(self, by): self.by = by\n"
        "    def __call__(self, *_): 0",
    ),
    "class attribute": ("Measure.collect", "class Measure:\n    by = 1\n    def collect(*_): return Measure.by"),
    "inherited": (
        "Measure().collect",
        "class Base:\n    by = 1\nclass Measure(Base):\n    def collect(self, *_): return self.by",
    ),
    "field of a dataclass": (
        "Measure()",
        "@dataclass\nclass Measure:\n"
        "    by: object = field(default_factory=lambda: functools.partial(measure, strength=1))\n"
        "    def __call__(self, *_): 0",
    ),
    "getattr": ("measure", "STRENGTH_1 = 1\ndef measure(*_): return getattr(sys.modules[__name__], 'STRENGTH_1')"),
    "dispatch": ("{'a': functools.partial(measure, strength=1)}['a']", ""),
}


def measuring(folder: Path, code: str, name: str = "mine") -> str:
    file = folder / f"{name}.py"
    file.write_text(HEAD + code)
    os.utime(file, ns=(1, hash(code) % 10**9))
    return read_study(file).measuring["code"]


@pytest.mark.parametrize("way", WAYS)
def test_what_a_study_measures_with_counts_however_it_is_reached(way: str, tmp_path: Path):
    collect, code = WAYS[way]
    whole = f"{code}\n{TAIL.format(collect=collect)}"
    before = measuring(tmp_path, whole)
    assert measuring(tmp_path, f"# a remark\n{whole}") == before
    assert measuring(tmp_path, whole.replace('"t"', '"another title"')) == before
    assert measuring(tmp_path, whole.replace("1", "2")) != before


HELPED: dict[str, str] = {
    "import": "import {name}",
    "import in a function": "def collect(*_):\n    import {name}\n    return {name}.STRENGTH",
    "from import": "from {name} import STRENGTH",
    "importlib": "helper = importlib.import_module('{name}')",
    "importlib in a function": "def collect(*_):\n    return importlib.import_module('{name}').STRENGTH",
    "__import__": "def collect(*_):\n    return __import__('{name}').STRENGTH",
    "a path": "def collect(*_):\n    return runpy.run_path('{folder}/{name}.py')",
    "spec": "spec = importlib.util.spec_from_file_location('other', '{folder}/{name}.py')\n"
    "helper = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(helper)",
    "another's import": "import {name}_too",
    "read": "def collect(*_):\n    return exec(open('{folder}/{name}.py').read())",
    "read by name": "PATH = pathlib.Path('{folder}') / '{name}.py'\ndef collect(*_):\n    return PATH.read_text()",
    "read beside": "TEXT = (pathlib.Path(__file__).parent / 'elsewhere' / '{name}.py').read_text()",
}


@pytest.mark.parametrize("way", HELPED)
def test_what_a_study_measures_with_counts_wherever_it_stands(way: str, tmp_path: Path):
    name, folder = f"aide_{list(HELPED).index(way)}", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / f"{name}_too.py").write_text(f"import {name}\n")
    (folder / f"{name}.py").write_text("STRENGTH = 1\n")
    code = (
        f"sys.path.append('{folder}')\n{HELPED[way].format(name=name, folder=folder)}\n{TAIL.format(collect='measure')}"
    )
    try:
        before = measuring(tmp_path, code)
        assert measuring(tmp_path, code) == before
        (folder / "another.py").write_text("STRENGTH = 1\n")
        assert measuring(tmp_path, code) == before
        (folder / f"{name}.py").write_text("STRENGTH = 2\n")
        assert measuring(tmp_path, code) != before
    finally:
        sys.path[:] = [path for path in sys.path if path != str(folder)]


OPENED: dict[str, tuple[str, str]] = {
    "a task": ("find_task('{file}')", ""),
    "a default": ("read()", "def read(path='{file}'):\n    return open(path).read()"),
    "a tuple": ("[open(file) for file in FILES]", "FILES = ('{file}', 'none.txt')"),
    "a mapping": ("open(FILES['a'])", "FILES = {{'a': '{file}'}}"),
    "a class attribute": ("Given.path.read_text()", "class Given:\n    path = pathlib.Path('{file}')"),
    "an instance": (
        "GIVEN.path",
        "class Given:\n    def __init__(self, path): self.path = path\nGIVEN = Given('{file}')",
    ),
    "a typed constant": ("open(FILE)", "FILE: str = '{file}'"),
    "a closure": ("READ()", "def made(path):\n    return lambda: open(path)\nREAD = made('{file}')"),
    "a field": ("open(Given().path)", "@dataclass\nclass Given:\n    path: str = '{file}'"),
    "a helper": ("read('{file}')", "def read(path):\n    return open(path).read()"),
    "safetensors": ("safe_open('{file}', 'pt')", ""),
    "numpy": ("np.genfromtxt('{file}')", ""),
    "a database": ("sqlite3.connect('{file}')", ""),
    "an archive": ("zipfile.ZipFile('{file}')", ""),
    "a command": ("subprocess.run(['cat', '{file}'])", ""),
    "the working folder": ("open('working.txt')", ""),
    "a folder": ("kv.load('held')", ""),
    "a pattern": ("list(pathlib.Path('held').glob('*.txt'))", ""),
    "a deep path": ("open('held/deep/file.txt')", ""),
    "a joined path": ("open(os.path.join('held', 'deep', 'file.txt'))", ""),
    "a large file": ("open('{file}')", "LARGE = 1"),
}


@pytest.mark.parametrize("way", OPENED)
def test_files_and_folders_that_are_named_count_whoever_opens_them(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    call, code = OPENED[way]
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.setattr(measuring_module, "_WHOLE", 2 if "LARGE" in code else 100)
    (tmp_path / "held" / "deep").mkdir(parents=True)
    files = [Path("working.txt"), tmp_path / "given.txt", tmp_path / "held" / "deep" / "file.txt"]
    for file in files:
        file.write_text("one")
    whole = f"{code}\ndef collect(*_):\n    return {call}\n".format(file="given.txt") + TAIL.format(collect="collect")
    before = measuring(tmp_path, whole)
    (tmp_path / "unnamed.txt").write_text("one")
    assert measuring(tmp_path, whole) == before
    for file in files:
        file.write_text("other")
    assert measuring(tmp_path, whole) != before


@pytest.mark.parametrize(
    "code",
    [
        "open('log.txt', 'a').write('x')",
        "pathlib.Path('log.txt').write_text('x')",
        "np.save('log.txt', [])",
        "rows.to_csv('log.txt')",
        "LOG.open('w')",
        "['.', '/', '/tmp', '..', '']",
        "(LOG / 'none').mkdir()",
    ],
)
def test_files_that_are_written_and_folders_around_do_not_count(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    body = f"def collect(*_):\n    {code}\n    LOG.touch()\n"
    whole = f"LOG = pathlib.Path('log.txt')\n{body}{TAIL.format(collect='measure')}"
    before = measuring(tmp_path, whole)
    (tmp_path / "log.txt").write_text("measured")
    assert measuring(tmp_path, whole) == before


def test_an_environment_variable_that_is_read_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = f"def collect(*_):\n    return os.environ['STRENGTH']\n{TAIL.format(collect='measure')}"
    monkeypatch.setenv("STRENGTH", "1")
    before = measuring(tmp_path, code)
    monkeypatch.setenv("OTHER", "1")
    assert measuring(tmp_path, code) == before
    monkeypatch.setenv("STRENGTH", "2")
    assert measuring(tmp_path, code) != before


def test_what_is_filled_while_a_study_runs_counts_as_it_was(tmp_path: Path):
    code = f"KEPT = {{}}\nLOG = 'log.txt'\ndef collect(*_):\n    open(LOG, 'w')\n{TAIL.format(collect='measure')}"
    (tmp_path / "mine.py").write_text(HEAD + code)
    study = read_study(tmp_path / "mine.py")
    before = study.measuring
    study.collect.__globals__["KEPT"]["a"] = 1  # type: ignore[attr-defined]
    (tmp_path / "log.txt").write_text("measured")
    assert study.measuring == before
    study.collect.__globals__["KEPT"] = {}  # type: ignore[attr-defined]
    assert study.measuring == before
    study.collect.__globals__["KEPT"] = {"a": 2}  # type: ignore[attr-defined]
    assert study.measuring != before


def test_a_conclusion_that_the_measuring_calls_counts(tmp_path: Path):
    code = f"def measure(*given):\n    return conclude(*given)\n{TAIL.format(collect='measure')}"
    before = measuring(tmp_path, code)
    assert measuring(tmp_path, code.replace("STUDY", "def conclude(*_):\n    return 1\nSTUDY")) != before


def test_the_vocabulary_of_a_tokenizer_counts_whatever_holds_it():
    class Plain:
        """A tokenizer of another library."""

        def __init__(self, words: list[str]) -> None:
            self.words = words

        def decode(self, ids: list[int]) -> str:
            return " ".join(self.words[number] for number in ids)

        def __len__(self) -> int:
            return len(self.words)

    assert tokenizer_digest(Plain(["a", "b"])) != tokenizer_digest(Plain(["b", "a"]))
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer.add_tokens(["zzz"])
    assert tokenizer_digest(tokenizer) != before
