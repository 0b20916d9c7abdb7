"""Sizes that caches and weights are both told from: how wide a model is, and its heads."""

from collections.abc import Callable

from kvprobe.errors import UserError
from kvprobe.memory.config import Config

Size = Callable[[Config], int]

Switch = bool | str
"""Always, never, or as the field of that name says, where null and no field are False."""


def on(config: Config, switch: Switch) -> bool:
    """Whether it is switched on."""
    return switch if isinstance(switch, bool) else config.has(switch) and config.flag(switch)


def field(*names: str) -> Size:
    """The size under the first of these names that the config has."""
    return lambda config: config.size(*names)


width = field("hidden_size", "n_embd", "n_embed")
"""Of the residual stream."""

heads = field("num_attention_heads", "n_head")
"""Of queries."""


def kv_heads(config: Config) -> int:
    """Of keys and values.

    Raises:
        UserError: there are none, or query heads do not share out among them.
    """
    count = heads(config)
    if config.kind in ("gpt2", "gptj", "gpt_neox"):
        return count
    if config.kind == "falcon" and on(config, "new_decoder_architecture"):
        found = config.size("num_kv_heads", default=count)
    elif config.kind in ("gpt_bigcode", "falcon"):
        found = 1 if on(config, "multi_query") else count
    elif config.kind in _UNGROUPED:
        found = config.size("num_key_value_heads", default=count)
    else:
        found = config.size("num_key_value_heads")
    if count % found:
        raise UserError(
            f"{config.name} has {count} query heads for {found} KV heads in its config, which do not share out evenly."
        )
    return found


_UNGROUPED = frozenset(
    [
        "llama",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "cohere",
        "cohere2",
        "granite",
        "granitemoe",
        "granitemoehybrid",
    ]
)
"""Families with as many of them as heads unless the config says otherwise. The other families' configs all say."""


def d_head(config: Config) -> int:
    """Coordinates of a head.

    Raises:
        UserError: the config names none, and heads do not share out the width.
    """
    if config.kind not in _SQUARE and config.has("head_dim"):
        return config.size("head_dim")
    if width(config) % heads(config):
        raise UserError(
            f"{config.name} has hidden_size={width(config)} for {heads(config)} heads in its config, and no head_dim; give one."
        )
    return width(config) // heads(config)


_SQUARE = frozenset(["gpt2", "gpt_bigcode", "gptj", "gpt_neox", "falcon", "phi", "stablelm", "mllama_text_model"])
"""Families whose heads together are as wide as the residual stream, even if the config has a `head_dim`."""
