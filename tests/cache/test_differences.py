"""Where two caches differ, and by how much."""

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import FAMILIES, apart, changed_slots, relative_distance
from kvprobe.faults import Scope, Zeros
from kvprobe.inference.model import Model
from tests.random_caches import random_cache, random_tokens
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


def test_the_distance_of_a_segment_is_relative_to_the_references_size():
    reference = random_cache(0, batch=1)
    inside = reference.ledger.in_segments(["T1"])[0]
    keys = tuple(torch.where(inside[None, None, :, None], 1.5 * layer, layer) for layer in reference.keys)
    distance = relative_distance(reference.with_parts({"K": keys}), reference, ("system", "T1"))
    assert distance.shape == (len(FAMILIES), reference.n_layers, 2)
    assert distance[0, :, 1].tolist() == pytest.approx([0.5] * reference.n_layers)
    assert not distance[0, :, 0].any()
    assert not distance[1].any()


def test_keys_are_compared_at_equal_rotation_or_not_at_all():
    one, other = random_cache(0, batch=1), random_cache(0, batch=1, gaps=True)
    refused(lambda: relative_distance(one, other, ("T1",)), "same positions")
