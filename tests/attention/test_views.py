"""A segment that only some KV heads may see, and the order of heads by a measure."""

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.attention import in_view_of, logits_in_view, ranked_kv_heads
from kvprobe.attention.views import AT_ONCE
from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from tests.attention.test_patterns import PROMPT, onwards
from tests.refusals import refused


@pytest.fixture(scope="module")
def past(tiny_llama: Model) -> KVCache:
    return tiny_llama.prefill(PROMPT)


def test_a_segment_is_live_for_the_given_heads_alone(past: KVCache):
    ledger = in_view_of(past, ["T1"], [(1, 0), (2, 0), (2, 1)]).ledger
    live, hidden = ledger.live[:, 0], ledger.in_segments(["T1"])[0]
    assert live[..., hidden].all(-1).tolist() == [[False, False], [True, False], [True, True]]
    assert live[..., ~hidden].all()
    # What was masked before stays masked.
    assert not in_view_of(past.mask("T1"), ["T1"], [(1, 0)]).ledger.live[..., hidden].any()
    refused(lambda: in_view_of(past, ["T1"], [(3, 0)]), "layers 0 to 2")
    refused(lambda: in_view_of(past, ["T1"], [(0, 2)]), "no KV head 2")


def test_in_view_of_all_heads_or_of_none_is_the_whole_or_the_masked_cache(tiny_llama: Model, past: KVCache):
    every = [(layer, head) for layer in range(3) for head in range(2)]
    suffix = onwards(past)
    said = logits_in_view(tiny_llama, past, suffix, ["T1"], [every, *[every[:1]] * AT_ONCE, []])
    assert len(said) == AT_ONCE + 2
    for logits, cache in ((said[0], past), (said[-1], past.mask("T1"))):
        assert torch.allclose(logits, tiny_llama.extend(cache, suffix)[1][0, -1], atol=1e-4)
    assert not torch.allclose(said[0], said[-1], atol=1e-2)


def test_kv_heads_are_ranked_by_the_mean_of_their_query_heads():
    mass = np.zeros((3, 4))
    mass[2, 2] = 0.4  # one query head of KV head 1
    mass[1, :2] = 0.15  # both of KV head 0
    rows = [{"layer": layer, "head": head, "mass": mass[layer, head]} for layer, head in np.ndindex(mass.shape)]
    assert ranked_kv_heads(pd.DataFrame(rows), "mass", 2)[:2] == [(2, 1), (1, 0)]
