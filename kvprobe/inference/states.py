"""What a recurrent layer holds of a cache."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.recurrence import fold, last_inputs, timeless
from kvprobe.inference.model import Model

_KERNELS = ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "short_conv_kernel_size")
"""What configs call the width of the short convolution."""


def inputs_of(model: Model, cache: KVCache, layer: int) -> Float[Tensor, "rows 1 channels kept"]:
    """The inputs that the short convolution of a recurrent layer keeps, in fp32."""
    plain: Any = model.lanes.plain.config
    config = plain.get_text_config()
    width = next(getattr(config, name) for name in _KERNELS if getattr(config, name, None))
    return last_inputs(cache.layers[layer]["conv"], _live(cache, layer), width - 1)[:, None].float().cpu()


def _live(cache: KVCache, layer: int) -> Bool[Tensor, "rows slots"]:
    lives = cache.ledger.live
    return lives[layer if len(lives) > 1 else 0, :, 0]


def state_of(model: Model, cache: KVCache, layer: int) -> Float[Tensor, "rows heads d_key d_value"]:
    """The state of one layer, in fp32; of a short convolution alone, the inputs that it keeps."""
    writes = cache.layers[layer]
    if "decay" not in writes:
        return inputs_of(model, cache, layer)
    return fold(timeless(writes, cache.ledger.padding), keep=_live(cache, layer)).cpu()
