"""The shape of a model's cache: read from its config, then measured on one token, since configs may be wrong."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvprobe.cache.layer import Layer, shape_of
from kvprobe.cache.parts import (
    CONVOLVED,
    INDEX,
    KV,
    LATENT,
    WRITES,
    PartSize,
    Shape,
    attends,
    described,
    recurrent,
    refuse_other_parts,
)
from kvprobe.cache.visibility import Chunk, Reach
from kvprobe.errors import UserError
from kvprobe.models.hf_cache import CACHE, BothLayer, CacheLayer, empty_layers, held_by, past_key_values
from kvprobe.models.recurrent import StateLayer, recurrent_modules, writes_noted
from kvprobe.names import one_line
from kvprobe.weights import device_of

_KINDS: dict[str, tuple[str, ...]] = {
    "linear_attention": CONVOLVED, "conv": CONVOLVED, "hybrid": (*KV, *CONVOLVED), "mlp": (), "moe": (),
}  # fmt: skip
"""What layers of these kinds store, before more is known; others have K and V."""
_WITH_STATE = {kind for kind, parts in _KINDS.items() if recurrent(parts)}
_WITHOUT_SLOTS = {kind for kind, parts in _KINDS.items() if not attends(parts)}


_INDEX_OF_GROUPS = ("index_kpool", "indexer_compress_ratio")
"""Settings of an index whose entries are groups of slots (GLM-5.3, Qwen 4)."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's cache.

    Attributes:
        layers: what each layer stores of a slot.
        reaches: how far each layer sees.
        sources: for each attention module, the layer whose K and V it reads: another's, where layers share them.
        attending: the layer that each attention module is in.
        max_position: the first position that the model cannot read; None if there is no limit.
    """

    layers: Shape
    n_heads: int
    d_model: int
    reaches: tuple[Reach, ...]
    sources: tuple[int, ...]
    attending: tuple[int, ...]
    max_position: int | None

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of each layer; raises as `d_head` does."""
        return self._alike.heads

    @property
    def d_head(self) -> int:
        """Numbers to a key.

        Raises:
            UserError: layers differ in it, or store no keys of their own (latent attention).
        """
        part = self._alike
        if part.name != "K":
            raise UserError(
                f"Layers of this model store {described(self.layers)}, and this needs K and V of each head."
            )
        return part.numbers

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The names of what each layer stores."""
        return tuple(tuple(part.name for part in layer) for layer in self.layers)

    @property
    def reads(self) -> dict[int, int]:
        """The layers that attend, each with the layer whose K and V it reads."""
        return dict(zip(self.attending, self.sources, strict=True))

    @property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Each layer whose K and V are read, with the layers that attend to them."""
        return {source: tuple(at for at, read in self.reads.items() if read == source) for source in self.sources}

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The layers that keep a state, of which they store what each token wrote."""
        return tuple(number for number, names in enumerate(self.parts) if recurrent(names))

    @property
    def _alike(self) -> PartSize:
        """The first part of each layer."""
        sizes = {layer[0] for layer in self.layers if layer}
        if len(sizes) > 1:
            raise UserError(
                f"Layers of this model differ in what they store ({described(self.layers)}); this needs layers that "
                "are alike."
            )
        return sizes.pop()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in positions; None where it has none."""
        return tuple(reach if isinstance(reach, int) else None for reach in self.reaches)

    @property
    def edges(self) -> set[int]:
        """Windows and chunks of all layers, in positions."""
        return {reach.positions if isinstance(reach, Chunk) else reach for reach in self.reaches if reach is not None}

    @property
    def own_keys(self) -> bool:
        """Whether each attention module has stored K and V, and they are its own."""
        return len({*self.sources}) == len(self.sources) and all(
            self.layers[source][0].name == "K" for source in self.sources
        )

    @property
    def indexed(self) -> bool:
        """Whether an index chooses the slots that are attended to."""
        return any(part.name == INDEX for layer in self.layers for part in layer)

    @property
    def numbers(self) -> int:
        """Numbers that all layers together store of a slot."""
        return sum(part.heads * part.numbers for layer in self.layers for part in layer)

    @property
    def shortest_window(self) -> int | None:
        """The shortest sliding window of any layer; None where all layers attend to everything."""
        return min((window for window in self.windows if window is not None), default=None)

    @classmethod
    def of(cls, plain: PreTrainedModel) -> "Geometry":
        """The geometry of a loaded model: of its config, with what it stores as in the cache of one token.

        Raises:
            UserError: the model has layers that keep something else than slots (a state, groups), reads an encoder
                beside its cache, or cannot read a token.
        """
        try:
            config = _readable(plain.config)
            layers = _stored(plain, config)
            sources = sources_of(config, len(layers))
            kinds, reaches = kinds_of(config, len(sources)), reaches_of(config, len(sources))
            if len(reaches) != len(sources):
                raise UserError(
                    f"{plain.config.model_type} has {len(reaches)} layers and caches {len(layers)}; use another model."
                )
            attending = tuple(layer for layer, kind in enumerate(kinds) if kind not in _WITHOUT_SLOTS)
            return cls(
                layers,
                config.num_attention_heads,
                config.hidden_size,
                tuple(reaches[: len(layers)]),
                tuple(sources[layer] for layer in attending),
                attending,
                _max_position(config),
            )
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # transformers raises its own error for values that differ between layers
            raise UserError(
                f"{plain.config.model_type} has settings that kvprobe cannot read ({type(error).__name__}: "
                f"{one_line(error).partition('. ')[0]}); use another model."
            ) from error


def felt(readers: Mapping[int, tuple[int, ...]]) -> list[str]:
    """Which layers are felt in others too, which read their K and V (see `Geometry.readers`), each in words."""
    shared = {layer: at for layer, at in readers.items() if len(at) > 1}
    return [f"layer {layer} is felt in {' and '.join(map(str, at))}" for layer, at in shared.items()]


def _readable(config: Any) -> Any:
    """The config of the language model, if its layers are of kinds that kvprobe reads."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{config.model_type} is an encoder-decoder, whose decoder reads an encoder beside its cache; "
            f"kvprobe reads decoder-only models."
        )
    config = config.get_text_config()
    if not all(getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")):
        raise UserError(f"{config.model_type} has no attention heads to cache; kvprobe reads attention models.")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UserError(
            f"{config.model_type} counts positions by slots (ALiBi) and ignores position_ids; kvprobe cannot "
            "place its tokens."
        )
    by_groups = any(name in config.__dict__ for name in _INDEX_OF_GROUPS)
    by_slots = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    if by_groups or (not by_slots and any(name.startswith("index_topk") for name in config.__dict__)):
        raise UserError(
            f"{config.model_type} chooses by an index which groups of slots to attend to, so that the unit is a group; "
            "kvprobe masks and evicts single slots, and reads an index only where it chooses among these."
        )
    reaches_of(config, config.num_hidden_layers)  # refuses other kinds of layers
    return config


def _stored(plain: PreTrainedModel, config: Any) -> Shape:
    """What each layer stores of one token.

    Raises:
        UserError: the model cannot read a token into a cache that holds known parts of each layer.
    """
    name, kinds = type(plain).__name__, kinds_of(config, config.num_hidden_layers)
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    held = [_parts(layer) for layer in _one_token(plain, kinds)[:own]]
    idle = [kind in _WITHOUT_SLOTS - _WITH_STATE for kind in kinds[: len(held)]]
    empty = len([layer for layer, none in zip(held, idle, strict=True) if not (layer or none)]) + own - len(held)
    shapes = [tuple(tensor.shape) for parts in held for tensor in parts.values()]
    if empty or any(len(shape) != 4 or shape[2] != 1 for shape in shapes):
        raise UserError(
            f"{name} does not keep one key and one value per layer and token ({own - empty} layers of "
            f"{own} have some: {', '.join(map(str, sorted(set(shapes))[:3]))}); kvprobe reads "
            "such models only."
        )
    return tuple(_named(shape_of(layer), config, name) for layer in held)


def _one_token(plain: PreTrainedModel, kinds: list[str]) -> list[Any]:
    """The layers of transformers' cache after one token."""
    past = DynamicCache()
    past.layer_class_to_replicate = CacheLayer
    if not _KINDS.keys().isdisjoint(kinds):
        past = past_key_values(empty_layers([_KINDS.get(kind, KV) for kind in kinds]))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(plain))
    modules = recurrent_modules(plain, sum(kind in _WITH_STATE for kind in kinds))
    try:
        with torch.no_grad(), writes_noted(modules):
            plain(input_ids=ids, position_ids=ids, use_cache=True, **{CACHE: past})
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that kvprobe cannot read may fail in any way
        raise UserError(f"{type(plain).__name__} cannot read one token into a KV cache ({one_line(error)}).") from error
    return [*past.layers]


def _parts(layer: Any) -> Layer:
    """What a layer of transformers' cache holds of one token."""
    if isinstance(layer, BothLayer):
        return {**_parts(layer.of_slots), **_parts(layer.of_state)}
    if isinstance(layer, StateLayer):
        return layer.written
    return dict(zip((*KV, INDEX), held_by(layer), strict=False))


def _named(layer: tuple[PartSize, ...], config: Any, name: str) -> tuple[PartSize, ...]:
    """The parts of a layer by their names, which for a latent its config tells.

    Raises:
        UserError: they are not what the config says, or heads cannot share them.
    """
    slots = [part for part in layer if part.name not in WRITES]
    latent = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    if slots and latent[0] is not None and {part.heads for part in slots} == {1}:
        if tuple(part.numbers for part in slots[:2]) != latent:
            raise UserError(
                f"{name} caches {slots[0].numbers} and {slots[1].numbers} numbers of a token, which are not the "
                f"latent and the rotated key of its config ({latent[0]} and {latent[1]}); use another model."
            )
        layer = tuple(part._replace(name=called) for part, called in zip(layer, (*LATENT, INDEX), strict=False))
    elif slots and config.num_attention_heads % slots[0].heads:
        raise UserError(
            f"{name} keeps {slots[0].heads} KV heads, which its {config.num_attention_heads} heads cannot share evenly."
        )
    refuse_other_parts(part.name for part in layer)
    return layer


def embedded_tokens(plain: PreTrainedModel) -> int:
    """Number of token ids that a model has embeddings for."""
    weight = plain.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def reaches_of(config: Any, n_layers: int) -> tuple[Reach, ...]:
    """How far each layer sees.

    Raises:
        UserError: a layer is of another kind.
    """
    sliding = config.window_size if hasattr(config, "attention_layers") else getattr(config, "sliding_window", None)
    kinds, chunk = kinds_of(config, n_layers), getattr(config, "attention_chunk_size", None)
    reaches: dict[str, Reach] = dict.fromkeys((*_WITH_STATE, *_WITHOUT_SLOTS, "full_attention"))
    reaches["indexed_attention"] = None  # among the slots in view the index chooses, which a mask reaches too
    reaches["sliding_attention"] = sliding
    reaches["chunked_attention"] = Chunk(chunk) if chunk else None
    if foreign := set(map(str, kinds)) - {*reaches}:
        raise UserError(
            f"{config.model_type} has layers of kind {', '.join(sorted(foreign))}; kvprobe reads full, sliding-window "
            "and chunked attention, and states of known rules."
        )
    return tuple(reaches[kind] for kind in kinds)


def kinds_of(config: Any, n_layers: int) -> list[str]:
    """The kind of each layer, as configs call it."""
    if hasattr(config, "attention_layers"):  # GPT-Neo
        return [_GPT_NEO[kind] for kind in config.attention_layers]
    everywhere = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    alike = ["sliding_attention" if everywhere else "full_attention"] * n_layers
    return [*map(str, getattr(config, "layer_types", None) or alike)]


def sources_of(config: Any, stored: int) -> tuple[int, ...]:
    """For each attention module, the layer whose K and V it reads.

    The last layers of Gemma 3n and 4 have none of their own and read those of the last layer of their kind that has.
    """
    if not getattr(config, "num_kv_shared_layers", 0):
        return tuple(range(stored))
    kinds = config.layer_types
    last = {kind: layer for layer, kind in enumerate(kinds[:stored])}
    return (*range(stored), *(last[kind] for kind in kinds[stored:]))


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
