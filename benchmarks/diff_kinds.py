"""How often `diff` sees a planted difference, its layer and its kind, and how often it calls a benign pair different.

    python benchmarks/diff_kinds.py [--models smollm2-135m …] [--planted 100] [--texts 6] [--engine]

Each difference is planted in one block of 16 slots of one layer, at random (a bit flip in one number), on top of a
benign difference: none, read in portions, in a batch, or with eager attention. A stale block begins after its first
slot; else it is a foreign one. No limit was chosen by gemma3-270m. `random` is a model with random weights. Prints what
was missed, and the shares with their intervals. With `--seed` other texts are read. False alarms of independent pairs,
of two precisions and of two engines, are counted by `benchmarks/benign_pairs.py`.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.detection.clean_texts import clean_texts
from kvprobe.detection.diff import BLOCK, diff
from kvprobe.engines.server import served
from kvprobe.faults import (
    BitFlips,
    ChannelOrder,
    Draws,
    Fault,
    FaultContext,
    ForeignBlock,
    ForeignScales,
    Fp8Scale,
    Misread,
    NotANumber,
    OverlappingKV,
    Permuted,
    PositionShift,
    QuantisationNoise,
    Scaled,
    Scope,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.inference.model import Model
from kvprobe.models.catalogue import gguf_of
from kvprobe.stats import binomial
from kvprobe.text.tokens import Tokens

SEED, LEAST, LONGEST, CANDIDATES = 480_001, 100, 320, 40
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m", "random")
ORDERS = ("part slot head", "part head slot", "slot part head", "slot head part", "head part slot", "head slot part")
KINDS = (
    "zeroed",
    "not finite",
    "scale error",
    "scales of others",
    "quantisation",
    "foreign prefix",
    "stale",
    "repeated blocks",
    "permuted blocks",
    "position shift",
    "K and V swapped",
    "K and V interleaved",
    "channel order",
    "bit flip",
)
PARTS = ("k", "v", "kv")
TYPES = ("f32", "f16", "q8_0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--planted", type=int, default=100, help="differences for each model")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=SEED, help="of texts and differences")
    parser.add_argument("--engine", action="store_true", help="plant them in caches of llama.cpp")
    arguments = parser.parse_args()
    results: list[tuple[str, str, bool, bool, bool, float]] = []
    alarms: dict[str, list[bool]] = defaultdict(list)
    for name in arguments.models:
        model = random_model() if name == "random" else kv.load(name, dtype="float32")
        rng = np.random.default_rng([arguments.seed, MODELS.index(name)])
        candidates = max(CANDIDATES, 4 * arguments.texts)
        texts = [text for text in clean_texts(model, candidates, LONGEST, rng) if len(text) >= LEAST][: arguments.texts]
        references = [model.prefill(text) for text in texts]
        noisy = (
            of_llama_cpp(name, model, texts)
            if arguments.engine
            else [dict(benign(model, text, texts[place - 1])) for place, text in enumerate(texts)]
        )
        for place, right in enumerate(references):
            for kind, cache in noisy[place].items():
                found = diff(cache, right)
                alarms[kind].append(found.differs)
                if found.differs:
                    print(f"{name}: {kind} is called {found.verdict}", flush=True)
        for number in range(arguments.planted):
            kind, place = KINDS[number % len(KINDS)], number % len(texts)
            right = references[place]
            bases = [*([] if arguments.engine else [right]), *noisy[place].values()]
            base = bases[int(rng.integers(len(bases)))]
            context = FaultContext(base, {"distractor": references[place - 1]}, model.lanes.rotaries)
            layer, cache, fault = planted(kind, base, context, number, rng)
            found = diff(cache, right)
            expected = "scale error" if kind == "scales of others" else kind
            first = found.first.layer if found.first is not None else None
            results.append((name, kind, found.differs, first == layer, found.kind == expected, found.confidence))
            if not all(results[-1][2:5]):
                causes = [f"{cause.kind} in {cause.layers}: {cause.evidence} {cause.control}" for cause in found.causes]
                print(f"{name}: {fault} in layer {layer} is called {causes[:2]}", flush=True)
        report([result for result in results if result[0] == name], name)
        for kind, called in alarms.items():
            print(f"{name}: benign so far, {kind}: {sum(called)} of {len(called)}", flush=True)
    report(results, "all")
    for kind in KINDS:
        report([result for result in results if result[1] == kind], kind)
    for low, high in ((0.0, 0.5), (0.5, 0.9), (0.9, 1.01)):
        some = [result for result in results if low <= result[5] < high]
        print(f"confidence {low} to {min(1.0, high)}: {sum(one[4] for one in some)} of {len(some)} kinds right")
    for kind, called in [*alarms.items(), ("all", [one for some in alarms.values() for one in some])]:
        rate = binomial(sum(called), len(called))
        print(f"benign, {kind}: {sum(called)} of {len(called)} called different, at most {100 * rate.high:.1f} %")


def report(results: list[tuple[str, str, bool, bool, bool, float]], name: str) -> None:
    if not results:
        return
    words: list[str] = []
    for place, said in ((2, "seen"), (3, "layer right"), (4, "kind right")):
        rate = binomial(sum(bool(result[place]) for result in results), len(results))
        count = sum(bool(result[place]) for result in results)
        words.append(f"{said} {count} of {len(results)} [{100 * rate.low:.1f}, {100 * rate.high:.1f} %]")
    print(f"{name:22}{'; '.join(words)}", flush=True)


def random_model() -> Model:
    """Eight layers of random weights, large enough for a slot to feel what it sees."""
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return kv.load(transformers.LlamaForCausalLM(shape).eval())


def benign(model: Model, text: Tokens, other: Tokens) -> Iterator[tuple[str, KVCache]]:
    """The same text, read in other ways."""
    for share in (0.3, 0.6):
        first = int(share * len(text))
        yield f"portions, {share}", model.extend(model.prefill([text[:first]]), [text[first:]])[0]
    batch = model.prefill([text, other]).rows([0])
    yield "batch", batch.evict(slots=batch.ledger.padding)
    yield "eager", model.prefill([text], lane="hooked")


def of_llama_cpp(name: str, model: Model, texts: Sequence[Tokens]) -> list[dict[str, KVCache]]:
    """What llama.cpp computes of each text, by the type of its cache."""
    found: list[dict[str, KVCache]] = [{} for _ in texts]
    with TemporaryDirectory() as folder:
        gguf = gguf_of(name, Path(folder))
        for kind in TYPES:
            with served(gguf, cache=kind, context=LONGEST + 8, flash=kind != "f32", threads=1) as server:
                for text, caches in zip(texts, found, strict=True):
                    server.complete([*text.ids], reuse=False)
                    server.save(0, "run")
                    caches[f"llama.cpp {kind}"] = kv.open_cache(server.path("run"), model).cache()
    return found


def planted(
    kind: str, cache: KVCache, context: FaultContext, number: int, rng: np.random.Generator
) -> tuple[int, KVCache, Fault]:
    """A difference of a kind, somewhere; drawn again where it would change nothing."""
    for again in range(50):
        layer = int(rng.integers(cache.n_layers))
        block = int(rng.integers(cache.slots // BLOCK))
        slots = range(block * BLOCK, (block + 1) * BLOCK)
        scope = Scope(layers=(layer,), slots=slots, parts=PARTS[int(rng.integers(3))])
        fault = made(kind, scope, rng)
        damaged = fault.corrupt(cache, [Draws(number, again)], [context])
        pairs = zip(damaged.layers[layer].values(), cache.layers[layer].values(), strict=True)
        struck = torch.stack([(one != other)[0].any(-1).any(0) for one, other in pairs]).any(0)
        if bool(struck.any()) and not (kind == "stale" and bool(struck[block * BLOCK])):
            return layer, damaged, fault
    raise AssertionError(kind)


def made(kind: str, scope: Scope, rng: np.random.Generator) -> Fault:
    def one(*values: float) -> float:
        return float(rng.choice(values))

    both, keys = replace(scope, parts="kv"), replace(scope, parts="k")
    written, read = (str(order) for order in rng.choice(ORDERS, 2, replace=False))
    last = "k" if rng.integers(2) else "v"
    number = replace(scope, parts=last, unit="number", count=1)
    field = ("exponent", "sign", "mantissa")[int(rng.integers(3))]
    rounding: tuple[Fault, ...] = (
        QuantisationNoise(8, scope=scope),
        QuantisationNoise(3, scope=scope),
        QuantisationNoise(5, 64, scope=scope),
        Fp8Scale(1.0, scope=scope),
        Fp8Scale(1.0, "e5m2", scope=scope),
    )
    makers: dict[str, Fault] = {
        "zeroed": Zeros(scope=scope),
        "not finite": NotANumber(scope=scope),
        "scale error": Scaled(one(0.04, 0.6, 1.3, 1.9, 5.0, 30.0), scope=scope)
        if rng.integers(2)
        else Fp8Scale(one(0.3, 0.7, 1.4, 3.0, 16.0), scope=scope),
        "scales of others": ForeignScales(scope=both),
        "quantisation": rounding[int(rng.integers(len(rounding)))],
        "foreign prefix": ForeignBlock(scope=scope),
        "stale": StaleBlock(scope=both),
        "repeated blocks": WrongPointers("repeated", scope=both),
        "permuted blocks": Permuted(scope=scope),
        "position shift": PositionShift(int(one(1, -2, 5, -9, 23, 48, -130, 333, 1000)), scope=keys),
        "K and V swapped": OverlappingKV(last, scope=both),
        "K and V interleaved": Misread(written, read, scope=both),  # pyright: ignore[reportArgumentType]
        "channel order": ChannelOrder(scope=keys),
        "bit flip": BitFlips("bf16", field=field, scope=number),  # pyright: ignore[reportArgumentType]
    }
    return makers[kind]


if __name__ == "__main__":
    main()
