"""What decoding costs under a policy that acts after every token, compared with decoding without eviction.

A policy that never has anything to evict must first give the same tokens as unbounded decoding, and the memory held
must equal the ledger's count, byte for byte.

Policies that score slots read their scores beside the fused attention; SnapKV needs none after the prompt, so what it
leaves must decode as fast as any cache of as many slots (here it is the prompt of one token that is scored).

    make benchmark          or          python benchmarks/policies.py --repeats 7
"""

import torch
from timing import asked, header, paired, report

import kvprobe as kv
from kvprobe.inference.generate import Generation, generate
from kvprobe.policies import H2O, TOVA, Policy, Quantise, RandomEviction, SinkWindow, SlidingWindow, SnapKV
from kvprobe.text.tokens import Tokens

LENGTH, NEW_TOKENS, BUDGET = 2048, 16, 256


def main() -> None:
    arguments = asked(__doc__, 7)
    model = kv.load(arguments.model)
    ids = torch.randint(5, 20_000, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = model.prefill(Tokens.of(ids))
    header(model.name, LENGTH, arguments.repeats)

    def decode(policy: Policy | None) -> Generation:
        prompt = [Tokens.of([7], "question", LENGTH)]
        return generate(model.lanes, prompt, cache, max_new_tokens=NEW_TOKENS, stop=(), policy=policy)

    for name, idle, tight, limit in (
        ("sliding window", SlidingWindow(2 * LENGTH), SlidingWindow(BUDGET), "1.00"),
        ("sinks and window, re-indexed", SinkWindow(4, 2 * LENGTH), SinkWindow(4, BUDGET - 4), "1.00"),
        ("random eviction", RandomEviction(2 * LENGTH, seed=0), RandomEviction(BUDGET, seed=0), "1.00"),
        ("SnapKV, which acts once", SnapKV(2 * LENGTH), SnapKV(BUDGET), "1.30"),
        ("H2O, scores at each token", H2O(2 * LENGTH), H2O(BUDGET), ""),
        ("TOVA, scores at each token", TOVA(2 * LENGTH), TOVA(BUDGET), ""),
        ("quantised, 4 bits (simulated)", Quantise(4, tail=2 * LENGTH), Quantise(4), ""),
    ):
        assert decode(idle).tokens == decode(None).tokens, f"{name}: an idle policy changes what is decoded"
        for snapshot in decode(tight).trace:
            packed = not snapshot.ledger.uniform or snapshot.ledger.quantisation is not None
            assert packed or snapshot.nbytes == snapshot.footprint, (
                f"{name}: {snapshot.nbytes} bytes held, the ledger says {snapshot.footprint}"
            )
        ours, theirs, ratio = paired(lambda tight=tight: decode(tight), lambda: decode(None), arguments.repeats)
        report(f"decode {NEW_TOKENS} tokens: {name}", ours, theirs, ratio, limit)


if __name__ == "__main__":
    main()
