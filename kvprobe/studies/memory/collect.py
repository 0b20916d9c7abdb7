"""What the model holds while it reads prompts of several lengths and while it generates, and how long a token takes."""

from functools import partial

import pandas as pd
import torch

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.measured import measure
from kvprobe.inference.model import Model
from kvprobe.studies.memory import Config
from kvprobe.studies.memory.timed import growth, token_times

GENERATED = 2
"""The last tokens of each context, which are read one by one."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Predicted and measured bytes; the cache, token by token; and seconds to the next token.

    Raises:
        UserError: a length that the model cannot read.
    """
    longest = max(*config.contexts, *config.timed, config.prompt + config.new)
    model.lanes.refuse_far_positions(torch.tensor([[longest - 1]]))

    def peak(context: int) -> pd.DataFrame:
        taken = measure(model, model.budget(context=context, new=GENERATED))
        return pd.DataFrame(taken.rows(), columns=["what", "predicted", "measured"]).assign(context=context)

    def grow(prompt: int) -> pd.DataFrame:
        return pd.DataFrame(growth(model, prompt, config.new))

    def timed(length: int) -> pd.DataFrame:
        return pd.DataFrame(token_times(model, length, config.repeats))

    parts = partial(table_of_parts, run, alone=True)
    return {
        "samples": parts(config.contexts, "peak", peak, doing="Measuring peaks", unit="prompt"),
        "growth": parts([config.prompt], "growth", grow, doing="Watching a cache grow", unit="conversation"),
        "times": parts(config.timed, "time", timed, doing="Timing tokens", unit="length"),
    }
