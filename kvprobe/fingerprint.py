"""The identity of a model: a hash of its weights, one of its config, and one of its tokenizer with the chat template.

Results depend on all three. What was changed in a model after it was built from its config counts with the config:
adapters that are switched off, dropout, an attribute that was set, a hook for accelerate of the user's own class. Hooks
of torch are the user's own intervention and do not count. Settings that change no result are left out: paths, versions,
dtypes (weights are hashed as they are), the kernel, the padding of a tokenizer.
"""

import copy
import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import torch
from torch import nn

from kvprobe.errors import UserError
from kvprobe.weights import hooks_of, pieces, state

PARTS = ("weights", "config or modules", "tokenizer or chat template")
"""The parts of a fingerprint, in order; they are joined by hyphens."""

_INDIFFERENT = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "attn_implementation", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type", "name_or_path",
}  # fmt: skip


_INSIDE = frozenset(vars(nn.Module()))
"""Attributes of every module; of these, training, hooks and what a module holds are looked at apart."""

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, FunctionType)
_GATHERED = (list, tuple, dict, set, frozenset)
_PASSING = {
    "_hf_hook",
    "_is_hf_initialized",
    "all_tied_weights_keys",
    "gradient_checkpointing",
    "hf_device_map",
    "max_seq_len_cached",
    "name_or_path",
    *("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"),
}
"""Attributes that change no result, that a model sets as it reads, or, as hooks of accelerate, that are looked at
apart; and so are private ones of whole models.
accelerate guards the methods that move a model by attributes."""

_LIBRARIES = ("accelerate", "builtins", "kvprobe", "torch", "transformers", "transformer_lens")
"""Whose objects in a module are no settings of it, or are looked at apart."""
_OURS = ("accelerate.", "kvprobe.", "transformer_lens.", "transformers.")
"""Hooks from here pass, or change no number."""

_MOST_NUMBERS = 4096
"""Of a buffer that is looked at whenever the model is used, such as rotary frequencies."""
_MOST_HASHED = 2**24
_SAMPLED, _SMALL = 16, 1024
"""Numbers of each tensor with more than so many, spread over it from the first to the last, that show writes which
torch does not count."""


@runtime_checkable
class _Config(Protocol):
    def to_diff_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Configured(Protocol):
    """A Hugging Face model: weights and a config."""

    @property
    def config(self) -> _Config: ...
    def state_dict(self) -> Mapping[str, torch.Tensor]: ...


def state_of(plain: nn.Module) -> tuple[object, ...]:
    """What tells that a model was changed, cheap enough to be compared whenever it is used.

    How often each tensor was written, where it lies and some of its numbers; the config, and what `_altered` compares.
    """
    modules = list(plain.modules())
    tensors = [tensor for module in modules for tensor in _tensors(module)]
    samples: dict[object, list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            count = min(tensor.numel(), _SAMPLED if tensor.numel() > _SMALL else _SMALL)
            spread = max(1, (tensor.numel() - 1) // max(1, count - 1))
            few = tensor.as_strided((count,), (spread,)) if tensor.is_contiguous() else tensor.flatten()[::spread]
            samples.setdefault((tensor.dtype, tensor.device), []).append(few)
        read = [_bytes(torch.cat(some)).tobytes() for some in samples.values()]
    counted = [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]
    settings = _plain(vars(plain.config)) if isinstance(plain, Configured) else ()
    return (*counted, *read, settings, *map(_described, modules))


def fingerprint(plain: "Configured", tokenizer: object, rounded: torch.dtype | None = None) -> str:
    """The fingerprint of a Hugging Face model and its tokenizer (or None), the same wherever they were loaded from.

    Args:
        rounded: dtype to which weights are rounded first.
    """
    return "-".join((_weights(plain, rounded), config_digest(plain), tokenizer_digest(tokenizer)))


def differing(one: str, other: str) -> str:
    """Which parts of two fingerprints differ, in words."""
    ours, theirs = one.split("-"), other.split("-")
    if len(ours) == len(theirs) == 1:  # of files
        return "content"
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
        self.written: tuple[object, ...] = getattr(model, "written", ())
        self._met: Maker | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _maker, (self.name, self.fingerprint)  # other processes know it by its fingerprint

    @cached_property
    def fingerprint(self) -> str:
        """See `kvprobe.fingerprint.fingerprint`.

        Raises:
            UserError: the model is no longer in memory or its weights were written since, and the fingerprint was not
                computed before.
        """
        model = self._model()
        if model is None or getattr(model, "written", ()) != self.written:
            what = "is no longer in memory" if model is None else "has other weights now (or adapters, modules)"
            raise UserError(
                f"The model that made this cache or routing {what}, so its fingerprint cannot be computed; use or save "
                "it earlier, or give up the check of a cache with dataclasses.replace(cache, made_by=None)."
            )
        return model if isinstance(model, str) else model.fingerprint

    @cached_property
    def config(self) -> str | None:
        """The part of the fingerprint that is of the config, alike for all models of one kind and size, without hashing
        weights; None where it cannot be computed any more."""
        model = self._model()
        if "fingerprint" not in vars(self) and not isinstance(model, str):
            return model.config_digest if model is not None and model.written == self.written else None
        return dict(zip(PARTS, self.fingerprint.split("-"), strict=False)).get(PARTS[1])

    def confirmed(self) -> str:
        """The fingerprint, once all weights were hashed anew where this is what the model is now.

        Raises:
            UserError: see `fingerprint`; or weights were written in a way that torch does not count.
        """
        model: Any = self._model()
        if hasattr(model, "hash_again") and model.written == self.written:
            known = vars(self).get("fingerprint")
            if model.hash_again() != (known or model.fingerprint):
                raise UserError(
                    "Weights of the model were written through `.data` since it was first known, so it is unknown "
                    "which of them made this cache or routing; read the text again."
                )
        return self.fingerprint

    def same(self, other: "Maker") -> bool:
        """Whether both are the same model, loaded once or twice."""
        if self is other or self._met is other:
            return True
        if self.fingerprint != (other.confirmed() if isinstance(self._model(), str) else other.fingerprint):
            return False
        self._met = other
        return True


def distinct(makers: Sequence[Maker]) -> tuple[Maker, ...]:
    """Models, each once."""
    found: list[Maker] = []
    for maker in makers:
        if not any(one.same(maker) for one in found):
            found.append(maker)
    return tuple(found)


def _maker(name: str, fingerprint: str) -> Maker:
    maker = Maker(fingerprint)
    maker.name = name
    return maker


def _weights(plain: "Configured", rounded: torch.dtype | None) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for name, tensor in state(plain):
        hasher.update(name.encode())
        weights = tensor.detach().to(rounded) if rounded is not None and tensor.is_floating_point() else tensor.detach()
        hasher.update(_bytes(weights))
    return hasher.hexdigest()


def config_digest(plain: "Configured") -> str:
    """A hash of a model's class, config and stop tokens, and of what was changed in its modules, but for weights."""
    # Only differences from the defaults, so that a new setting of a later transformers changes nothing.
    stops = getattr(getattr(plain, "generation_config", None), "eos_token_id", None)
    settings = [type(plain).__name__, _decisive(plain.config.to_diff_dict()), stops]
    return digest([_json(settings + (_altered(plain) if isinstance(plain, nn.Module) else []))], 4)


def _altered(plain: Any) -> list[object]:
    """Modules that are not as the config alone would have them, by name; none of a model as it was loaded."""
    usual: dict[str, tuple[object, ...]] = {}
    try:
        with torch.device("meta"):
            fresh = type(plain)(copy.deepcopy(plain.config)).eval()
        for module in fresh.modules():
            for name in module._non_persistent_buffers_set:
                if (buffer := module._buffers[name]) is not None and buffer.numel() <= _MOST_HASHED:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
            if module._non_persistent_buffers_set:
                fresh._init_weights(module)
        for name, module in fresh.named_modules():
            held = plain.get_submodule(name)._buffers
            for part in module._non_persistent_buffers_set:  # a model in another dtype is the same
                if (buffer := module._buffers[part]) is not None and (other := held.get(part)) is not None:
                    module._buffers[part] = buffer.to(other.dtype)
        usual = {name: _described(module, whole=True) for name, module in fresh.named_modules()}
    except Exception:  # a class that needs more than its config: all of its modules count as altered
        pass
    return [
        [name, *map(str, now)]
        for name, module in plain.named_modules()
        if (now := _described(module, whole=True)) != usual.get(name)
    ]


def _changing(module: nn.Module, name: str) -> bool:
    """Whether a buffer is one that the model itself changes as it reads."""
    if name not in module._non_persistent_buffers_set:
        return False
    rotary = str(getattr(module, "rope_type", ""))
    return "dynamic" in rotary or "longrope" in rotary


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module itself computes by."""
    buffers = [tensor for name, tensor in module._buffers.items() if not _changing(module, name)]
    held = [*module._parameters.values(), *buffers]
    held += [value for value in vars(module).values() if type(value) is torch.Tensor]
    held = [piece for tensor in held if tensor is not None and not tensor.is_meta for piece in pieces(tensor)]
    return [tensor for tensor in held if tensor.numel()]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _plain(settings: Mapping[str, Any]) -> tuple[object, ...]:
    """What is plain of the attributes of an object."""
    return tuple(
        (name, value if type(value) in _PLAIN else repr(value))
        for name, value in settings.items()
        if type(value) in (*_PLAIN, *_GATHERED) and not name.startswith("_") and name not in _INDIFFERENT
    )


def _described(module: nn.Module, whole: bool = False) -> tuple[object, ...]:
    """What a module computes by, beside its weights and the modules in it.

    Args:
        whole: hash the tensors that are otherwise known by a sample.
    """
    described: list[object] = [type(module).__qualname__, module.training]
    is_whole = "all_tied_weights_keys" in vars(module)
    for name, value in vars(module).items():
        if name in _INSIDE or name in _PASSING or (is_whole and name.startswith("_")):
            continue
        if type(value) is FunctionType:
            described += [name, _origin(value)]
        elif type(value) in _PLAIN:
            described += [name, value]
        elif type(value) in _GATHERED and len(text := repr(value)) < 1000 and " at 0x" not in text:
            described += [name, text]
        elif type(value) is torch.Tensor:
            described += [name, digest([_bytes(value)]) if whole and not value.is_meta else ""]
        elif name == "forward":
            described += [] if _origin(value).startswith(_OURS) else [name, _origin(value)]
        elif type(value).__module__.split(".")[0] not in _LIBRARIES and hasattr(value, "__dict__"):
            described += [name, *_plain(vars(value))]
    for hook in hooks_of(module):
        if not type(hook).__module__.startswith("accelerate."):
            described += [_origin(hook), *_plain(vars(hook))]
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is None or buffer.device.type == "meta" or _changing(module, name):
            continue
        if buffer.numel() <= _MOST_NUMBERS:
            described += [name, str(buffer.tolist())]
        elif whole:
            described += [name, digest([_bytes(buffer)])]
    return tuple(described)


def _origin(function: Any) -> str:
    """Where a function, or the class of another callable, comes from."""
    inner = getattr(function, "func", getattr(function, "__wrapped__", function))
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    code = getattr(inner, "__code__", None)
    return f"{named.__module__}.{named.__qualname__} {'' if code is None else crc32(code.co_code)}"


def _decisive(settings: object) -> object:
    """Settings without those that change no result, at any depth."""
    if isinstance(settings, dict):
        named = {str(key): value for key, value in settings.items()}
        return {
            key: _decisive(value) for key, value in named.items() if key not in _INDIFFERENT and not key.startswith("_")
        }
    return [_decisive(setting) for setting in settings] if isinstance(settings, list | tuple) else settings


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of a tokenizer's rules, its vocabulary and its chat template; of None, too."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    elif hasattr(tokenizer, "get_vocab"):
        rules = tokenizer.get_vocab()
    else:
        rules = [tokenizer.decode([token]) for token in range(len(tokenizer))] if hasattr(tokenizer, "decode") else {}
    special = getattr(tokenizer, "special_tokens_map", None)
    return digest([_json([rules, special, getattr(tokenizer, "chat_template", None)])], 4)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
