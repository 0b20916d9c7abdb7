"""Where two caches differ."""

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import apart, changed_slots
from kvprobe.faults import Scope, Zeros
from kvprobe.inference.model import Model
from tests.random_caches import random_tokens
from tests.refusals import refused

PROMPT = random_tokens(1, {"system": 4, "T1": 7, "T2": 6})


@pytest.fixture(scope="module")
def cache(tiny_llama: Model) -> KVCache:
    return tiny_llama.prefill(PROMPT)


def test_slots_change_by_their_tokens_or_else_by_k_or_v(tiny_llama: Model, cache: KVCache):
    assert changed_slots(cache, cache).tolist() == []
    damaged = cache.corrupt(Zeros(scope=Scope(layers=[1], heads=[0], parts="v", slots=[3, 8])))
    assert changed_slots(cache, damaged).tolist() == [3, 8]
    # Another token changes K and V of what follows, which is no slot of its own.
    other = PROMPT[:5] + random_tokens(9, {"T1": 1}, start=5) + PROMPT[6:]
    assert changed_slots(cache, tiny_llama.prefill(other)).tolist() == [5]


def test_distance_is_that_of_the_slots_relative_to_the_largest_number(tiny_llama: Model, cache: KVCache):
    damaged = cache.corrupt(Zeros(scope=Scope(layers=[1], parts="k", slots=[3])))
    assert apart(cache, damaged, [0, 1, 2, 4]) == 0
    keys = cache.keys[1]
    assert apart(cache, damaged, [2, 3]) == pytest.approx(float(keys[:, :, 3].abs().max() / keys.abs().max()))
    later = tiny_llama.prefill(PROMPT[:9])
    refused(lambda: apart(cache, later, [0]), "= (1, 17) and (1, 9)")
    refused(lambda: changed_slots(cache.fork(2), cache.fork(2)), "one row")
    assert torch.equal(cache.keys[0][:, :, :9], later.keys[0]) or apart(later, cache.select(slots=range(9)), [0]) < 1e-5
