"""What the model holds while it reads prompts of several lengths, several at once, and while it generates; and how long
a token takes."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.measured import measure
from kvprobe.inference.model import Model
from kvprobe.studies.memory import Config
from kvprobe.studies.memory.timed import growth, step_times, token_times

GENERATED = 2
"""The last tokens of each context, which are read one by one."""
OF = ("predicted", "measured")


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Predicted and measured bytes; the same by batch, with seconds of a step; the cache, token by token; and seconds
    to the next token.

    Raises:
        UserError: a length that the model cannot read.
    """
    longest = max(*config.contexts, *config.timed, config.prompt + config.new)
    model.lanes.refuse_far_positions(torch.tensor([[longest - 1]]))
    parts, prompt = Parts(model, config, run), [config.prompt]
    return {
        "samples": parts.table(peak, config.contexts, "peak", doing="Measuring peaks", unit="prompt", alone=True),
        "batches": parts.table(together, config.batches, "batch", doing="Measuring batches", unit="batch", alone=True),
        "growth": parts.table(grow, prompt, "growth", doing="Watching a cache grow", unit="conversation", alone=True),
        "times": parts.table(timed, config.timed, "time", doing="Timing tokens", unit="length", alone=True),
    }


def peak(model: Model, config: Config, context: int) -> pd.DataFrame:
    """Bytes for a prompt of this length."""
    taken = measure(model, model.budget(context=context, new=GENERATED))
    return pd.DataFrame(taken.rows(), columns=["what", *OF]).assign(context=context)


def together(model: Model, config: Config, batch: int) -> pd.DataFrame:
    """Bytes and seconds for so many prompts at once."""
    taken = measure(model, model.budget(context=config.contexts[0], new=GENERATED, batch=batch))
    sizes = {f"{what}_{of}": size for what, *both in taken.rows() for of, size in zip(OF, both, strict=True)}
    return pd.DataFrame(step_times(model, config.contexts[0], batch, config.repeats)).assign(**sizes)


def grow(model: Model, config: Config, prompt: int) -> Iterable[Mapping[str, Any]]:
    """The cache, token by token."""
    return growth(model, prompt, config.new)


def timed(model: Model, config: Config, length: int) -> Iterable[Mapping[str, Any]]:
    """Seconds to the next token."""
    return token_times(model, length, config.repeats)
