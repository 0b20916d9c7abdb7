"""What a study that does not ship measures with: a digest of the code and values that its `collect` reaches.

Rows stay only while it stays. It covers all modules that were not installed: those that are imported anywhere in the
code, by name or by importlib, from whatever folder, and those of functions, classes and objects among the values. It
covers values that no code shows: of functools.partial, defaults, closures, wrapped functions, attributes and module
globals (of what may be filled meanwhile, such as a dict, as they were when the process first asked), environment
variables by names that stand in the code, and whatever files and folders a text among code and values names, beside the
code or in the working folder, no matter what opens them, unless the code writes them. It covers neither names that are
computed, nor what is fetched, nor the inside of objects of other libraries, but for arrays, tables, models and
tokenizers.
"""

import ast
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch

from kvprobe.errors import UserError
from kvprobe.fingerprint import digest, tokenizer_digest

SHOWN = {"name", "title", "question", "conclude", "folder", "done", "figures", "claims", "labels", "written"}
"""Fields of a study that may change while its rows stay."""
_PLAIN = (bool, int, float, complex, str, bytes, PurePath, type(None), type(...), range)
_FIXED = (*_PLAIN, tuple, frozenset, FunctionType, type, ModuleType)
_WRITING = re.compile(r"(write_|save|mkdir|touch|to_(csv|parquet|json|pickle|feather|excel)$)")
"""Beginnings of names of functions that write files."""
_MODES = {"w", "wt", "wb", "w+", "a", "ab", "at", "a+", "x", "xb", "xt"}
_WHOLE, _WHOLE_INSIDE, _MOST_FILES = 2**26, 2**16, 10_000
"""The largest file that counts by its bytes, and the largest in a folder; others count by size and time of change. And
how many files of a folder count."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HERE = Path(__file__).parents[1]
_at_first: WeakKeyDictionary[ModuleType, dict[str, tuple[object, bytes, list[str]]]] = WeakKeyDictionary()
"""Of globals that may be filled meanwhile: their values, and digests and texts of what they held when the process first
asked."""


def digest_of_measuring(collect: object, others: Collection[object], without: Collection[str]) -> str:
    """A hash of all that `collect` reaches, and these other values.

    Args:
        without: names in the study's module, if nothing else there uses them; of a study that is made there only what
            it measures with counts.

    Raises:
        UserError: the code of the study's module cannot be read.
    """
    reached = _Reached(_module_of(collect), without)
    for value in (collect, *others):
        reached.add(value)
    reached.read()
    return digest(reached.pieces)


def _module_of(value: Any) -> str:
    """The module of a function, whatever it is wrapped in, or of an object's class."""
    while inner := getattr(value, "func", None) or getattr(value, "__wrapped__", None):
        value = inner
    return value.__module__


class _Reached:
    """What was reached so far, as pieces of a digest."""

    def __init__(self, home: str, without: Collection[str]) -> None:
        self.home, self.without = home, without
        self.pieces: list[bytes] = []
        self._seen: dict[int, object] = {}
        self._modules: set[str] = set()
        self._folders: list[str] = []
        self._beside = {Path().resolve()}
        self._texts: list[str] = []
        self._written: set[str] = set()
        self._joined: set[str] = set()
        self._module(home)

    def add(self, value: Any) -> None:
        """A value, and all that it reaches."""
        kind = type(value)
        self.pieces.append(f"{kind.__module__}.{kind.__qualname__}".encode())
        if isinstance(value, _PLAIN):
            self.pieces.append(repr(value).encode())
            if isinstance(value, str | PurePath) and _is_name(str(value)):
                self._texts.append(str(value))
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, ModuleType):
            self._module(value.__name__, value)
        elif isinstance(value, list | tuple):
            self._add_all(value)
        elif isinstance(value, set | frozenset):
            self.pieces += sorted(repr(entry).encode() for entry in value)
        elif isinstance(value, Mapping):
            self._add_all(entry for pair in value.items() for entry in pair)
        elif isinstance(value, np.ndarray):
            self._add_all((str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()))
        elif isinstance(value, torch.Tensor):
            self._add_all((str(value.dtype), value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
        elif isinstance(value, pd.DataFrame | pd.Series):
            self._add_all((value.to_json(), str(getattr(value, "dtypes", ""))))
        elif isinstance(value, type):
            self._type(value)
        elif isinstance(getattr(value, "fingerprint", None), str):
            self.pieces.append(value.fingerprint.encode())
        elif hasattr(value, "get_vocab"):
            self.pieces.append(tokenizer_digest(value).encode())
        else:
            self._object(value)

    def read(self) -> None:
        """Add what the files and folders hold that texts name, by a part of their path or all of it."""
        texts = {os.path.expanduser(text) for text in {*self._texts} - self._written}
        found: set[Path] = set()
        folders = self._beside
        for _ in range(3):
            found |= {(base / text).resolve() for base in folders for text in texts if _exists(base / text)}
            found -= {path for path in found for base in self._beside if base.is_relative_to(path)}
            folders = {path for path in found if path.is_dir()}
        joined = {Path(text).name for text in self._joined}
        partly = {path for other in found for path in other.parents if path.name in joined}
        partly |= {Path(folder).resolve() for folder in self._folders}
        for path in sorted(found - (partly & folders)):
            self._add_all((path.name, list(_held(path))))

    def _add_all(self, values: Any) -> None:
        for value in values:
            self.add(value)

    def _object(self, value: Any) -> None:
        """A function, whatever wraps one, or an object with its attributes."""
        if isinstance(value, FunctionType):
            self._module(value.__module__)
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            self.pieces.append(value.__qualname__.encode())
            if self._owns(value.__module__):
                self._add_all((value.__defaults__, value.__kwdefaults__, cells, vars(value)))
            else:  # what other libraries keep beside a function that they wrap is theirs
                self._add_all(cell for cell in cells if callable(cell))
            return
        for name in ("func", "args", "keywords", "__func__", "__self__", "__wrapped__", "fget"):
            if (inner := getattr(value, name, None)) is not None:
                self.add(inner)
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            self.add(dict(value.state_dict()))
        elif is_dataclass(kind):
            self._add_all((field.name, getattr(value, field.name, None)) for field in fields(kind))
        elif self._owns(kind.__module__):
            self.add(getattr(value, "__dict__", None))
            self._add_all(getattr(value, slot, None) for slot in getattr(kind, "__slots__", ()))
        self.add(kind)

    def _type(self, kind: type[Any]) -> None:
        self.pieces.append(kind.__qualname__.encode())
        if self._owns(kind.__module__):
            self._module(kind.__module__)
            self._add_all(kind.__bases__)
            self._add_all((name, value) for name, value in sorted(vars(kind).items()) if not name.startswith("__"))

    def _module(self, name: str, module: ModuleType | None = None) -> None:
        """A module's code, what that imports and reads, and the module's globals; nothing of one that was installed."""
        module = module or sys.modules.get(name)
        spec = None if module else self._spec(name)
        file = getattr(module, "__file__", None) or (spec and spec.origin)
        if name in self._modules or not self._owns(name, file):
            return
        self._modules.add(name)
        try:
            content = Path(str(file)).read_bytes()
            tree = ast.parse(content) if str(file).endswith(".py") else None
        except (OSError, SyntaxError, ValueError) as error:
            if name != self.home:
                return
            raise UserError(f"The code of the module {name!r} cannot be read; put it in a Python file.") from error
        if tree is None:
            self.pieces.append(content)
            return
        if name == self.home:
            tree = self._without_what_is_shown(tree)
        self.pieces.append(ast.dump(tree).encode())
        package = getattr(module, "__package__", None) or (spec.parent if spec else None)
        self._follow(tree, package, Path(str(file)).parent)
        for key, value in sorted(vars(module).items()) if module else ():
            if not key.startswith("__") and not (name == self.home and key in self.without):
                start, first = len(self.pieces), len(self._texts)
                self.add(value)
                if module and not isinstance(value, _FIXED):
                    known = _at_first.setdefault(module, {})
                    if key not in known or known[key][0] is not value:
                        known[key] = (value, digest(self.pieces[start:]).encode(), self._texts[first:])
                    self.pieces[start:], self._texts[first:] = [known[key][1]], known[key][2]

    def _owns(self, name: str, file: str | None = None) -> bool:
        """Whether a module was not installed, or is of the study's own package."""
        first, home = name.partition(".")[0], self.home.partition(".")
        if name == self.home or (home[1] and first == home[0]):
            return True
        file = file or getattr(sys.modules.get(name), "__file__", None)
        if not file or file == "frozen" or first == "kvprobe":
            return False
        parts = Path(file).resolve().parts
        return not (file.startswith(_INSTALLED) or {"site-packages", "dist-packages"} & set(parts)) and (
            _HERE not in Path(file).parents
        )

    def _spec(self, name: str) -> ModuleSpec | None:
        """Where a module is that is not imported; None if there is none of this name, or its package was installed."""
        first, _, rest = name.partition(".")
        try:
            spec = sys.modules[first].__spec__ if first in sys.modules else None
            spec = spec or find_spec(first) or PathFinder.find_spec(first, self._folders)
            if rest and spec and self._owns(first, spec.origin):
                return find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        return spec if not rest else None

    def _without_what_is_shown(self, tree: ast.Module) -> ast.Module:
        """The code of the study's module but for what may change while rows stay."""

        def is_left_out(part: ast.stmt) -> bool:
            return isinstance(part, ast.FunctionDef) and part.name in self.without

        kept: list[ast.stmt] = []
        for part in tree.body:
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            if any(isinstance(name, ast.Name) and name.id in self.without for name in targets):
                call = getattr(part, "value", None)
                if isinstance(call, ast.Call):
                    call.keywords = [keyword for keyword in call.keywords if keyword.arg not in SHOWN]
            kept.append(part)
        used = {
            node.id for part in kept if not is_left_out(part) for node in ast.walk(part) if isinstance(node, ast.Name)
        }
        return ast.Module([part for part in kept if not is_left_out(part) or getattr(part, "name", "") in used], [])

    def _follow(self, tree: ast.Module, package: str | None, folder: Path) -> None:
        """What code imports, the environment variables that it reads by names that stand in it, and all texts in it."""
        names: list[str] = []
        assigned = {
            name.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for name in node.targets
            if isinstance(name, ast.Name)
        }
        self._beside.add(folder.resolve())
        self._texts += _texts(tree, {})
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), package)
                names += [source, *(f"{source}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute | ast.Name) and _called(node) in ("environ", "getenv"):
                self.add({text: os.environ[text] for text in sorted(_texts(tree, {})) if text in os.environ})
            elif isinstance(node, ast.Call):
                texts, called = [*_texts(node, assigned)], _called(node.func)
                if called in ("import_module", "__import__"):
                    names += [text for text in texts if text.replace(".", "").isidentifier()]
                elif _WRITING.match(called) or (called == "open" and _opens_to_write(node)):
                    places = [argument for argument in node.args if not isinstance(argument, ast.Call)]
                    for place in [node.func, *places]:
                        self._written.update(_texts(place, assigned))
                elif called in ("join", "joinpath"):
                    self._joined.update(texts)
                elif "path" in ast.dump(node.func) and "'sys'" in ast.dump(node.func):
                    self._folders += [str(base / text) for base in (folder, Path()) for text in texts]
                    self._folders.append(str(folder))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                self._joined.update(_texts(node, assigned))
        for name in sorted(set(names)):
            self._module(name)


def _called(function: ast.expr) -> str:
    """The last name of a dotted one."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _opens_to_write(call: ast.Call) -> bool:
    given = [*call.args[isinstance(call.func, ast.Name) :], *(word.value for word in call.keywords)]
    return any(isinstance(argument, ast.Constant) and argument.value in _MODES for argument in given)


def _texts(tree: ast.AST, assigned: Mapping[str, ast.expr]) -> Iterator[str]:
    """Short texts that stand in code, or in what was assigned to a name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_name(node.value):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in assigned:
            yield from _texts(assigned[node.id], {})


def _is_name(text: str) -> bool:
    """Whether a text may name a file."""
    return 0 < len(text) < 256 and "\0" not in text and "\n" not in text


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder, other than of the whole machine, such as /tmp."""
    try:
        return path.is_file() or (path.is_dir() and len(path.resolve().parts) > 2)
    except OSError:
        return False


def _held(path: Path) -> Iterator[tuple[str, object]]:
    """What a file holds, or each file of a folder but for runs."""
    if path.is_file():
        yield "", _contents(path, _WHOLE)
        return
    count = 0
    for place, folders, files in os.walk(path):
        folders[:] = sorted(
            name for name in folders if name[0] not in "._" and not (Path(place, name) / "env.json").is_file()
        )
        for name in sorted(files)[: _MOST_FILES - count]:
            yield str(Path(place, name).relative_to(path)), _contents(Path(place, name), _WHOLE_INSIDE)
        count += len(files)
        if count >= _MOST_FILES:
            return


def _contents(path: Path, most: int) -> object:
    """The digest of a file; its size and time of change where it is large or cannot be read."""
    try:
        about = path.stat()
        return digest([path.read_bytes()]) if about.st_size <= most else (about.st_size, about.st_mtime_ns)
    except OSError:
        return None


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
