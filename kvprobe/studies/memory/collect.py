"""What the model holds while it reads prompts of several lengths and while it generates, and how long a token takes."""

from functools import partial

import pandas as pd
import torch

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.measured import measure
from kvprobe.inference.model import Model
from kvprobe.inference.timed import growth, token_times
from kvprobe.studies.memory import Config

GENERATED = 2
"""The last tokens of each context, which are read one by one."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Predicted and measured bytes; the cache, token by token; and seconds to the next token.

    Raises:
        UserError: a length that the model cannot read.
    """
    longest = max(*config.contexts, *config.timed, config.prompt + config.new)
    model.lanes.refuse_far_positions(torch.tensor([[longest - 1]]))

    def grow(prompt: int) -> pd.DataFrame:
        return pd.DataFrame(growth(model, prompt, config.new))

    def timed(length: int) -> pd.DataFrame:
        return pd.DataFrame(token_times(model, length, config.repeats))

    parts = partial(table_of_parts, run)
    return {
        "samples": collect_peaks(model, config, run),
        "growth": parts([config.prompt], "growth", grow, doing="Watching a cache grow", unit="conversation"),
        "times": parts(config.timed, "time", timed, doing="Timing tokens", unit="length"),
    }


def collect_peaks(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """For each context: bytes predicted and measured, of the weights, the cache, and beside the weights at their
    most."""

    def peak(context: int) -> pd.DataFrame:
        predicted = model.budget(context=context, new=GENERATED)
        taken = measure(model, predicted)
        assert taken.generating is not None
        reading, generating = (predicted.phases[name].total for name in ("reading", "generating"))
        rows = [
            ("weights", predicted.weights, taken.weights),
            ("cache", predicted.cache, taken.cache),
            ("reading", reading, taken.reading.peak),
            ("generating", generating, taken.generating.peak),
            ("peak", predicted.peak, taken.peak),
        ]
        return pd.DataFrame(
            [{"context": context, "what": what, "predicted": said, "measured": seen} for what, said, seen in rows]
        )

    return table_of_parts(run, config.contexts, "peak", peak, doing="Measuring peaks", unit="prompt")
