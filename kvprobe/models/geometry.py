"""The shape of a model's cache: read from its config, then measured on one token, since configs may be wrong."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvprobe.errors import UserError
from kvprobe.names import one_line

_WITH_STATE = {"linear_attention", "hybrid", "hybrid_sliding", "conv"}
"""Kinds of layers with a recurrent or convolutional state. A token can be neither masked nor evicted there, and the
layers above depend on it, so that no part of such a cache can be proved by reading a few tokens again."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's cache.

    Attributes:
        windows: sliding window per layer in positions, None where attention is full.
        max_position: the first position that the model cannot read; None if there is no limit.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    windows: tuple[int | None, ...]
    max_position: int | None

    @property
    def shortest_window(self) -> int | None:
        """The shortest sliding window of any layer; None where all layers attend to everything."""
        return min((window for window in self.windows if window is not None), default=None)

    @classmethod
    def of(cls, config: Any) -> "Geometry":
        """Read a Hugging Face config.

        Raises:
            UserError: the model has layers without a KV cache of this kind (recurrent, chunked, latent), or reads an
                encoder beside its cache.
        """
        try:
            return cls._of(config)
        except UserError:
            raise
        except Exception as error:  # transformers raises its own error for values that differ between layers
            kind = config.__class__
            raise UserError(
                f"{getattr(kind, 'model_type', kind.__name__)} has heads of different sizes or numbers "
                f"in different layers, or other settings that kvprobe cannot read ({type(error).__name__}: "
                f"{one_line(error).partition('. ')[0]}); kvprobe reads models whose layers are alike."
            ) from error

    @classmethod
    def _of(cls, config: Any) -> "Geometry":
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(
                f"{config.model_type} is an encoder-decoder, whose decoder reads an encoder beside its cache; "
                f"kvprobe reads decoder-only models."
            )
        config = config.get_text_config()
        n_layers, n_heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
        if not n_layers or not n_heads or not getattr(config, "hidden_size", None):
            raise UserError(f"{config.model_type} has no attention heads to cache; kvprobe reads attention models.")
        if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
            raise UserError(
                f"{config.model_type} counts positions by slots (ALiBi) and ignores position_ids; kvprobe cannot "
                "place its tokens."
            )
        if getattr(config, "num_kv_shared_layers", 0):
            raise UserError(f"{config.model_type} has layers that share a cache; kvprobe reads models without.")
        if any(name.startswith("index_topk") for name in config.__dict__):
            raise UserError(
                f"{config.model_type} chooses by an index of its own which slots to attend to; kvprobe reads full and "
                f"sliding-window attention."
            )
        if hasattr(config, "kv_lora_rank"):
            raise UserError(
                f"{config.model_type} caches latent attention; kvprobe reads full and sliding-window attention."
            )
        return cls(
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
            d_head=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
            d_model=config.hidden_size,
            windows=_windows(config, n_layers),
            max_position=_max_position(config),
        )

    @classmethod
    def measured(cls, plain: PreTrainedModel) -> "Geometry":
        """The geometry of a loaded model: its config's, with KV heads and head size as in the cache of one token.

        Raises:
            UserError: see `of`; or the model cannot read a token into a cache of one key and one value a layer.
        """
        expected, name = cls.of(plain.config), type(plain).__name__
        past = DynamicCache()
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(plain.parameters()).device)
        try:
            with torch.no_grad():
                plain(input_ids=ids, position_ids=ids, past_key_values=past, use_cache=True)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model that kvprobe cannot read may fail in any way
            raise UserError(f"{name} cannot read one token into a KV cache ({one_line(error)}).") from error
        layers: Any = past.layers
        shapes = [tuple(layer.keys.shape) for layer in layers if getattr(layer, "keys", None) is not None]
        if len(shapes) != expected.n_layers or any(len(shape) != 4 or shape[2] != 1 for shape in shapes):
            raise UserError(
                f"{name} does not keep one key and one value per layer and token ({len(shapes)} layers of "
                f"{expected.n_layers} have some: {', '.join(map(str, sorted(set(shapes))[:3]))}); kvprobe reads such "
                "models only."
            )
        if len(set(shapes)) > 1:
            raise UserError(
                f"{name} has heads of different sizes or numbers in different layers "
                f"({', '.join(map(str, sorted(set(shapes))[:3]))}); kvprobe reads models whose layers are alike."
            )
        _, n_kv_heads, _, d_head = shapes[0]
        if expected.n_heads % n_kv_heads:
            raise UserError(
                f"{name} keeps {n_kv_heads} KV heads, which its {expected.n_heads} heads cannot share evenly."
            )
        return replace(expected, n_kv_heads=n_kv_heads, d_head=d_head)


def embedded_tokens(plain: PreTrainedModel) -> int:
    """Number of token ids that a model has embeddings for."""
    weight = plain.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _windows(config: Any, n_layers: int) -> tuple[int | None, ...]:
    if hasattr(config, "attention_layers"):  # GPT-Neo
        kinds, sliding = [_GPT_NEO.get(kind, kind) for kind in config.attention_layers], config.window_size
    else:
        sliding = getattr(config, "sliding_window", None)
        everywhere = sliding and getattr(config, "use_sliding_window", True)
        kinds = (
            getattr(config, "layer_types", None) or ["sliding_attention" if everywhere else "full_attention"] * n_layers
        )
    if foreign := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        without = ", which keep a state in place of slots" if foreign & _WITH_STATE else ""
        raise UserError(
            f"{config.model_type} has layers of kind {', '.join(sorted(foreign))}{without}; "
            f"kvprobe reads full and sliding-window attention."
        )
    return tuple(sliding if kind == "sliding_attention" else None for kind in kinds)


_GPT_NEO = {"global": "full_attention", "local": "sliding_attention"}


def _max_position(config: Any) -> int | None:
    """Number of position embeddings; or the positions before frequencies change with the length, or before the model
    attends to a choice of slots (Doge)."""
    if (kept := getattr(config, "keep_window_size", None)) is not None:
        return kept
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not rotary:
        return getattr(config, "max_position_embeddings", None)
    return changing_frequencies(config)


def changing_frequencies(config: Any) -> int | None:
    """The position from which a model rotates keys by other frequencies (LongRoPE, dynamic NTK), if any.

    A key cached before that position does not fit a query after it, in transformers either.
    """
    config = config.get_text_config()
    rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One set of parameters, or one for each kind of layer.
    kinds: list[dict[str, Any]] = [kind for kind in (rotary, *rotary.values()) if isinstance(kind, dict)]
    limits: list[int] = []
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type"))
        original = kind.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if name in ("longrope", "dynamic"):
            limits.append(original if name == "longrope" and original else config.max_position_embeddings)
    return min(limits, default=None)
