"""What a recurrent layer holds of a cache."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.recurrence import fold, last_inputs
from kvprobe.inference.model import Model


def state_of(model: Model, cache: KVCache, layer: int) -> Float[Tensor, "rows heads d_key d_value"]:
    """The state of one layer, in fp32; of a short convolution alone, the inputs that it keeps."""
    writes, lives = cache.layers[layer], cache.ledger.live
    live = lives[layer if len(lives) > 1 else 0, :, 0]
    if "decay" in writes:
        return fold(writes, keep=live).cpu()
    config: Any = model.lanes.plain.config
    return last_inputs(writes["conv"], live, config.get_text_config().conv_L_cache - 1)[:, None].float().cpu()
