"""What a layer of a model stores of the tokens that it has read."""

from dataclasses import dataclass

from kvprobe.cache.parts import INDEX, KV, LATENT, PartSize
from kvprobe.memory.numbers import Numbers


@dataclass(frozen=True)
class AttentionStore:
    """A layer that stores a key and a value per token and KV head.

    Attributes:
        heads: query heads.
        kv_heads: heads of K and V; 1 for latent attention.
        d_key, d_value: numbers in a key and in a value. In latent attention (MLA, DeepSeek-AI 2024, arXiv 2405.04434)
            those of the compressed latent and of the rotary part, which all heads share: there is no factor 2.
        reach: how many of the newest tokens are attended to, the query's own included; None for all.
        chunked: whether they are those of the query's chunk; else they are a sliding window.
        latent: whether it is latent attention.
        d_index: numbers in the key of a sparse-attention index (DeepSeek V3.2), which all heads share.
        crosses: whether the keys are those of another input, such as an image, whose length does not grow.
        copies: heads that transformers stores if it repeats K and V before it stores them; else None.
    """

    heads: int
    kv_heads: int
    d_key: int
    d_value: int
    reach: int | None = None
    chunked: bool = False
    latent: bool = False
    d_index: int = 0
    crosses: bool = False
    copies: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers are stored per token, in all heads."""
        return self.kv_heads * (self.d_key + self.d_value) + self.d_index

    @property
    def parts(self) -> tuple[PartSize, ...]:
        """What is stored of a token, as transformers stores it."""
        names, heads = LATENT if self.latent else KV, self.copies or self.kv_heads
        vectors = PartSize(names[0], heads, self.d_key), PartSize(names[1], heads, self.d_value)
        return (*vectors, PartSize(INDEX, 1, self.d_index)) if self.d_index else vectors

    def __str__(self) -> str:
        if self.latent:
            name = "MLA"
        elif self.kv_heads == self.heads:
            name = f"MHA {self.heads}"
        else:
            name = f"MQA {self.heads}:1" if self.kv_heads == 1 else f"GQA {self.heads}:{self.kv_heads}"
        reach = "" if self.reach is None else f", {'chunks of' if self.chunked else 'sliding'} {self.reach:,}"
        return f"{name}{reach}{', indexed' if self.d_index else ''}{', cross' if self.crosses else ''}"


STATE_BYTES = 4
"""Of a number that implementations store in float32, as recurrent states mostly are."""


@dataclass(frozen=True)
class State:
    """A layer that stores a state of constant size.

    Attributes:
        name: of the mechanism.
        channels: of the causal convolution before it.
        kernel: width of that convolution.
        recurrent: numbers in the recurrent state; 0 for a convolution alone.
        writes: what kvprobe's caches keep of each token that was written to the state, besides the convolution's input;
            None where kvprobe does not read such layers.
        dtype: of the recurrent state, where the config names one.
        narrow: whether the recurrent state is stored in the model's dtype, not in float32.
        wide: whether the convolution's inputs are stored in float32, not in the model's dtype.
    """

    name: str
    channels: int
    kernel: int
    recurrent: int
    writes: tuple[PartSize, ...] | None = None
    dtype: str | None = None
    narrow: bool = False
    wide: bool = False

    @property
    def parts(self) -> tuple[PartSize, ...]:
        """What kvprobe's caches keep of a token; nothing where kvprobe does not read such layers."""
        return () if self.writes is None else (*self.writes, PartSize("conv", 1, self.channels))

    def nbytes(self, dtype: Numbers) -> int:
        """What an engine holds of it, whatever was read: the convolution needs its last kernel − 1 inputs."""
        return self.nbytes_with(self.kernel - 1, dtype)

    def nbytes_with(self, inputs: int, dtype: Numbers) -> int:
        """What is held of it with so many inputs of the convolution."""
        numbers = self.channels * inputs
        return (numbers * STATE_BYTES if self.wide else dtype.bytes(numbers)) + (
            dtype.bytes(self.recurrent) if self.narrow else self.recurrent * STATE_BYTES
        )

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class LayerStore:
    """What one layer stores: for attention, for recurrence, for both, or nothing.

    Attributes:
        shares: the layer whose K and V it reads instead of storing its own (Gemma 3n).
    """

    attention: AttentionStore | None = None
    state: State | None = None
    shares: int | None = None

    @property
    def parts(self) -> tuple[PartSize, ...]:
        """What kvprobe's caches keep of each token, as `Geometry.layers` has it of a loaded model."""
        return tuple(part for store in (self.attention, self.state) if store is not None for part in store.parts)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.attention, self.state) if part is not None]
        if self.shares is not None:
            return f"shared with layer {self.shares}"
        return " + ".join(parts) or "no attention"
