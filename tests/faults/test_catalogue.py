"""The named faults."""

import pytest
import torch

from kvprobe.faults import Draws, Scope
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.faults.strike import corrupt
from kvprobe.inference import trials
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import prepare
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_fault_writes_the_parts_that_it_says(tiny_llama: Model, name: str):
    task = find_task("recite")
    item, named = task.items(1, 0)[0], CATALOGUE[name]
    sample = trials.Sample(task, item, 0, prompt(item, tiny_llama.tokenizer))
    cache = tiny_llama.prefill(sample.tokens)
    scope = Scope(rate=0.5, parts=named.parts, unit=named.unit("slot"))
    fault = named.make(scope=scope, at=0, transient=False)
    context = prepare(tiny_llama.lanes, cache, [fault], trials.donors(tiny_llama, sample, {fault.lender}))
    damaged, _ = corrupt(cache, fault, [context], [Draws()])
    changed = {
        "k": any(not torch.equal(a, b) for a, b in zip(cache.keys, damaged.keys, strict=True)),
        "v": any(not torch.equal(a, b) for a, b in zip(cache.values, damaged.values, strict=True)),
    }
    only = {"zero-values": "v", "permuted-keys": "k", "shifted": "k", "overlapping": "k"}.get(name)
    assert changed == {"k": only in (None, "k"), "v": only in (None, "v")}
