"""Two lanes over one set of weights: plain (fused attention, fast) and hooked (TransformerLens, open).

Both lanes take explicit positions and, when the cache was edited, attention masks made from its ledger. The
masks go to each attention module itself, because transformers builds one mask for all layers, and places
sliding windows by slot index instead of position.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from kvprobe.fingerprint import Maker, fingerprint
from kvprobe.ledger import Ledger
from kvprobe.lens import Hooked
from kvprobe.positions import additive, visible
from kvprobe.rotary import Layout, Rotary, Turn

Lane = Literal["plain", "hooked"]

_PROBED_POSITION = 37
_OWN, _OVERHEARD = "kvprobe", "kvprobe_overheard"


@dataclass(frozen=True)
class Attending:
    """What one layer of the plain lane attends with.

    Attributes:
        query: as it meets the keys.
        key: likewise; of all slots of the cache that the model was given, those being read the last of them.
        value: likewise.
        scale: by what scores are multiplied.
        softcap: where scores saturate (Gemma 2); None where they do not.
        sinks: scores of the model's own attention sinks (gpt-oss), which take their share and are no slots; None without.
    """

    layer: int
    query: Float[Tensor, "rows heads queries d_head"]
    key: Float[Tensor, "rows kv_heads slots d_head"]
    value: Float[Tensor, "rows kv_heads slots d_value"]
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "heads"] | None = None


Attend = Callable[[Attending], Float[Tensor, "rows heads queries d_value"]]


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's cache.

    Attributes:
        windows: sliding window per layer in positions, None where attention is full.
        max_position: positions that the model has embeddings for; None with rotary positions, which have no end.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    windows: tuple[int | None, ...]
    max_position: int | None

    @classmethod
    def of(cls, config: Any) -> "Geometry":
        """Read a Hugging Face config.

        Raises:
            ValueError: the model has layers without a KV cache of this kind (recurrent, chunked, latent).
        """
        config = config.get_text_config()
        n_layers, n_heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
        if not n_layers or not n_heads or not getattr(config, "hidden_size", None):
            raise ValueError(f"{config.model_type} has no attention heads to cache; kvprobe reads attention models.")
        if getattr(config, "alibi", False) or getattr(config, "num_kv_shared_layers", 0):
            raise ValueError(
                f"{config.model_type} has ALiBi positions or layers that share a cache; kvprobe reads neither yet."
            )
        sliding = getattr(config, "sliding_window", None)
        kinds = (
            getattr(config, "layer_types", None)
            or ["sliding_attention" if sliding and getattr(config, "use_sliding_window", True) else "full_attention"]
            * n_layers
        )
        foreign = set(kinds) - {"full_attention", "sliding_attention"}
        if foreign or hasattr(config, "kv_lora_rank"):
            raise ValueError(
                f"{config.model_type} has layers of kind {', '.join(sorted(foreign)) or 'latent attention'}; "
                f"kvprobe reads full and sliding-window attention."
            )
        rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        return cls(
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
            d_head=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
            d_model=config.hidden_size,
            windows=tuple(sliding if kind == "sliding_attention" else None for kind in kinds),
            max_position=None if rotary else getattr(config, "max_position_embeddings", None),
        )


class Lanes:
    """A model that can be run plain or hooked.

    Attributes:
        plain: the Hugging Face model.
        tokenizer: its tokenizer, or None.
        geometry: the shape of its cache.
        maker: what caches that it makes know it by.
    """

    def __init__(self, plain: Any, tokenizer: Any = None) -> None:
        if plain.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"The model runs {plain.config._attn_implementation} attention, which takes no masks of our making; "
                f"load it with attn_implementation='sdpa'."
            )
        self.plain = plain
        self.tokenizer = tokenizer
        self.geometry = Geometry.of(plain.config)
        self.maker = Maker(self)
        self._hooked: tuple[tuple[int, ...], Hooked] | None = None
        self._fingerprint: tuple[tuple[int, ...], str] | None = None

    @property
    def hooked(self) -> Hooked:
        """The hooked lane, built when first needed.

        It is built anew when the weights were written since: TransformerLens copies those of fused QKV projections.
        """
        written = self._written()
        if self._hooked is None or self._hooked[0] != written:
            self._hooked = (written, Hooked(self.plain))
        return self._hooked[1]

    @property
    def fingerprint(self) -> str:
        """See `kvprobe.fingerprint.fingerprint`; taken anew when the weights were written since."""
        written = self._written()
        if self._fingerprint is None or self._fingerprint[0] != written:
            self._fingerprint = (written, fingerprint(self.plain, self.tokenizer))
        return self._fingerprint[1]

    def _written(self) -> tuple[int, ...]:
        """How often each weight was written."""
        return tuple(parameter._version for parameter in self.plain.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.plain.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.plain.parameters()).dtype

    def forward(
        self,
        ids: Int[Tensor, "batch queries"],
        ledger: Ledger,
        past: DynamicCache,
        lane: Lane = "plain",
        logits_to_keep: int | Int[Tensor, "kept"] = 0,
    ) -> Float[Tensor, "batch kept_queries vocab"]:
        """One forward pass over the last `queries` slots of `ledger`; `past` takes up their keys and values.

        Args:
            logits_to_keep: how many logits from the end (0 for all), or at which queries.
        """
        queries = ids.shape[1]
        positions = ledger.positions[:, ledger.slots - queries :]
        self.refuse_far_positions(positions)
        arguments: dict[str, Any] = {
            "position_ids": positions,
            "past_key_values": past,
            "use_cache": True,
            "logits_to_keep": logits_to_keep,
        }
        modules = self._attention_modules if lane == "plain" else self.hooked.attention_modules
        # In a cache that nobody edited, slot index and position agree, and the library's own (fused) path is right.
        masks = None if ledger.untouched else self._masks(ledger, queries)
        with _given(modules, masks):
            if masks is not None:
                arguments["attention_mask"] = masks[0]
            if lane == "hooked":
                return self.hooked(ids, **arguments)
            return self.plain(input_ids=ids, **arguments).logits

    @contextmanager
    def attending_by(self, attend: Attend) -> Iterator[None]:
        """While this lasts, `attend` is the attention of every layer of the plain lane; masks are its own business, and so is
        what lies in a cache.

        Raises:
            ValueError: the model does not take its attention from transformers' registry, or has sinks of its own.
        """

        def attention(given: Attending, usual: Callable[[], Tensor]) -> Tensor:
            if given.sinks is not None:
                raise ValueError(
                    f"{type(self.plain).__name__} has attention sinks of its own, which patching cannot follow."
                )
            return attend(given).transpose(1, 2).contiguous()

        with self._attention(_OWN, attention):
            yield

    @contextmanager
    def overhearing(self, hear: Callable[[Attending], None]) -> Iterator[None]:
        """While this lasts, `hear` is told what every layer of the plain lane attends with; what it computes stays the same.

        Raises:
            ValueError: the model does not take its attention from transformers' registry.
        """

        def attention(given: Attending, usual: Callable[[], Tensor]) -> Tensor:
            hear(given)
            return usual()

        # Under another name the model would make no masks.
        AttentionMaskInterface.register(_OVERHEARD, AttentionMaskInterface()[self.plain.config._attn_implementation])
        with self._attention(_OVERHEARD, attention):
            yield

    @contextmanager
    def _attention(self, name: str, attention: Callable[[Attending, Callable[[], Tensor]], Tensor]) -> Iterator[None]:
        """While this lasts, this is the attention of the plain lane, by this name; it is handed the usual one, to be called."""
        layers = {id(module): layer for layer, module in enumerate(self._attention_modules)}
        before = self.plain.config._attn_implementation

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Any,
            scaling: Any = None,
            **settings: Any,
        ) -> tuple[Tensor, None]:
            scale = self.geometry.d_head**-0.5 if scaling is None else float(scaling)
            softcap, sinks = settings.get("softcap"), settings.get("s_aux")
            given = Attending(layers[id(module)], query, key, value, scale, softcap, sinks)

            def usual() -> Tensor:
                eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
                function = AttentionInterface().get_interface(before, eager)
                return function(module, query, key, value, mask, scaling=scaling, **settings)[0]

            return attention(given, usual), None

        AttentionInterface.register(name, attend)
        self.plain.set_attn_implementation(name)
        try:
            if self.plain.config._attn_implementation != name:
                raise ValueError(
                    f"{type(self.plain).__name__} does not take its attention from transformers' registry, so it can be neither "
                    f"replaced nor overheard; patch with KVCache.patch, one cell at a time, and see patterns on lane='hooked'."
                )
            yield
        finally:
            self.plain.set_attn_implementation(before)

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, each of which holds one attention module."""
        stacks = [
            list(stack)
            for stack in self.plain.modules()
            if isinstance(stack, nn.ModuleList) and len(stack) == self.geometry.n_layers
        ]
        for stack in stacks:
            if all(
                any(part is own for part in block.modules())
                for block, own in zip(stack, self._attention_modules, strict=True)
            ):
                return stack
        raise ValueError(f"Cannot find the decoder layers of {type(self.plain).__name__}.")

    @cached_property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """How each layer's keys turn with position; None where they do not (layers without position encoding).

        Found among the model's own frequencies and proved on the model: a single token attends only to itself, so
        its keys at two positions differ by that rotation and nothing else, at every layer.

        Raises:
            ValueError: keys do not turn, because positions are learned, or frequencies change with the length.
        """
        at = torch.tensor([[0], [_PROBED_POSITION]], device=self.device)
        if self.geometry.max_position is not None:
            raise ValueError(
                f"{type(self.plain).__name__} has learned positions, which sit in K and V of every layer and cannot be "
                f"re-indexed; use law='gapped', or recompute the slots."
            )
        layers = [DynamicLayer() for _ in range(self.geometry.n_layers)]
        past = past_key_values(layers)
        with torch.no_grad():
            self.plain(input_ids=torch.zeros_like(at), position_ids=at, past_key_values=past, use_cache=True)
        candidates = self._rotary_candidates()
        found = []
        for layer, stored in enumerate(layers):
            assert stored.keys is not None
            start, moved = stored.keys[:1], stored.keys[1:]
            errors = {None: _relative(start, moved)} | {
                number: _relative(Turn.between(rotary, at[:1], at[1:]).of(start), moved)
                for number, rotary in enumerate(candidates)
            }
            best = min(errors, key=errors.__getitem__)
            if errors[best] > max(1e-4, 8 * torch.finfo(self.dtype).eps):
                raise ValueError(
                    f"The keys of layer {layer} of {type(self.plain).__name__} do not turn with position by any of the "
                    f"model's frequencies (they are off by {errors[best]:.0e}), so they cannot be re-indexed; "
                    f"use law='gapped', or recompute the slots."
                )
            found.append(None if best is None else candidates[best])
        return tuple(found)

    @property
    def score_scales(self) -> tuple[float, ...]:
        """By what each layer multiplies its attention scores."""
        usual = self.geometry.d_head**-0.5
        return tuple(float(getattr(module, "scaling", usual)) for module in self._attention_modules)

    def output_weights(self, layer: int) -> Float[Tensor, "heads d_value d_model"]:
        """What each head of a layer writes into the residual stream for what it reads: W_O.

        Raises:
            ValueError: the attention module has no output projection of a known name.
        """
        module, names = self._attention_modules[layer], ("o_proj", "c_proj", "dense", "out_proj")
        for name in names:
            projection = getattr(module, name, None)
            if projection is not None:
                # GPT-2's Conv1D holds its weight the other way round.
                weight = projection.weight if isinstance(projection, Conv1D) else projection.weight.T
                return weight.detach().unflatten(0, (self.geometry.n_heads, -1))
        raise ValueError(
            f"{type(module).__name__} has no output projection called {', '.join(names)}; W_O is not known."
        )

    def _rotary_candidates(self) -> list[Rotary]:
        found = []
        for module in self.plain.modules():
            kinds = getattr(module, "rope_type", None)
            if kinds is None:
                continue
            if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
                raise ValueError(
                    f"{type(self.plain).__name__} changes its rotary frequencies with the length ({kinds}), so a key "
                    f"cannot be turned to another position; use law='gapped', or recompute the slots."
                )
            layouts: tuple[Layout, ...] = ("half", "interleaved")
            for name, frequencies in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and "original" not in name:
                    found += [Rotary(frequencies.float(), layout) for layout in layouts]
        return found

    @cached_property
    def _attention_modules(self) -> list[nn.Module]:
        found = {
            module.layer_idx: module
            for module in self.plain.modules()
            if type(module).__name__.endswith("Attention") and isinstance(getattr(module, "layer_idx", None), int)
        }
        if sorted(found) != list(range(self.geometry.n_layers)):
            raise ValueError(
                f"Cannot find one attention module per layer in {type(self.plain).__name__}; "
                f"masks could not be given to it."
            )
        return [found[layer] for layer in range(self.geometry.n_layers)]

    def _masks(self, ledger: Ledger, queries: int) -> list[Tensor]:
        """One additive mask per layer, shared between layers that see the same."""
        groups = self.geometry.n_heads // self.geometry.n_kv_heads
        made: dict[tuple[int, int | None], Tensor] = {}
        masks = []
        seen_by_window = {window: visible(ledger, queries, window) for window in dict.fromkeys(self.geometry.windows)}
        for layer, window in enumerate(self.geometry.windows):
            seen = seen_by_window[window]
            key = (layer if seen.shape[0] > 1 else 0, window)
            if key not in made:
                made[key] = additive(seen[key[0]], groups, self.dtype)
            masks.append(made[key])
        return masks

    def refuse_far_positions(self, positions: Int[Tensor, "batch queries"]) -> None:
        """Refuse positions beyond those that the model has embeddings for."""
        limit = self.geometry.max_position
        if limit is not None and int(positions.max()) >= limit:
            raise ValueError(
                f"Position {int(positions.max())} is beyond the {limit} that this model has embeddings for; "
                f"use a shorter conversation."
            )


def past_key_values(layers: Sequence[DynamicLayer]) -> DynamicCache:
    """A Hugging Face cache made of these layers."""
    past = DynamicCache()
    past.layers = list(layers)  # pyright: ignore[reportAttributeAccessIssue] - it is a plain list
    return past


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().abs().max() / expected.float().abs().max())


@contextmanager
def _given(modules: Sequence[nn.Module], masks: Sequence[Tensor] | None) -> Iterator[None]:
    """While this lasts, each attention module gets its own mask, whatever the model hands down."""
    if masks is None or all(mask is masks[0] for mask in masks):
        yield
        return

    def giver(mask: Tensor) -> Any:
        def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if "attention_mask" not in kwargs:
                raise RuntimeError(f"{type(module).__name__} takes no attention mask by name; it cannot be given one.")
            return args, {**kwargs, "attention_mask": mask}

        return give

    handles = [
        module.register_forward_pre_hook(giver(mask), with_kwargs=True)
        for module, mask in zip(modules, masks, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
