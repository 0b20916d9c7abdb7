"""What each head does with damaged slots: how much it attends to them, and how much of what it reads is theirs."""

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.attention.contributions import contribution
from kvprobe.attention.measures import lift
from kvprobe.attention.patterns import attend
from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens

LOOKS = ("mass", "lift", "contribution")
"""Attention on the slots; that over the clean run's; and what a head reads there of what its layer reads in all."""


@checked_arguments
def looks(model: Model, suffix: Tokens, clean: KVCache, damaged: KVCache, slots: Int[Tensor, "chosen"]) -> pd.DataFrame:
    """One row per `layer` and `head`: `LOOKS`, means over the tokens of the suffix.

    Args:
        suffix: read after both caches.
        slots: the damaged ones; see `kvprobe.cache.differences.changed_slots`.

    Raises:
        UserError: a slot is the sink, whose attention is not counted; or see `attend` and `lift`.
    """
    before, after = (attend(model, suffix, cache, queries=range(len(suffix))) for cache in (clean, damaged))
    columns = {"mass": after.mass(slots=slots), "contribution": contribution(model, after, slots).heads}
    means = {name: values.mean(-1).flatten().cpu().numpy() for name, values in columns.items()}
    return lift(after, before, slots)[["layer", "head", "lift"]].assign(**means)
