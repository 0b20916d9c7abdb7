"""What a layer of the plain lane attends with, and how another function replaces its attention.

Transformers' registry holds one attention of kvprobe for each of its own, which asks a table what replaces it in which
module. So models do not disturb each other, and one whose name was left behind attends as usual.
"""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvprobe.cache.attention import output_of, weights_of
from kvprobe.errors import UserError
from kvprobe.models.hooks import claimed, unless_bare
from kvprobe.restoring import restoring

KERNELS = ("sdpa", "eager")
"""Attentions of transformers that take kvprobe's masks."""


@dataclass(frozen=True)
class Attending:
    """What one layer of the plain lane attends with.

    Attributes:
        layer: its number in the model.
        query: after norms and rotary embedding.
        key: likewise, of all slots: those of the cache first, then those being read. Where it is another layer's, after
            which rows have joined (`kvprobe.patching.rows`), it has that one's rows; so have value and chosen.
        value: of the same slots.
        scale: factor of the scores.
        softcap: the value at which scores saturate (Gemma 2); None where they do not.
        sinks: scores of the model's own attention sinks (gpt-oss), which take attention but are not slots; or None.
        chosen: the slots that an index chose for each query (DeepSeek V3.2); None where there is no index.
    """

    layer: int
    query: Float[Tensor, "rows heads queries d_head"]
    key: Float[Tensor, "key_rows kv_heads slots d_head"]
    value: Float[Tensor, "key_rows kv_heads slots d_value"]
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "heads"] | None = None
    chosen: Bool[Tensor, "_ 1 queries all_slots"] | None = None

    def at(self, queries: slice | Int[Tensor, "some"]) -> "Attending":
        """The same for some of its queries."""
        chosen = None if self.chosen is None else self.chosen[:, :, queries]
        return replace(self, query=self.query[:, :, queries], chosen=chosen)

    def weights(self, seen: Bool[Tensor, "#rows #kv_heads queries slots"]) -> Float[Tensor, "rows heads queries slots"]:
        """The share of its attention that each query pays each slot it sees, in fp32."""
        seen = seen if self.chosen is None else seen & self.chosen
        return weights_of(self.query, self.key, seen, self.scale, self.softcap, self.sinks)

    def output(
        self, seen: Bool[Tensor, "#rows #kv_heads queries slots"]
    ) -> Float[Tensor, "rows heads queries d_value"]:
        """What each query reads, in fp32."""
        return output_of(self.weights(seen), self.value)


Attend = Callable[[Attending], Float[Tensor, "rows heads queries d_value"]]
Attention = Callable[[Attending, Callable[[], Tensor]], Tensor]
"""Gets what a layer attends with, and a function that computes the model's own attention."""


class _Replacement(NamedTuple):
    """What replaces the attention of a module.

    Attributes:
        attention: what computes it; where it gives nothing, what it replaces is computed.
        replaced: what it replaces in its turn; None for the model's own.
    """

    layer: int
    attention: Callable[[Attending, Callable[[], Tensor]], Tensor | None]
    replaced: "_Replacement | None"


_replacements: WeakKeyDictionary[nn.Module, _Replacement] = WeakKeyDictionary()


def attention_name(plain: PreTrainedModel) -> str | None:
    """The name of a model's attention in transformers' registry."""
    config: Any = plain.config  # transformers has no public name for it
    return config._attn_implementation


def set_attention(plain: PreTrainedModel, name: str) -> None:
    """Let a model take its attention from transformers' registry by this name."""
    model: Any = plain  # transformers' annotation is incomplete
    model.set_attn_implementation(name)


@contextmanager
def attention_named(plain: PreTrainedModel, name: str) -> Generator[None]:
    """While this lasts, a model takes its attention from transformers' registry by this name."""
    before = attention_name(plain)
    assert before is not None  # the lanes refuse such a model
    with claimed(plain), restoring(lambda: set_attention(plain, before)):
        set_attention(plain, name)
        yield


@contextmanager
def attention_replaced(
    plain: PreTrainedModel, modules: Mapping[int, nn.Module], attention: Attention
) -> Generator[None]:
    """While this lasts, `attention` is the attention of these modules of a Hugging Face model, each of its layer.

    Raises:
        UserError: the model does not take its attention from transformers' registry.
    """
    name = f"kvprobe_{str(attention_name(plain)).removeprefix('kvprobe_')}"
    before = {module: _replacements.get(module) for module in modules.values()}

    def put_back() -> None:
        for module, replacement in before.items():
            if replacement is None:
                _replacements.pop(module, None)
            else:
                _replacements[module] = replacement

    with claimed(plain), restoring(put_back), attention_named(plain, name):
        if attention_name(plain) != name:
            raise UserError(
                f"{type(plain).__name__} does not take its attention from transformers' registry, so it can be "
                "neither replaced nor observed; patch with KVCache.patch, one cell at a time, and see patterns on "
                "lane='hooked'."
            )
        attention = unless_bare(attention)
        for layer, module in modules.items():
            _replacements[module] = _Replacement(layer, attention, before[module])
        yield


def _attend(
    kernel: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    indices: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention that the registry holds in place of this one.

    Args:
        dropout: at the place that it has in transformers, since kvpress, once imported, gives it without its name.
        indices: the slots that an index chose for each query, which transformers leaves to attentions that it does not
            know, and puts into the mask of its own.
    """
    chosen = None
    if indices is not None:
        assert attention_mask is not None  # the index needs it
        # Of the mask's slots: of these, the keys may be the last alone (`kvprobe.patching.memories`).
        chosen = key.new_zeros(len(indices), query.shape[2], attention_mask.shape[3], dtype=torch.bool)
        chosen = chosen.scatter(2, indices.long(), True)[:, None]
        hidden = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(~chosen, hidden)

    def usual() -> tuple[Tensor, Tensor | None]:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        registry: Any = AttentionInterface()
        return registry.get_interface(kernel, eager)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )

    def computed(replacement: _Replacement | None) -> Tensor:
        if replacement is None:
            return usual()[0]
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        softcap, sinks = settings.get("softcap"), settings.get("s_aux")
        inputs = Attending(replacement.layer, query, key, value, scale, softcap, sinks, chosen)
        output = replacement.attention(inputs, lambda: computed(replacement.replaced))
        return computed(replacement.replaced) if output is None else output

    replacement = _replacements.get(module)
    return usual() if replacement is None else (computed(replacement), None)


_functions: Any = AttentionInterface
_masks: Any = AttentionMaskInterface
for _kernel in KERNELS:
    _functions.register(f"kvprobe_{_kernel}", partial(_attend, _kernel))
    # Without a mask function of the same name the model would make no masks.
    _masks.register(f"kvprobe_{_kernel}", _masks()[_kernel])
