"""What the model holds while it reads prompts of several lengths and while it generates, and how long a token takes."""

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.measured import measure, storage_bytes
from kvprobe.inference.model import Model
from kvprobe.progress import Clock
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
    return {
        "samples": collect_peaks(model, config, run),
        "growth": collect_growth(model, config, run),
        "times": collect_times(model, config, run),
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


@torch.inference_mode()
def collect_growth(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """After each generated token: bytes that the cache's tensors hold, and what three views say of them."""

    def grow(_: int) -> pd.DataFrame:
        from transformers import DynamicCache

        plain = model.lanes.plain
        past = DynamicCache(config=plain.config)
        ids = _ids(model, config.prompt + config.new)
        held, blocks = (model.budget(context=config.prompt, engine=engine) for engine in ("hf", "vllm"))
        rows = []
        for new in range(config.new + 1):
            first = 0 if new == 0 else config.prompt + new - 1
            plain(ids[:, first : config.prompt + new], past_key_values=past, use_cache=True, logits_to_keep=1)
            said = held.generating(new)
            rows.append(
                {
                    "new": new,
                    "measured": sum(storage_bytes(past)),
                    "transformers": said.cache,
                    "logical": sum(said.logical),
                    "vLLM": blocks.generating(new).cache,
                }
            )
        return pd.DataFrame(rows)

    return table_of_parts(run, [0], "growth", grow, doing="Watching a cache grow", unit="conversation")


@torch.inference_mode()
def collect_times(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """For each length and repeat: seconds to the next token, with the cache of what stands before and without it.

    `others` is how many cores other processes used meanwhile. Both ways give the same token: `difference` is the
    largest between their logits, in units of the logits' spread.
    """

    def timed(length: int) -> pd.DataFrame:
        from transformers import DynamicCache

        plain = model.lanes.plain
        ids = _ids(model, length)
        past = DynamicCache(config=plain.config)
        plain(ids[:, :-1], past_key_values=past, use_cache=True, logits_to_keep=1)
        rows, difference, clock = [], 0.0, Clock()
        for repeat in range(config.repeats + 1):
            # Each repeat reads the last token once more, one slot further on: its time is that of this length.
            cached, with_cache = _seconds(
                lambda: plain(ids[:, -1:], past_key_values=past, use_cache=True, logits_to_keep=1), model
            )
            anew, without = _seconds(lambda: plain(ids, use_cache=False, logits_to_keep=1), model)
            if repeat == 0:  # warms up, and is the one repeat that reads the same text both ways
                one, other = cached.logits[0, -1].float(), anew.logits[0, -1].float()
                difference = float((one - other).abs().max() / other.std())
            else:
                rows.append({"length": length, "repeat": repeat, "cached": with_cache, "anew": without})
        return pd.DataFrame(rows).assign(difference=difference, others=clock.timing.others)

    return table_of_parts(run, config.timed, "time", timed, doing="Timing tokens", unit="length")


def _ids(model: Model, length: int) -> torch.Tensor:
    vocabulary = model.lanes.plain.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(model.lanes.device)


def _seconds(run: Callable[[], Any], model: Model) -> tuple[Any, float]:
    if model.lanes.device.type == "cuda":
        torch.cuda.synchronize(model.lanes.device)
    start = time.perf_counter()
    result = run()
    if model.lanes.device.type == "cuda":
        torch.cuda.synchronize(model.lanes.device)
    return result, time.perf_counter() - start
