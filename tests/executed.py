"""What functions give that take an executor, over a few conversations."""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd

import kvprobe as kv
from kvprobe.executors import Executor
from kvprobe.inference.model import Model
from kvprobe.tasks.designs import Design, Sample, Target
from kvprobe.text.transcript import Transcript

PLACES = ("shed", "mill", "barn")


def conversation(place: str, digit: int) -> Transcript:
    messages = [
        {"role": "user", "content": f"the {place} has {digit}."},
        {"role": "assistant", "content": [f"a {place} it is ", {"text": str(digit), "name": "answer"}]},
    ]
    return Transcript.from_messages(messages, ["T1", "T2"])


def tables(model: Model, executor: Executor | None) -> dict[str, pd.DataFrame]:
    """By the name of the function: what it gives."""
    caches = {digit: model.prefill(conversation("shed", digit)) for digit in (2, 3)}
    asked: dict[str, Any] = {"progress": False, "executor": executor}
    pair = kv.Pair(caches[2], caches[3], " it is", kv.KL())
    sweep = kv.patch_sweep(model, caches[2], caches[3], " it is", kv.KL(), ("layer", "slot"), rows=5, **asked)
    pairs = kv.patch_pairs(model, [pair, kv.Pair(caches[3], caches[2], " it", kv.KL())], **asked)
    layers = kv.layer_map(model, caches[2], caches[3], " it is", **asked)
    samples = [Sample(conversation(place, digit), (digit - 2,), place) for digit, place in product((2, 3, 4), PLACES)]
    design = Design(tuple(samples), Target("digit", ("2", "3", "4")))
    reading: dict[str, Any] = {"families": ["v"], "folds": 3, "permutations": 0, "untrained": True, "layers": [1]}
    probing = kv.probe(model, design, "T2", hide="T1", executor=executor, **reading)
    assert probing.use is not None
    return {
        "sweep": sweep.df(),
        "pairs": pairs.df(),
        "layers": layers.df(),
        "states": layers.states,
        "probe": probing.df(),
        "use": probing.use,
    }


def assert_identical(ones: dict[str, pd.DataFrame], others: dict[str, pd.DataFrame]) -> None:
    """Every number of both is the same to the bit."""
    assert list(ones) == list(others)
    for name, one in ones.items():
        pd.testing.assert_frame_equal(one, others[name], check_exact=True)
        assert len(one) > 1
        assert np.isfinite(one.select_dtypes("number").to_numpy(float)).any()
