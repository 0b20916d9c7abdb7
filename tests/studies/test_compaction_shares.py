"""Shares of attention under several caches at once, against the patterns of each alone."""

import torch

from kvprobe.attention import attend
from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model
from kvprobe.studies.compaction.shares import attention_shares
from tests.random_caches import random_tokens
from tests.refusals import refused

TURN = random_tokens(2, {"T2": 5})


def test_shares_are_those_of_each_cache_alone_and_nothing_goes_to_what_is_hidden(tiny: Model):
    whole = tiny.prefill(random_tokens(1, {"system": 4, "T1": 7}))
    caches = [whole, whole.mask("T1")]
    together = KVCache.join(caches)
    places = [together.ledger.in_segments([name]) for name in ("system", "T1")]
    shares = attention_shares(tiny, together, TURN, places)
    for row, cache in enumerate(caches):
        alone = attend(tiny, onwards(cache, [TURN])[0], cache, queries="T2")
        expected = torch.stack([alone.mass(name).mean(-1) for name in ("system", "T1", "T2")], -1)
        torch.testing.assert_close(shares[row], expected, rtol=1e-4, atol=1e-5)
    assert (shares[1, ..., 1] == 0).all()
    refused(lambda: attention_shares(tiny, together, TURN, [places[0], places[0]]), "give each slot one place")
