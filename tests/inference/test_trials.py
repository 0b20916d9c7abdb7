"""Items answered in one batch are answered as one by one, and each keeps its own donors and draws."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.faults import Distractor, Gaussian, Scope, Zeros
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Trial
from kvprobe.inference.trials import AskedItem, Case, answer, struck
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt
from tests.models import any_model, llama, tiny_tokenizer
from tests.random_caches import random_tokens


def test_items_of_one_batch_are_answered_as_one_by_one():
    model: Model = llama(tokenizer=tiny_tokenizer(), max_position_embeddings=2048, initializer_range=0.4)
    task = find_task("retrieve")
    scope = Scope(rate=0.3)
    faults = [Gaussian("channel", scope=scope, at="every", transient=True), Distractor(scope=scope), Zeros(scope=scope)]
    cases = [Case({"fault": number}, Trial(fault, number)) for number, fault in enumerate(faults)]
    asked = [
        (AskedItem(task, item, number, prompt(item, model.tokenizer)), cases[: 3 - number])
        for number, item in enumerate(task.items(3, 0))
    ]
    assert len({len(sample.tokens) for sample, _ in asked}) > 1, "prompts of unequal length"
    together = pd.DataFrame(answer(model, asked, 7))
    alone = pd.concat([pd.DataFrame(answer(model, [one], 7)) for one in asked], ignore_index=True)
    assert together["case"].tolist() == [-1, 0, 1, 2, -1, 0, 1, -1, 0]
    assert together.groupby("sample")["text"].nunique().max() > 1, "faults change answers"
    pd.testing.assert_frame_equal(together, alone, rtol=1e-3, atol=1e-6)
    # The damage of an item is drawn for its number.
    first = replace(asked[0][0], number=1)
    other = pd.DataFrame(answer(model, [(first, cases)], 7))
    assert not np.isclose(other["kl"][1:], together["kl"][1:4], rtol=1e-4).any()


@pytest.mark.parametrize("name", ["distractor-matched", "stale-block"])
def test_a_row_that_brings_padding_is_struck_as_alone(name: str):
    """Its donors are as long as the row, not as the longest row beside it."""
    model, fault = any_model(), CATALOGUE[name].make(scope=Scope(rate=0.5))
    short, long = (model.prefill(random_tokens(seed, {"T1": count})) for seed, count in ((0, 9), (1, 40)))
    alone, beside = (struck(model, cache, fault) for cache in (short, KVCache.join([short, long]).rows([0])))
    for one, other in zip(alone.tensors, beside.tensors, strict=True):
        torch.testing.assert_close(one, other[:, :, :9], rtol=0, atol=1e-5)
