"""What a study that does not ship measures with: a digest of the code and values that its `collect` reaches.

Rows stay only while it stays. It covers all modules that were not installed: those that are imported anywhere in the
code, by name or by importlib, from whatever folder, and those of functions, classes and objects among the values. It
covers values that no code shows: of functools.partial, defaults, closures, wrapped functions, attributes and module
globals (of what may be filled meanwhile, such as a dict, as they were when the process first asked), and the files and
environment variables that the code reads by names that stand in it. It covers neither names that are computed, nor what
is fetched, nor the inside of objects of other libraries, but for arrays, tables, models and tokenizers.
"""

import ast
import os
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
_READS = (
    "read",
    "load",
    "open",
    "run_path",
    "spec_from_file_location",
    "SourceFileLoader",
    "import_module",
    "__import__",
)
"""Beginnings of names of functions whose arguments are files or modules."""
_WRITES = {"w", "wt", "wb", "w+", "a", "ab", "at", "a+", "x", "xb", "xt"}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HERE = Path(__file__).parents[1]
_at_first: WeakKeyDictionary[ModuleType, dict[str, tuple[object, bytes]]] = WeakKeyDictionary()
"""Of globals that may be filled meanwhile: their values, and digests of what they held when the process first asked."""


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
        self._module(home)

    def add(self, value: Any) -> None:
        """A value, and all that it reaches."""
        kind = type(value)
        self.pieces.append(f"{kind.__module__}.{kind.__qualname__}".encode())
        if isinstance(value, _PLAIN):
            self.pieces.append(repr(value).encode())
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
                start = len(self.pieces)
                self.add(value)
                if module and not isinstance(value, _FIXED):
                    known = _at_first.setdefault(module, {})
                    if key not in known or known[key][0] is not value:
                        known[key] = (value, digest(self.pieces[start:]).encode())
                    self.pieces[start:] = [known[key][1]]

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
        """What code imports, and the files and environment variables that it reads by names that stand in it."""
        names: list[str] = []
        assigned = {
            name.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for name in node.targets
            if isinstance(name, ast.Name)
        }
        read: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), package)
                names += [source, *(f"{source}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute | ast.Name) and _called(node) in ("environ", "getenv"):
                self.add({text: os.environ[text] for text in sorted(_texts(tree, {})) if text in os.environ})
            elif isinstance(node, ast.Call):
                texts = [*_texts(node, assigned)]
                if _called(node.func).startswith(_READS) and not _WRITES & set(texts):
                    read += texts
                elif "path" in ast.dump(node.func) and "'sys'" in ast.dump(node.func):
                    self._folders += [str(base / text) for base in (folder, Path()) for text in texts]
                    self._folders.append(str(folder))
        for name in sorted({*names, *(text for text in read if text.replace(".", "").isidentifier())}):
            self._module(name)
        folders = [base / text for base in (folder, Path()) for text in ("", *read) if (base / text).is_dir()]
        for path in sorted({base / text for base in folders for text in read if (base / text).is_file()}):
            self._add_all((path.name, digest([path.read_bytes()])))


def _called(function: ast.expr) -> str:
    """The last name of a dotted one."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(tree: ast.AST, assigned: Mapping[str, ast.expr]) -> Iterator[str]:
    """Short texts that stand in code, or in what was assigned to a name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 256:
            if "\0" not in node.value and "\n" not in node.value:
                yield node.value
        elif isinstance(node, ast.Name) and node.id in assigned:
            yield from _texts(assigned[node.id], {})


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
