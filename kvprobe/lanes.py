"""Two lanes over one set of weights: plain (fused attention, fast) and hooked (TransformerLens, open).

Both lanes take explicit positions and, when the cache was edited, attention masks made from its ledger. The
masks go to each attention module itself, because transformers builds one mask for all layers, and places
sliding windows by slot index instead of position.
"""

import sys
import warnings
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
from kvprobe.gate import prove_attention, prove_hooked, prove_plain
from kvprobe.geometry import Geometry, changing_frequencies
from kvprobe.ledger import Ledger
from kvprobe.lens import Hooked
from kvprobe.positions import additive, visible
from kvprobe.rotary import Layout, Rotary, Turn

Lane = Literal["plain", "hooked"]

_PROBED_POSITION, _PROBED_TOKENS = 37, 4
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
        self.geometry = Geometry.measured(plain)
        _ = self._attention_modules  # refuses a model of another build now, not at first use
        if (limit := changing_frequencies(plain.config)) is not None:
            warnings.warn(
                f"{type(plain).__name__} turns keys by other rotary frequencies from position {limit} on, so that keys cached before "
                f"do not fit queries after; kvprobe reads its first {limit} positions and refuses later ones.",
                stacklevel=3,
            )
        self.maker = Maker(self)
        self._hooked: tuple[tuple[int, ...], Hooked] | None = None
        self._fingerprint: tuple[tuple[int, ...], str] | None = None

    @property
    def hooked(self) -> Hooked:
        """The hooked lane, built and proved equal to the plain one when first needed.

        It is built anew when the weights were written since: TransformerLens copies those of fused QKV projections.

        Raises:
            ValueError: TransformerLens does not know the model, or computes something else than it.
        """
        written = self._written()
        if self._hooked is None or self._hooked[0] != written:
            self._hooked = (written, Hooked(self.plain))
            try:
                prove_hooked(self)
            except ValueError:
                self._hooked = None
                raise
        return self._hooked[1]

    @cached_property
    def masks_by_head(self) -> bool:
        """Whether KV heads can be masked apart from one another: what the gate finds on a few tokens, before anything else is
        read; see `kvprobe.gate`.

        Raises:
            ValueError: the model cannot be read as kvprobe reads.
        """
        return prove_plain(self)

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

        Raises:
            ValueError: a position that the model has no embedding for, or a model that did not pass the gate.
        """
        if not self.masks_by_head and ledger.live.shape[2] > 1:
            raise ValueError(
                f"The heads of {type(self.plain).__name__} cannot be masked apart from one another, and in this cache they keep "
                f"different slots; use a policy that keeps the same slots in all heads."
            )
        return self.unproved(ids, ledger, past, lane, logits_to_keep)

    def native(self, ids: Int[Tensor, "batch queries"]) -> Float[Tensor, "batch queries vocab"]:
        """Logits as the model's own library computes them, without a cache, positions or masks of ours."""
        return self.plain(input_ids=ids, use_cache=False).logits

    def unproved(
        self,
        ids: Int[Tensor, "batch queries"],
        ledger: Ledger,
        past: DynamicCache,
        lane: Lane = "plain",
        logits_to_keep: int | Int[Tensor, "kept"] = 0,
        masked: bool = False,
    ) -> Float[Tensor, "batch kept_queries vocab"]:
        """`forward` without the gate, which is for the gate itself.

        Args:
            masked: give masks of our making even where the cache was not edited.
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
        masks = None if ledger.untouched and not masked else self.masks(ledger, queries)
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

        self.prove()
        _ = self.attention_proved
        with self._attention(_OWN, attention):
            yield

    @contextmanager
    def overhearing(self, hear: Callable[[Attending], None]) -> Iterator[None]:
        """While this lasts, `hear` is told what every layer of the plain lane attends with; what it computes stays the same.

        Raises:
            ValueError: the model does not take its attention from transformers' registry.
        """

        self.prove()
        _ = self.attention_proved
        with self.overhearing_unproved(lambda given, computed: hear(given)):
            yield

    @contextmanager
    def overhearing_unproved(self, hear: Callable[[Attending, Tensor], None]) -> Iterator[None]:
        """`overhearing` without the gate, which is for the gate itself: `hear` also gets what the layer's attention gives out,
        `[rows, queries, heads, d_value]`."""

        def attention(given: Attending, usual: Callable[[], Tensor]) -> Tensor:
            computed = usual()
            hear(given, computed)
            return computed

        # Under another name the model would make no masks.
        AttentionMaskInterface.register(_OVERHEARD, AttentionMaskInterface()[self.plain.config._attn_implementation])
        with self._attention(_OVERHEARD, attention):
            yield

    def prove(self) -> None:
        """Pass the gate now, as what hooks the model's modules must: the gate's own reading would be hooked otherwise.

        Raises:
            ValueError: see `masks_by_head`.
        """
        _ = self.masks_by_head

    @cached_property
    def attention_proved(self) -> bool:
        """True once softmax over scaled scores, with softcap and sinks where there are some, was found to be all that the
        model's attention is; see `kvprobe.gate`.

        Raises:
            ValueError: it is something else (scores have a bias of their own, say), or cannot be replaced.
        """
        prove_attention(self)
        return True

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
            attention_mask: Any,
            scaling: Any = None,
            **settings: Any,
        ) -> tuple[Tensor, None]:
            scale = self.geometry.d_head**-0.5 if scaling is None else float(scaling)
            softcap, sinks = settings.get("softcap"), settings.get("s_aux")
            given = Attending(layers[id(module)], query, key, value, scale, softcap, sinks)

            def usual() -> Tensor:
                eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
                function = AttentionInterface().get_interface(before, eager)
                return function(module, query, key, value, attention_mask, scaling=scaling, **settings)[0]

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
            ValueError: keys do not turn, because positions are added to the embeddings, or frequencies change with the length.
        """
        far = min(_PROBED_POSITION, (self.geometry.max_position or _PROBED_POSITION + 1) - 1)
        # Several tokens, each a row of its own: the embedding of one (padding) may be zero, and its keys then tell nothing.
        tokens = torch.arange(1, 2 * _PROBED_TOKENS, 2, device=self.device)[:, None]
        ids = tokens * self.plain.get_input_embeddings().num_embeddings // (2 * _PROBED_TOKENS)
        at = torch.tensor([[0], [far]], device=self.device).repeat_interleave(len(ids), 0)
        layers = [DynamicLayer() for _ in range(self.geometry.n_layers)]
        past = past_key_values(layers)
        with torch.no_grad():
            self.plain(input_ids=ids.repeat(2, 1), position_ids=at, past_key_values=past, use_cache=True)
        candidates = self._rotary_candidates()
        found = []
        for layer, stored in enumerate(layers):
            assert stored.keys is not None
            start, moved = stored.keys.split(len(ids))
            errors = {None: _relative(start, moved)} | {
                number: _relative(Turn.between(rotary, at[: len(ids)], at[len(ids) :]).of(start), moved)
                for number, rotary in enumerate(candidates)
            }
            best = min(errors, key=errors.__getitem__)
            # Not `>`: a NaN must not pass.
            if not errors[best] <= max(1e-4, 8 * torch.finfo(self.dtype).eps):
                raise ValueError(
                    f"The keys of layer {layer} of {type(self.plain).__name__} do not turn with position by any of the "
                    f"model's frequencies (they are off by {errors[best]:.0e}), so they cannot be re-indexed; "
                    f"use law='gapped', or recompute the slots."
                    if candidates
                    else f"{type(self.plain).__name__} has learned positions (or sinusoidal ones, added as those are), which sit in K and V "
                    f"of every layer and cannot be re-indexed; use law='gapped', or recompute the slots."
                )
            found.append(None if best is None else candidates[best])
        return tuple(found)

    @cached_property
    def turns(self) -> bool:
        """Whether keys can be turned to other positions, so that gaps can be closed."""
        try:
            return bool(self.rotaries)
        except ValueError:
            return False

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
        layouts: tuple[Layout, ...] = ("half", "interleaved")
        found = []
        for module in self.plain.modules():
            table = getattr(module, "embed_positions", None)
            if isinstance(table, Tensor) and table.dim() == 2:  # GPT-J: sines, then cosines, of each position
                sines, cosines = table[1].float().chunk(2)
                found += [Rotary(torch.atan2(sines, cosines), layout) for layout in layouts]
            kinds = getattr(module, "rope_type", None)
            if kinds is None:
                continue
            if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
                raise ValueError(
                    f"{type(self.plain).__name__} changes its rotary frequencies with the length ({kinds}), so a key "
                    f"cannot be turned to another position; use law='gapped', or recompute the slots."
                )
            for name, frequencies in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and "original" not in name:
                    found += [Rotary(frequencies.float(), layout) for layout in layouts]
        return found

    @cached_property
    def _attention_modules(self) -> list[nn.Module]:
        found = {
            index: module
            for module in self.plain.modules()
            if type(module).__name__.endswith("Attention")
            and isinstance(index := getattr(module, "layer_idx", getattr(module, "layer_id", None)), int)
        }
        if sorted(found) != list(range(self.geometry.n_layers)):
            raise ValueError(
                f"Cannot find one attention module per layer in {type(self.plain).__name__}; "
                f"masks could not be given to it."
            )
        return [found[layer] for layer in range(self.geometry.n_layers)]

    def masks(self, ledger: Ledger, queries: int) -> list[Tensor]:
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
        """Refuse positions beyond those that the model can read."""
        limit = self.geometry.max_position
        if limit is not None and int(positions.max()) >= limit:
            raise ValueError(
                f"Position {int(positions.max())} is beyond the {limit} that this model has "
                f"{'one set of frequencies' if changing_frequencies(self.plain.config) else 'embeddings'} for; "
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
    if masks is None:
        yield
        return

    def giver(mask: Tensor) -> Any:
        def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if "attention_mask" not in kwargs:
                raise RuntimeError(f"{type(module).__name__} takes no attention mask by name; it cannot be given one.")
            return args, {**kwargs, "attention_mask": mask}

        return give

    # Where all layers see the same, the model hands it down itself.
    alike = all(mask is masks[0] for mask in masks)
    handles = [
        module.register_forward_pre_hook(giver(mask), with_kwargs=True)
        for module, mask in zip(modules, masks, strict=True)
        if not alike
    ]
    parts: list[Any] = [part for module in modules for part in module.modules()]
    tables: dict[Any, Tensor] = {part: part.bias for part in parts if _is_table(getattr(part, "bias", None))}
    for part, table in tables.items():
        part.bias = torch.ones_like(table[..., :1, :1]).expand_as(table)
    try:
        yield
    finally:
        for part, table in tables.items():
            part.bias = table
        for handle in handles:
            handle.remove()


def _is_table(bias: Any) -> bool:
    """Whether an attention module's `bias` is a table of who may see whom by slot (GPT-Neo's windows): our masks are whole,
    and go by position."""
    return isinstance(bias, Tensor) and bias.dtype == torch.bool and bias.dim() == 4
