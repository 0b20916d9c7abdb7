"""What a layer of the plain lane attends with, and how another function replaces its attention."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvprobe.cache.attention import output_of, weights_of
from kvprobe.errors import UserError


@dataclass(frozen=True)
class Attending:
    """What one layer of the plain lane attends with.

    Attributes:
        layer: its index.
        query: after norms and rotary embedding.
        key: likewise, of all slots: those of the cache first, then those being read.
        value: of the same slots.
        scale: factor of the scores.
        softcap: the value at which scores saturate (Gemma 2); None where they do not.
        sinks: scores of the model's own attention sinks (gpt-oss), which take attention but are not slots; or None.
    """

    layer: int
    query: Float[Tensor, "rows heads queries d_head"]
    key: Float[Tensor, "rows kv_heads slots d_head"]
    value: Float[Tensor, "rows kv_heads slots d_value"]
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "heads"] | None = None

    def weights(self, seen: Bool[Tensor, "#rows #kv_heads queries slots"]) -> Float[Tensor, "rows heads queries slots"]:
        """The share of its attention that each query pays each slot it sees, in fp32."""
        return weights_of(self.query, self.key, seen, self.scale, self.softcap, self.sinks)

    def output(
        self, seen: Bool[Tensor, "#rows #kv_heads queries slots"]
    ) -> Float[Tensor, "rows heads queries d_value"]:
        """What each query reads, in fp32."""
        return output_of(self.weights(seen), self.value)


Attend = Callable[[Attending], Float[Tensor, "rows heads queries d_value"]]


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
    set_attention(plain, name)
    try:
        yield
    finally:
        set_attention(plain, before)


@contextmanager
def attention_replaced(
    plain: PreTrainedModel,
    modules: Sequence[nn.Module],
    d_head: int,
    name: str,
    attention: Callable[[Attending, Callable[[], Tensor]], Tensor],
) -> Generator[None]:
    """While this lasts, `attention` is the attention of these modules of a Hugging Face model.

    Args:
        name: under which transformers' registry holds it.
        attention: called with what a layer attends with, and with a function that computes the model's own attention.

    Raises:
        UserError: the model does not take its attention from transformers' registry.
    """
    layers = {id(module): layer for layer, module in enumerate(modules)}
    before = attention_name(plain)
    registry: Any = AttentionInterface()  # its annotations are incomplete

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        scale = d_head**-0.5 if scaling is None else float(scaling)
        softcap, sinks = settings.get("softcap"), settings.get("s_aux")
        inputs = Attending(layers[id(module)], query, key, value, scale, softcap, sinks)

        def usual() -> Tensor:
            eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            function = registry.get_interface(before, eager)
            return function(module, query, key, value, attention_mask, scaling=scaling, **settings)[0]

        return attention(inputs, usual), None

    registry.register(name, attend)
    with attention_named(plain, name):
        if attention_name(plain) != name:
            raise UserError(
                f"{type(plain).__name__} does not take its attention from transformers' registry, so it can be "
                "neither replaced nor observed; patch with KVCache.patch, one cell at a time, and see patterns on "
                "lane='hooked'."
            )
        yield
