"""Two lanes over one set of weights before the gate has proved them: for the gate alone."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.rotary import Rotary
from kvprobe.errors import UserError, warn
from kvprobe.fingerprint import Maker, config_digest, fingerprint, state_of
from kvprobe.models.attending import KERNELS, Attending, Attention, attention_name, attention_replaced
from kvprobe.models.geometry import Geometry, changing_frequencies
from kvprobe.models.hf_cache import CACHE
from kvprobe.models.hooks import Hook, claimed, hooked
from kvprobe.models.lens import Hooked
from kvprobe.models.masks import masks_given, masks_of
from kvprobe.models.products import by_onednn, onednn_is_faster, worth
from kvprobe.models.recurrent import recurrent_modules, writes_noted
from kvprobe.models.rotaries import rotaries_of
from kvprobe.models.rounding import few_tokens, rounding_of
from kvprobe.weights import device_of, weight_of

Lane = Literal["plain", "hooked"]

_ROUNDINGS, _SINGLE_ROUNDINGS = 3, 16
"""How many times its own rounding a model is allowed in half precision, and a long reading in float32, where it is
small; right ones take up to 1.2, and 11."""
_DRAWS = 4

_looked_at: ContextVar[tuple[object, tuple[object, ...]]] = ContextVar("looked_at", default=(None, ()))


class UnprovedLanes:
    """A model that can be run plain or hooked.

    Attributes:
        plain: the Hugging Face model.
        tokenizer: its tokenizer, or None.
        geometry: the shape of its cache.
        chunk: tokens of each row that are read at once where nothing else is asked for; all by default.
    """

    def __init__(self, plain: PreTrainedModel, tokenizer: Any = None, chunk: int | None = None) -> None:
        if attention_name(plain) not in KERNELS:
            raise UserError(
                f"The model runs {attention_name(plain)} attention, which takes no masks from kvprobe; "
                f"load it with attn_implementation='sdpa'."
            )
        self.plain = plain
        self.tokenizer = tokenizer
        self.chunk = chunk
        self.geometry = Geometry.of(plain)
        _ = self.attention_modules  # refuses a model without them now, not at first use
        if (limit := changing_frequencies(plain.config)) is not None:
            warn(
                f"{type(plain).__name__} rotates keys by other rotary frequencies from position {limit} on, so keys "
                f"cached before do not fit queries after; kvprobe reads its first {limit} positions and refuses later "
                "ones."
            )
        self._unseen = 0
        self._maker = Maker(self)
        self._hooked: tuple[tuple[object, ...], Hooked] | None = None
        self._fingerprints: dict[torch.dtype | None, tuple[tuple[object, ...], str]] = {}

    @property
    def hooked(self) -> Hooked:
        """The hooked lane, built when first needed, and again after weights were written.

        TransformerLens copies the weights of fused QKV projections, which would be out of date.

        Raises:
            UserError: TransformerLens does not support the model.
        """
        if self.geometry.recurrent:
            raise UserError(
                f"TransformerLens has no hooks in the recurrent layers of {type(self.plain).__name__} that kvprobe has "
                "proved; use lane='plain'."
            )
        written = self.written
        if self._hooked is None or self._hooked[0] != written:
            self._hooked = (written, Hooked(self.plain))
        return self._hooked[1]

    @property
    def maker(self) -> Maker:
        """What its caches know it by; another one after weights were written."""
        if self._maker.written != self.written:
            self._maker = Maker(self)
        return self._maker

    @property
    def fingerprint(self) -> str:
        """See `kvprobe.fingerprint.fingerprint`; computed again after weights were written."""
        return self._fingerprint(None)

    @property
    def config_digest(self) -> str:
        """The part of the fingerprint that is of the config; no weight is hashed."""
        return config_digest(self.plain)

    @property
    def rounded_fingerprint(self) -> str:
        """The same with weights rounded to bfloat16: equal for a model loaded in float32 and in bfloat16."""
        return self._fingerprint(torch.bfloat16)

    def hash_again(self) -> str:
        """The fingerprint of all weights as they are, where some were written in a way that `written` does not show.

        If that happened, what is known of the model is forgotten.
        """
        now = fingerprint(self.plain, self.tokenizer)
        if now != self.fingerprint:
            self._unseen += 1
        return now

    def _fingerprint(self, rounded: torch.dtype | None) -> str:
        written = self.written
        if rounded not in self._fingerprints or self._fingerprints[rounded][0] != written:
            self._fingerprints[rounded] = (written, fingerprint(self.plain, self.tokenizer, rounded))
        return self._fingerprints[rounded][1]

    @property
    def written(self) -> tuple[object, ...]:
        """What tells that the model was changed; see `kvprobe.fingerprint.state_of`."""
        lanes, state = _looked_at.get()
        return state if lanes is self else (self._unseen, *state_of(self.plain))

    @contextmanager
    def looked_at(self) -> Generator[None]:
        """While this lasts, the model is taken to stay as it is now, so that it is looked at once."""
        before = _looked_at.set((self, self.written))
        try:
            yield
        finally:
            _looked_at.reset(before)

    @property
    def name(self) -> str:
        """The last part of the name or path that the model was loaded from, or else its class."""
        return Path(self.plain.config.name_or_path or type(self.plain).__name__).name

    @property
    def device(self) -> torch.device:
        return device_of(self.plain)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.plain.parameters()).dtype

    def tolerance(self, effect: float = torch.inf, hooked: bool = False) -> float:
        """The largest `difference` that counts as rounding: well below what a mistake would change.

        Args:
            effect: of what the mistake would be about; a model that it hardly changes is held to less.
        """
        if self.dtype not in (torch.float32, torch.float64):
            return _ROUNDINGS * self._rounding
        return max(2e-6, min(2e-4 if hooked else 1e-4, 0.05 * effect))

    @cached_property
    def _rounding(self) -> float:
        return rounding_of(self.plain, lambda: self.native(few_tokens(self.plain)))

    def only_rounds(self, apart: float, effect: float, read: Callable[[], Tensor]) -> bool:
        """Whether a difference is within `tolerance`, or within a few times what rounding does to this very reading."""
        allowed = _ROUNDINGS if self.dtype.itemsize < 4 else _SINGLE_ROUNDINGS
        # Several times, since an expert that rounding exchanges moves the logits far, or not at all.
        return apart <= self.tolerance(effect) or any(
            apart <= allowed * rounding_of(self.plain, read, seed) for seed in range(_DRAWS)
        )

    def native(
        self, ids: Int[Tensor, "batch queries"], logits_to_keep: int | Int[Tensor, "kept"] = 0
    ) -> Float[Tensor, "batch kept_queries vocab"]:
        """Logits as the model's own library computes them, without kvprobe's cache, positions or masks."""
        with self._claimed():
            return self.plain(input_ids=ids, use_cache=False, logits_to_keep=logits_to_keep).logits

    def unproved(
        self,
        ids: Int[Tensor, "batch queries"],
        ledger: Ledger,
        past: DynamicCache,
        lane: Lane = "plain",
        logits_to_keep: int | Int[Tensor, "kept"] = 0,
        masked: bool = False,
        hidden: Bool[Tensor, "batch queries slots"] | None = None,
    ) -> Float[Tensor, "batch kept_queries vocab"]:
        """`Lanes.forward` without the gate, for the gate itself.

        Args:
            masked: give kvprobe's masks even where the cache was not edited.
            hidden: see `kvprobe.models.masks.masks_of`.
        """
        queries = ids.shape[1]
        positions = ledger.positions[:, ledger.slots - queries :]
        self.refuse_far_positions(positions)
        arguments: dict[str, Any] = {
            "position_ids": positions,
            CACHE: past,
            "use_cache": True,
            "logits_to_keep": logits_to_keep,
        }
        modules = self.attention_modules if lane == "plain" else self.hooked.attention_modules
        # In an unedited cache slot index and position agree, so the library's own (fused) path is right.
        masked = masked or hidden is not None or (lane == "plain" and queries == 1 and self._slow_unmasked)
        masks = None if ledger.untouched and not masked else self.masks(ledger, queries, hidden)
        with self._claimed(), masks_given(modules, masks), writes_noted(self.recurrent_modules):
            if masks:
                arguments["attention_mask"] = masks[0]
            if lane == "hooked":
                return self.hooked(ids, **arguments)
            return self.plain(input_ids=ids, **arguments).logits

    @contextmanager
    def _claimed(self) -> Generator[None]:
        """`claimed`, with products as fast as they can be."""
        with claimed(self.plain), by_onednn(self.plain) if self._slow_products else nullcontext():
            yield

    @cached_property
    def _slow_products(self) -> bool:
        """Whether oneDNN is faster than what torch itself takes for some of the model's weights."""
        return onednn_is_faster() and any(map(worth, self.plain.parameters()))

    @property
    def _slow_unmasked(self) -> bool:
        """Whether a single query is attended faster with a mask, though nothing is hidden.

        Without one, transformers lets torch group query heads, which on a CPU takes 6 to 13 times as long in half
        precision as the grouping that transformers does itself (torch 2.13, transformers 5.23).
        """
        heads = [self.geometry.layers[source][0].heads for source in self.geometry.sources]
        half = self.device.type == "cpu" and self.dtype != torch.float32
        return half and any(self.geometry.n_heads > of_keys for of_keys in heads)

    @contextmanager
    def observing_attention_unproved(self, observe: Callable[[Attending, Tensor], None]) -> Generator[None]:
        """`observing_attention` without the gate, for the gate itself.

        `observe` also gets the output of the layer's attention, `[rows, queries, heads, d_value]`.
        """

        def attention(inputs: Attending, usual: Callable[[], Tensor]) -> Tensor:
            computed = usual()
            observe(inputs, computed)
            return computed

        with self._attention(attention):
            yield

    def _attention(self, attention: Attention) -> AbstractContextManager[None]:
        """See `attention_replaced`.

        Raises:
            UserError: some layers are the same module.
        """
        if len({*self.attention_modules}) < len(self.attention_modules):
            raise UserError(
                f"{type(self.plain).__name__} calls its layers several times, which maps of attention and patch sweeps "
                "cannot distinguish; patch with KVCache.patch, one cell at a time."
            )
        modules = dict(zip(self.geometry.attending, self.attention_modules, strict=True))
        return attention_replaced(self.plain, modules, attention)

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, each of which holds one attention module, or a recurrent one, or neither."""
        mixers = dict(zip(self.geometry.attending, self.attention_modules, strict=True))
        mixers |= dict(zip(self.geometry.recurrent, self.recurrent_modules, strict=True))
        count = max(self.geometry.n_layers, len(self.geometry.sources))
        stacks = (stack for stack in self.plain.modules() if isinstance(stack, nn.ModuleList) and len(stack) == count)
        for stack in map(list, stacks):
            if all(any(part is mixer for part in stack[layer].modules()) for layer, mixer in mixers.items()):
                return stack
        raise UserError(
            f"{type(self.plain).__name__} has no list of decoder layers that kvprobe can find; use another model."
        )

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """How the keys that each layer attends by are rotated by position; raises as `rotaries_of` does."""
        return tuple(next(iter(parts.values()), None) for parts in self.rotaries_by_part)

    @cached_property
    def rotaries_by_part(self) -> tuple[dict[str, Rotary | None], ...]:
        """How each layer's keys, those of its index included, are rotated by position; see `rotaries_of`."""
        return rotaries_of(self.plain, self.geometry)

    @cached_property
    def can_reindex(self) -> bool:
        """Whether keys can be rotated to other positions, so that gaps can be closed."""
        try:
            return bool(self.rotaries)
        except UserError:
            return False

    def output_weights(self, layer: int) -> Float[Tensor, "heads d_value d_model"]:
        """The output projection W_O of each head of a layer.

        Raises:
            UserError: the attention module has no output projection of a known name, or one with an adapter.
        """
        projection = self.output_projection(layer)
        if not isinstance(projection, nn.Linear | Conv1D) or any(True for _ in projection.children()):
            raise UserError(
                f"The output projection of {type(self.plain).__name__} is a {type(projection).__name__}, whose W_O is "
                "not its weight alone; merge adapters into the weights first."
            )
        # GPT-2's Conv1D stores its weight transposed.
        weight = weight_of(projection)
        weight = weight if isinstance(projection, Conv1D) else weight.T
        return torch.unflatten(weight, 0, (self.geometry.n_heads, -1))

    def output_projection(self, layer: int) -> Any:
        """The module that multiplies with the W_O of all heads of a layer; raises as `output_weights` does."""
        module = self.attention_modules[self.geometry.attending.index(layer)]
        names = ("o_proj", "c_proj", "dense", "out_proj")
        for name in names:
            if (projection := getattr(module, name, None)) is not None:
                return projection
        raise UserError(
            f"{type(module).__name__} has no output projection called {', '.join(names)}, so its W_O is not known."
        )

    @cached_property
    def attention_modules(self) -> list[nn.Module]:
        """The attention module of each layer that attends, those that read another layer's K and V included; one that
        is called for several layers stands there as often (HRM)."""
        numbered = [
            (index, module)
            for module in self.plain.modules()
            if type(module).__name__.endswith(("Attention", "MLA"))
            and module not in self.recurrent_modules
            and isinstance(index := getattr(module, "layer_idx", getattr(module, "layer_id", None)), int)
        ]
        by_layer = dict(numbered)
        modules = [by_layer[layer] for layer in sorted(by_layer)]
        if tuple(sorted(by_layer)) != self.geometry.attending:
            modules = self._called([module for _, module in numbered])
        if len(modules) != len(self.geometry.attending):
            raise UserError(
                f"{type(self.plain).__name__} does not have one attention module per layer that kvprobe can find, so "
                "slots cannot be masked in it; use another model."
            )
        return modules

    def _called(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """These modules in the order in which the model calls them."""
        called: list[nn.Module] = []

        def note(module: nn.Module, *_: object) -> None:
            called.append(module)

        hooks: list[Hook] = [(module, "input", note) for module in modules]
        with hooked(hooks), torch.no_grad():
            self.native(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        return called

    @cached_property
    def recurrent_modules(self) -> list[nn.Module]:
        """The module of each recurrent layer."""
        return recurrent_modules(self.plain, len(self.geometry.recurrent))

    def masks(
        self, ledger: Ledger, queries: int, hidden: Bool[Tensor, "batch queries slots"] | None = None
    ) -> list[Tensor]:
        """See `kvprobe.models.masks.masks_of`."""
        return masks_of(ledger, queries, self.geometry, self.dtype, hidden)

    def refuse_far_positions(self, positions: Int[Tensor, "batch queries"]) -> None:
        """Refuse positions beyond those that the model can read."""
        limit = self.geometry.max_position
        if limit is not None and int(positions.max()) >= limit:
            chooses = hasattr(self.plain.config, "keep_window_size")
            kind = "one set of frequencies" if changing_frequencies(self.plain.config) else "embeddings"
            raise UserError(
                f"Position {int(positions.max())} is beyond the {limit} that this model has "
                f"{'attention to all slots' if chooses else kind} for; use a shorter conversation."
            )
