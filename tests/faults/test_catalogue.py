"""The named faults."""

import pytest
import torch

from kvprobe.faults import Scope
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.inference.trials import struck
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_fault_writes_the_parts_that_it_says(tiny_llama: Model, name: str):
    tokens, named = prompt(find_task("recite").items(1, 0)[0], tiny_llama.tokenizer), CATALOGUE[name]
    cache = tiny_llama.prefill(tokens)
    scope = Scope(rate=0.5, parts=named.parts, unit=named.unit("slot"))
    fault = named.make(scope=scope, at=0, transient=False)
    damaged = struck(tiny_llama, cache, tokens, fault)
    changed = {
        "k": any(not torch.equal(a, b) for a, b in zip(cache.keys, damaged.keys, strict=True)),
        "v": any(not torch.equal(a, b) for a, b in zip(cache.values, damaged.values, strict=True)),
    }
    only = {"zero-values": "v", "permuted-keys": "k", "shifted": "k", "overlapping": "k"}.get(name)
    assert changed == {"k": only in (None, "k"), "v": only in (None, "v")}
