"""What a model is known by: one hash of its weights, one of its config, one of its tokenizer with the chat template.

Numbers depend on all three. What does not decide them is left out: paths, versions, dtypes (weights are hashed as they are),
which kernel runs, how a tokenizer pads.
"""

import hashlib
import json
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from kvprobe.errors import UserError

PARTS = ("weights", "config", "tokenizer or chat template")
"""What the parts of a fingerprint stand for, in their order; a hyphen stands between them."""

_INDIFFERENT = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "attn_implementation", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type", "name_or_path",
}  # fmt: skip


def fingerprint(plain: Any, tokenizer: Any, rounded: torch.dtype | None = None) -> str:
    """The fingerprint of a Hugging Face model and its tokenizer (or None), the same wherever they were loaded from.

    Args:
        rounded: take the weights as they are in this dtype.
    """
    return "-".join((_weights(plain, rounded), _config(plain), _tokenizer(tokenizer)))


def differing(one: str, other: str) -> str:
    """Which parts of two fingerprints differ, in words."""
    ours, theirs = one.split("-"), other.split("-")
    if not len(ours) == len(theirs) == len(PARTS):
        return "fingerprint of another format"
    return ", ".join(part for part, own, its in zip(PARTS, ours, theirs, strict=True) if own != its)


def digest(pieces: Iterable[bytes | memoryview], size: int = 8) -> str:
    """One hash of several pieces, each of which keeps its borders."""
    found = hashlib.blake2b(digest_size=size)
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()


class Maker:
    """The model that made a cache, by its fingerprint, which is taken when it is first asked for: hashing weights takes time.

    A model is not kept in memory for its caches' sake.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a fingerprint, or what has one."""
        self._model = (lambda: model) if isinstance(model, str) else weakref.ref(model)

    @cached_property
    def fingerprint(self) -> str:
        """See `kvprobe.fingerprint.fingerprint`.

        Raises:
            UserError: the model is gone, and nobody asked before.
        """
        model = self._model()
        if model is None:
            raise UserError(
                "The model that made this cache is no longer in memory, so its fingerprint cannot be taken; save or use the cache "
                "while it is, or give up the check with dataclasses.replace(cache, made_by=None)."
            )
        return model if isinstance(model, str) else model.fingerprint

    def same(self, other: "Maker") -> bool:
        """Whether both are the same model, loaded once or twice."""
        return self is other or self.fingerprint == other.fingerprint


def _weights(plain: Any, rounded: torch.dtype | None) -> str:
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(plain.state_dict().items()):
        found.update(name.encode())
        taken = tensor.detach().to(rounded) if rounded is not None and tensor.is_floating_point() else tensor.detach()
        found.update(taken.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _config(plain: Any) -> str:
    # What differs from the defaults, so that a setting which a later transformers adds changes nothing.
    stops = getattr(getattr(plain, "generation_config", None), "eos_token_id", None)
    return digest([_json([type(plain).__name__, _decisive(plain.config.to_diff_dict()), stops])], 4)


def _decisive(settings: Any) -> Any:
    """Settings without those that decide no number, at any depth."""
    if isinstance(settings, dict):
        kept = {str(key): value for key, value in settings.items()}
        return {
            key: _decisive(value) for key, value in kept.items() if key not in _INDIFFERENT and not key.startswith("_")
        }
    return [_decisive(each) for each in settings] if isinstance(settings, list | tuple) else settings


def _tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    else:
        rules = getattr(tokenizer, "get_vocab", dict)()
    special = getattr(tokenizer, "special_tokens_map", None)
    return digest([_json([rules, special, getattr(tokenizer, "chat_template", None)])], 4)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
