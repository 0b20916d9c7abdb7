"""What a cache costs and saves, token by token: the bytes that it holds as it grows, and how long the next token takes
with it and without it."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from kvprobe.inference.measured import storage_bytes
from kvprobe.inference.model import Model
from kvprobe.models.hf_cache import CACHE, library_cache
from kvprobe.progress import Clock


@torch.inference_mode()
def growth(model: Model, prompt: int, new: int) -> list[dict[str, int]]:
    """After each of `new` generated tokens: bytes that the cache's tensors hold, and what three views say of them."""
    plain = model.lanes.plain
    past = library_cache(plain.config)
    ids = _ids(model, prompt + new)
    held, blocks = (model.budget(context=prompt, engine=engine) for engine in ("hf", "vllm"))
    rows: list[dict[str, int]] = []
    for count in range(new + 1):
        first = 0 if count == 0 else prompt + count - 1
        plain(ids[:, first : prompt + count], use_cache=True, logits_to_keep=1, **{CACHE: past})
        said = held.generating(count)
        views = {"transformers": said.cache, "logical": sum(said.logical), "vLLM": blocks.generating(count).cache}
        rows.append({"new": count, "measured": sum(storage_bytes(past)), **views})
    return rows


@torch.inference_mode()
def token_times(model: Model, length: int, repeats: int) -> list[dict[str, int | float]]:
    """For each repeat: seconds to the next token, with the cache of what stands before (`cached`) and without it
    (`anew`).

    `others` is how many cores other processes used meanwhile. Both ways give the same token: `difference` is the
    largest between their logits, in units of the logits' spread.
    """
    plain = model.lanes.plain
    ids = _ids(model, length)
    next_token = _next_token(model, ids)
    seconds: list[dict[str, int | float]] = []
    difference, clock = 0.0, Clock()
    for repeat in range(repeats + 1):
        cached, with_cache = _seconds(next_token, model)
        anew, without = _seconds(lambda: plain(ids, use_cache=False, logits_to_keep=1), model)
        if repeat == 0:  # warms up, and is the one repeat that reads the same text both ways
            one, other = cached.logits[0, -1].float(), anew.logits[0, -1].float()
            difference = float((one - other).abs().max() / other.std())
        else:
            seconds.append({"length": length, "repeat": repeat, "cached": with_cache, "anew": without})
    return [{**row, "difference": difference, "others": clock.timing.others} for row in seconds]


@torch.inference_mode()
def step_times(model: Model, length: int, batch: int, repeats: int) -> list[dict[str, int | float]]:
    """For each repeat: seconds of the pass that reads the next token of so many conversations at once, after the cache
    of what stands before it; `others` is as in `token_times`."""
    next_tokens, clock = _next_token(model, _ids(model, length, batch)), Clock()
    _, *seconds = [_seconds(next_tokens, model)[1] for _ in range(repeats + 1)]  # the first one warms up
    others = clock.timing.others
    return [{"batch": batch, "repeat": at, "seconds": took, "others": others} for at, took in enumerate(seconds, 1)]


def power_of_length(
    lengths: Float[np.ndarray, "lengths"], seconds: Float[np.ndarray, "repeats lengths"]
) -> Float[np.ndarray, "repeats"]:
    """By what power of the length (or batch) a pass's time grows, for each repeat: the slope on logarithmic axes over
    the longer half of the lengths, since the shorter half is ruled by what every pass costs."""
    longer = lengths >= np.median(lengths)
    return np.polyfit(np.log(lengths[longer]), np.log(seconds[:, longer]).T, 1)[0]


def _next_token(model: Model, ids: torch.Tensor) -> Callable[[], Any]:
    """What reads the last token of each text after the cache of those before it. Called again it reads it once more,
    one slot further on: its time is that of this length."""
    plain = model.lanes.plain
    past = library_cache(plain.config)
    plain(ids[:, :-1], use_cache=True, logits_to_keep=1, **{CACHE: past})
    return lambda: plain(ids[:, -1:], use_cache=True, logits_to_keep=1, **{CACHE: past})


def _ids(model: Model, length: int, batch: int = 1) -> torch.Tensor:
    config: Any = model.lanes.plain.config
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.lanes.device)


def _seconds(run: Callable[[], Any], model: Model) -> tuple[Any, float]:
    if model.lanes.device.type == "cuda":
        torch.cuda.synchronize(model.lanes.device)
    start = time.perf_counter()
    result = run()
    if model.lanes.device.type == "cuda":
        torch.cuda.synchronize(model.lanes.device)
    return result, time.perf_counter() - start
