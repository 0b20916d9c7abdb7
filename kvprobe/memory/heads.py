"""Sizes that both caches and weights depend on: the width of a model and its heads."""

from collections.abc import Callable

from kvprobe.errors import UserError
from kvprobe.memory.config import Config

Size = Callable[[Config], int]

Switch = bool | str
"""Always, never, or the value of the field of this name; False if it is null or missing."""


def on(config: Config, switch: Switch) -> bool:
    """The value of a switch."""
    return switch if isinstance(switch, bool) else config.has(switch) and config.flag(switch)


def field(*names: str) -> Size:
    """A function that reads the size under the first of these names that the config has."""
    return lambda config: config.size(*names)


width = field("hidden_size", "n_embd", "n_embed")
"""Of the residual stream."""

heads = field("num_attention_heads", "n_head")
"""Of queries."""


def kv_heads(config: Config) -> int:
    """Of keys and values.

    Raises:
        UserError: there are none, or they do not divide the query heads.
    """
    count = heads(config)
    if config.kind in ("gpt2", "gptj", "gpt_neox"):
        return count
    if config.kind == "falcon" and on(config, "new_decoder_architecture"):
        grouped = config.size("num_kv_heads", default=count)
    elif config.kind in ("gpt_bigcode", "falcon"):
        grouped = 1 if on(config, "multi_query") else count
    elif config.kind in _UNGROUPED:
        grouped = config.size("num_key_value_heads", default=count)
    else:
        grouped = config.size("num_key_value_heads")
    if count % grouped:
        raise UserError(
            f"{config.name} has {count} query heads for {grouped} KV heads in its config; the number of KV heads must "
            "divide that of query heads."
        )
    return grouped


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
"""Families with as many KV heads as query heads by default; the configs of other families state the number."""


def d_head(config: Config) -> int:
    """Coordinates of a head.

    Raises:
        UserError: the config has no head_dim, and the number of heads does not divide the width.
    """
    if config.kind not in _SQUARE and config.has("head_dim"):
        return config.size("head_dim")
    if width(config) % heads(config):
        raise UserError(
            f"{config.name} has hidden_size={width(config)} for {heads(config)} heads in its config, and no head_dim; "
            "add head_dim."
        )
    return width(config) // heads(config)


_SQUARE = frozenset(["gpt2", "gpt_bigcode", "gptj", "gpt_neox", "falcon", "phi", "stablelm", "mllama_text_model"])
"""Families whose heads together are as wide as the residual stream, even if the config has `head_dim`."""
