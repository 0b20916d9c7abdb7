"""Items answered in one batch are answered as one by one, and each keeps its own donors and draws."""

from dataclasses import replace

import numpy as np
import pandas as pd

from kvprobe.faults import Distractor, Gaussian, Scope, Zeros
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Trial
from kvprobe.inference.trials import AskedItem, Case, answer
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt
from tests.models import llama, tiny_tokenizer


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
