"""How cost grows with the prompt, with prompts, with conditions and with layers: kvprobe beside others.

Lengths go from 128 tokens to 8,192 (one pass of which is 4 TFLOP in a model of 135 M parameters); with `--quick` to
512. The slope is that of a line through the logarithms of both: 1 is proportional.

    python benchmarks/curves.py
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from timing import Row, alternated, assert_same, main

import kvprobe as kv
from kvprobe.faults import Gaussian, Scope
from kvprobe.patching import LogitDiff, patch_sweep
from kvprobe.text.tokens import Tokens

Run = Callable[[], object]


BARE, BRIDGE = "transformers, bare", "TransformerLens, TransformerBridge"


def measure(asked: Namespace) -> Iterator[Row]:
    model = kv.load(asked.model)
    lengths, counts = ((128, 512), (1, 4)) if asked.quick else ((128, 512, 2048, 8192), (1, 4, 16, 64))
    most = model.geometry.n_layers
    for grows, sizes, runs in (
        ("prompt, tokens", lengths, reading),
        ("prompts", counts, samples),
        ("conditions", counts, conditions),
        ("patched layers", sorted({1, (most + 3) // 4, most}), layers),
    ):
        for size in sizes:
            yield from points(grows, size, runs(model, size), asked.repeats)


def points(grows: str, size: int, runs: Mapping[str, Run], repeats: int) -> Iterator[Row]:
    """kvprobe beside each of the others, and by itself where there is no other."""
    (what, ours), *others = zip(runs, alternated([*runs.values()], repeats), strict=True)
    for beside, theirs in others:
        yield Row.of(what, beside, ours, theirs, grows=grows, size=size)
    if not others:
        yield Row(what, "", sum(ours) / len(ours), grows=grows, size=size)


def drawn(model: kv.Model, length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5, model.lanes.plain.config.vocab_size, (length,), generator=draw).tolist()


def reading(model: kv.Model, length: int) -> dict[str, Run]:
    """A prompt's cache, by kvprobe, by transformers, and by TransformerLens."""
    ids = drawn(model, length)
    tensor, bridge = torch.tensor([ids]), model.lanes.hooked.bridge

    def bare() -> Any:
        with torch.no_grad():
            return model.lanes.plain(tensor, use_cache=True, logits_to_keep=1).past_key_values

    def hooked() -> object:
        with torch.no_grad():
            return bridge(tensor, use_cache=True, logits_to_keep=1)

    ours, theirs = model.prefill(ids), bare()
    assert_same(ours.layers[-1]["V"], theirs.layers[-1].values)
    return {"read a prompt": lambda: model.prefill(ids), BARE: bare, BRIDGE: hooked}


def samples(model: kv.Model, count: int) -> dict[str, Run]:
    """Prompts of 64 tokens, as rows of one batch, and one by one."""
    prompts = [Tokens.of(drawn(model, 64, seed)) for seed in range(count)]

    def one_by_one() -> list[Any]:
        with torch.no_grad():
            return [model.lanes.plain(torch.tensor([prompt.ids]), logits_to_keep=1) for prompt in prompts]

    def together() -> torch.Tensor:
        return model.extend(None, prompts)[1]

    alone = torch.cat([answer.logits for answer in one_by_one()])
    assert_same(together(), alone)
    return {"read prompts": together, f"{BARE}, one by one": one_by_one}


def conditions(model: kv.Model, count: int) -> dict[str, Run]:
    """A prompt of 64 tokens under so many faults, as rows of one batch and one by one."""
    ids = Tokens.of(drawn(model, 64))
    faults = [Gaussian("channel", scope=Scope(rate=(number + 1) / (2 * count))) for number in range(count)]

    def swept(chosen: list[Gaussian]) -> object:
        return model.sweep(ids, chosen, max_new_tokens=2, stop=(), follow=False)

    return {"sweep faults": lambda: swept(faults), "kvprobe, one by one": lambda: [swept([one]) for one in faults]}


def layers(model: kv.Model, count: int) -> dict[str, Run]:
    """Four slots of a prompt of 64 tokens patched in each of the last layers."""
    base, donor = (model.prefill(drawn(model, 64, seed)) for seed in (0, 1))
    grid = {"layer": range(model.geometry.n_layers - count, model.geometry.n_layers), "slot": range(20, 24)}
    suffix, metric = Tokens.of([7, 8, 9], "suffix", 64), LogitDiff(6, 7)
    return {"patch slots": lambda: patch_sweep(model, base, donor, suffix, metric, grid, progress=False)}


if __name__ == "__main__":
    main(measure, __doc__, repeats=3, quick=1)
