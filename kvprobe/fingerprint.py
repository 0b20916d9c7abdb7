"""The identity of a model: a hash of its weights, one of its config, and one of its tokenizer with the chat template.

Results depend on all three. Settings that change no result are left out: paths, versions, dtypes (weights are hashed
as they are), the kernel, the padding of a tokenizer.
"""

import ast
import hashlib
import inspect
import json
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from kvprobe.errors import UserError

PARTS = ("weights", "config", "tokenizer or chat template")
"""The parts of a fingerprint, in order; they are joined by hyphens."""

_INDIFFERENT = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "attn_implementation", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type", "name_or_path",
}  # fmt: skip


@runtime_checkable
class _Config(Protocol):
    def to_diff_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Configured(Protocol):
    """A Hugging Face model: weights and a config."""

    @property
    def config(self) -> _Config: ...
    def state_dict(self) -> Mapping[str, torch.Tensor]: ...


def fingerprint(plain: "Configured", tokenizer: object, rounded: torch.dtype | None = None) -> str:
    """The fingerprint of a Hugging Face model and its tokenizer (or None), the same wherever they were loaded from.

    Args:
        rounded: dtype to which weights are rounded first.
    """
    return "-".join((_weights(plain, rounded), _config(plain), _tokenizer(tokenizer)))


def differing(one: str, other: str) -> str:
    """Which parts of two fingerprints differ, in words."""
    ours, theirs = one.split("-"), other.split("-")
    if not len(ours) == len(theirs) == len(PARTS):
        return "fingerprint of another format"
    return ", ".join(part for part, one, other in zip(PARTS, ours, theirs, strict=True) if one != other)


def digest(pieces: Iterable[bytes | memoryview], size: int = 8) -> str:
    """One hash of several pieces and the borders between them."""
    hasher = hashlib.blake2b(digest_size=size)
    for piece in pieces:
        hasher.update(len(piece).to_bytes(8, "little"))
        hasher.update(piece)
    return hasher.hexdigest()


def digest_of_code(module: str, without: Collection[str] = ()) -> str:
    """A hash of what an imported module does, but for the functions and values of these names, and of what it imports
    from beside it: from its package, or else from its folder.

    Raises:
        UserError: its code cannot be read.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError) as error:
        raise UserError(f"The code of the module {module!r} cannot be read; put it in a Python file.") from error
    beside = _imported_from_beside(module, tree)

    def is_left_out(part: ast.stmt) -> bool:
        if isinstance(part, ast.Assign):
            return any(isinstance(name, ast.Name) and name.id in without for name in part.targets)
        return isinstance(part, ast.FunctionDef) and part.name in without

    parts = [part for part in tree.body if not is_left_out(part)]
    return digest(ast.dump(tree).encode() for tree in (ast.Module(parts, []), *beside))


class Maker:
    """The model that made a cache, with the weights that it had then, known by its fingerprint.

    The fingerprint is computed when first needed, because hashing weights takes time. Caches keep no model in memory.

    Attributes:
        name: to be read by people; the beginning of the fingerprint where nothing else is known.
        written: how often each weight had been written.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a fingerprint, or an object that has one."""
        self.name = (
            f"the model {model[:8]}" if isinstance(model, str) else str(getattr(model, "name", type(model).__name__))
        )
        self._model = (lambda: model) if isinstance(model, str) else weakref.ref(model)
        self.written: tuple[int, ...] = getattr(model, "written", ())

    @cached_property
    def fingerprint(self) -> str:
        """See `kvprobe.fingerprint.fingerprint`.

        Raises:
            UserError: the model is no longer in memory or its weights were written since, and the fingerprint was not
                computed before.
        """
        model = self._model()
        if model is None or getattr(model, "written", ()) != self.written:
            what = "is no longer in memory" if model is None else "has other weights now"
            raise UserError(
                f"The model that made this cache or routing {what}, so its fingerprint cannot be computed; use or save "
                "it earlier, or give up the check of a cache with dataclasses.replace(cache, made_by=None)."
            )
        return model if isinstance(model, str) else model.fingerprint

    def same(self, other: "Maker") -> bool:
        """Whether both are the same model, loaded once or twice."""
        return self is other or self.fingerprint == other.fingerprint


def _imported_from_beside(module: str, tree: ast.Module) -> list[ast.Module]:
    """The code of the modules that this one imports, and those in turn, from its package, or else from its folder; by
    name. Packages that were installed are not beside a file."""
    home, _, inner = module.partition(".")
    folder = Path(str(sys.modules[home].__file__)).parent

    def is_beside(name: str) -> bool:
        first = name.partition(".")[0]
        if first == "kvprobe":  # Its version is on record anyway.
            return False
        if inner:
            return first == home
        places = (folder / f"{first}.py", folder / first / "__init__.py")
        return not folder.name.endswith("-packages") and any(place.is_file() for place in places)

    trees: dict[str, ast.Module] = {}
    waiting = _imports(tree, sys.modules[module].__package__)
    while waiting:
        name = waiting.pop()
        spec = _spec(name) if name not in (module, *trees) and is_beside(name) else None
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            trees[name] = ast.parse(Path(spec.origin).read_bytes())
            waiting += _imports(trees[name], spec.parent)
    return [tree for _, tree in sorted(trees.items())]


def _imports(tree: ast.Module, package: str | None) -> list[str]:
    """All that a module of this package imports, wherever in its code; some may be names in a module, not modules."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return names


def _spec(module: str) -> ModuleSpec | None:
    """Where a module is; None if there is none of this name."""
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None


def _weights(plain: "Configured", rounded: torch.dtype | None) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(plain.state_dict().items()):
        hasher.update(name.encode())
        weights = tensor.detach().to(rounded) if rounded is not None and tensor.is_floating_point() else tensor.detach()
        hasher.update(weights.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _config(plain: "Configured") -> str:
    # Only differences from the defaults, so that a new setting of a later transformers changes nothing.
    stops = getattr(getattr(plain, "generation_config", None), "eos_token_id", None)
    return digest([_json([type(plain).__name__, _decisive(plain.config.to_diff_dict()), stops])], 4)


def _decisive(settings: object) -> object:
    """Settings without those that change no result, at any depth."""
    if isinstance(settings, dict):
        named = {str(key): value for key, value in settings.items()}
        return {
            key: _decisive(value) for key, value in named.items() if key not in _INDIFFERENT and not key.startswith("_")
        }
    return [_decisive(setting) for setting in settings] if isinstance(settings, list | tuple) else settings


def _tokenizer(tokenizer: object) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    else:
        rules = getattr(tokenizer, "get_vocab", dict)()
    special = getattr(tokenizer, "special_tokens_map", None)
    return digest([_json([rules, special, getattr(tokenizer, "chat_template", None)])], 4)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
