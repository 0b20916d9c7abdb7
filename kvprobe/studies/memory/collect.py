"""What the model holds while it reads prompts of several lengths, several at once, and while it generates; and how long
a token takes."""

from functools import partial

import pandas as pd
import torch

from kvprobe.experiments.parts import table_of_parts
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

    def peak(context: int) -> pd.DataFrame:
        taken = measure(model, model.budget(context=context, new=GENERATED))
        return pd.DataFrame(taken.rows(), columns=["what", *OF]).assign(context=context)

    def together(batch: int) -> pd.DataFrame:
        taken = measure(model, model.budget(context=config.contexts[0], new=GENERATED, batch=batch))
        sizes = {f"{what}_{of}": size for what, *both in taken.rows() for of, size in zip(OF, both, strict=True)}
        return pd.DataFrame(step_times(model, config.contexts[0], batch, config.repeats)).assign(**sizes)

    def grow(prompt: int) -> pd.DataFrame:
        return pd.DataFrame(growth(model, prompt, config.new))

    def timed(length: int) -> pd.DataFrame:
        return pd.DataFrame(token_times(model, length, config.repeats))

    parts = partial(table_of_parts, run, alone=True)
    return {
        "samples": parts(config.contexts, "peak", peak, doing="Measuring peaks", unit="prompt"),
        "batches": parts(config.batches, "batch", together, doing="Measuring batches", unit="batch"),
        "growth": parts([config.prompt], "growth", grow, doing="Watching a cache grow", unit="conversation"),
        "times": parts(config.timed, "time", timed, doing="Timing tokens", unit="length"),
    }
