"""What decoding costs under a policy that acts after every token, compared with decoding without eviction.

A policy that never has anything to evict must first give the same tokens as unbounded decoding, and the memory held
must equal the ledger's count, byte for byte.

Policies that score slots read their scores beside the fused attention; SnapKV needs none after the prompt, so what it
leaves must decode as fast as any cache of as many slots (here it is the prompt of one token that is scored).

    python benchmarks/policies.py --repeats 9
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial

import torch
from timing import Row, compared, main

import kvprobe as kv
from kvprobe.inference.generate import Generation, generate
from kvprobe.policies import H2O, TOVA, Policy, Quantise, RandomEviction, SinkWindow, SlidingWindow, SnapKV
from kvprobe.text.tokens import Tokens


def measure(asked: Namespace) -> Iterator[Row]:
    length, new, budget = (256, 4, 64) if asked.quick else (2048, 16, 256)
    model = kv.load(asked.model)
    ids = torch.randint(5, 20_000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = model.prefill(Tokens.of(ids))

    def decode(policy: Policy | None) -> Generation:
        prompt = [Tokens.of([7], "question", length)]
        return generate(model.lanes, prompt, cache, max_new_tokens=new, stop=(), policy=policy)

    for name, idle, tight, most in (
        ("sliding window", SlidingWindow(2 * length), SlidingWindow(budget), 1),
        ("sinks and window, re-indexed", SinkWindow(4, 2 * length), SinkWindow(4, budget - 4), 1),
        ("random eviction", RandomEviction(2 * length, seed=0), RandomEviction(budget, seed=0), 1),
        ("SnapKV, which acts once", SnapKV(2 * length), SnapKV(budget), 1.3),
        ("H2O, scores at each token", H2O(2 * length), H2O(budget), None),
        ("TOVA, scores at each token", TOVA(2 * length), TOVA(budget), None),
        ("quantised, 4 bits (simulated)", Quantise(4, tail=2 * length), Quantise(4), None),
    ):
        assert decode(idle).tokens == decode(None).tokens, f"{name}: an idle policy changes what is decoded"
        for snapshot in decode(tight).trace:
            packed = not snapshot.ledger.uniform or snapshot.ledger.quantisation is not None
            assert packed or snapshot.nbytes == snapshot.footprint, (
                f"{name}: {snapshot.nbytes} bytes held, the ledger says {snapshot.footprint}"
            )
        what, beside = f"{new} tokens after {length}: {name}", "decoding without eviction"
        yield compared(what, beside, partial(decode, tight), partial(decode, None), asked.repeats, most=most)


if __name__ == "__main__":
    main(measure, __doc__)
