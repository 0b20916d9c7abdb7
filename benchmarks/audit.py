"""How often the audit calls clean caches suspicious, and which bugs of the zoo it sees.

    python benchmarks/audit.py [--model smollm2-135m] [--clean 60] [--texts 3]

Clean caches are of new texts of the kinds that were learnt: by the model itself, with K and V stored in bfloat16 and in
fp8, as another engine computes them, and read in portions; of a third of them as the model in bfloat16 reads them
(audited with it, and with the one in float32) and as llama.cpp saves them; and of longer texts. Bugs are planted as
large as they were reported and as one block of one layer; of each it is said how far the log-probability of one of the
five likeliest next tokens moves. Prints both tables.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.cache.stored import AnyCache
from kvprobe.detection.audit import audit
from kvprobe.detection.clean import CleanRecipe, clean_of
from kvprobe.detection.clean_texts import as_by_another_engine, clean_texts
from kvprobe.detection.zoo import ZOO, plant
from kvprobe.engines.server import served
from kvprobe.errors import UserError
from kvprobe.faults import Draws, FaultContext, Fp8Scale
from kvprobe.inference.model import Model
from kvprobe.models.catalogue import gguf_of
from kvprobe.progress import Bar
from kvprobe.stats import binomial
from kvprobe.text.tokens import Tokens

SEED, LEAST, FELT = 70_001, 128, 0.05
LONG = 700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clean", type=int, default=60)
    parser.add_argument("--texts", type=int, default=3)
    arguments = parser.parse_args()
    model = kv.load(arguments.model)
    clean_of(model)  # learnt before bars of other work are drawn
    longest = CleanRecipe().longest
    rng = np.random.default_rng(SEED)

    alarms: dict[str, list[bool]] = defaultdict(list)
    for text in Bar(clean_texts(model, arguments.clean, longest, rng), desc="Clean caches", unit="text"):
        for kind, cache in clean_caches(model, text):
            alarms[kind].append(audit(model, cache).suspicious)
    report(alarms)
    others: dict[str, list[bool]] = defaultdict(list)
    for kind, auditor, cache in of_others(model, clean_texts(model, arguments.clean // 3, longest, rng)):
        others[kind].append(audit(auditor, cache).suspicious)
    report(others)
    longer = long_texts(model, arguments.clean // 3, rng)
    report(
        {
            f"more than {LONG} tokens": [
                audit(model, model.prefill(text)).suspicious for text in Bar(longer, desc="Long caches", unit="text")
            ]
        }
    )

    many = clean_texts(model, 60 * arguments.texts, 320, rng)
    texts = [text for text in many if len(text) > LEAST and len(set(text.ids)) < 0.9 * len(text)][: arguments.texts]
    by_bug: dict[tuple[str, str], list[tuple[float, bool, bool]]] = defaultdict(list)
    for number in Bar(range(len(texts)), desc="Bugs", unit="text"):
        for name, size, cache, moved, layer in planted(model, texts, number):
            found = audit(model, cache)
            first = min((one for finding in found.findings for one in finding.layers), default=-1)
            by_bug[name, size].append((moved, found.suspicious, first == layer))
    for (name, size), results in by_bug.items():
        moves = ", ".join(f"{moved:.2g}" for moved, _, _ in results)
        seen, right = (sum(result[place] for result in results) for place in (1, 2))
        print(f"{name:22}{size:10}seen {seen} of {len(results)}, first layer right {right}; moved by {moves} nats")
    every = [result for results in by_bug.values() for result in results]
    for said, some in (
        ("more", [one for one in every if one[0] > FELT]),
        ("less", [one for one in every if one[0] <= FELT]),
    ):
        print(f"moved by {said} than {FELT} nats: seen {sum(one[1] for one in some)} of {len(some)}")


def report(alarms: Mapping[str, list[bool]]) -> None:
    for kind, found in alarms.items():
        rate = binomial(sum(found), len(found))
        print(f"{kind:24}{sum(found):3} of {len(found):3} [{100 * rate.low:.1f}, {100 * rate.high:.1f} %]", flush=True)


def clean_caches(model: Model, text: Tokens) -> Iterator[tuple[str, KVCache]]:
    cache = model.prefill(text)
    yield "by the model", cache
    rounded = tuple({name: part.bfloat16().float() for name, part in layer.items()} for layer in cache.layers)
    yield "stored in bfloat16", replace(cache, layers=rounded)
    yield "stored in fp8 (e4m3)", cache.corrupt(Fp8Scale(1.0))
    yield "stored in fp8 (e5m2)", cache.corrupt(Fp8Scale(1.0, "e5m2"))
    yield "as by another engine", as_by_another_engine(model, [text])
    third = max(1, len(text) // 3)
    yield "read in portions", model.extend(model.prefill(text[:third]), text[third:])[0]


def of_others(model: Model, texts: list[Tokens]) -> Iterator[tuple[str, Model, AnyCache]]:
    """Caches of the model in bfloat16, with who audits them, and slots that llama.cpp saved."""
    half = kv.load(model.name, dtype="bfloat16")
    for text in Bar(texts, desc="In bfloat16", unit="text"):
        cache = half.prefill(text)
        yield "of bfloat16, by it", half, cache
        yield "of bfloat16, by float32", model, cache
    with TemporaryDirectory() as folder:
        gguf = gguf_of(model.name, Path(folder))
        for stored in ("f16", "q8_0"):
            with served(gguf, cache=stored, context=max(map(len, texts)) + 8, threads=1) as server:
                for text in Bar(texts, desc=f"llama.cpp in {stored}", unit="text"):
                    server.complete([*text.ids], reuse=False)
                    server.save(0, "run")
                    yield f"llama.cpp's in {stored}", model, kv.open_cache(server.path("run"), model)


def long_texts(model: Model, count: int, rng: np.random.Generator) -> list[Tokens]:
    """Texts joined until they are long."""
    made: list[Tokens] = []
    for _ in range(count):
        ids: tuple[int, ...] = ()
        while len(ids) < LONG:
            ids += clean_texts(model, 1, 256, rng)[0].ids
        made.append(Tokens.of(ids))
    return made


def planted(model: Model, texts: list[Tokens], number: int) -> Iterator[tuple[str, str, KVCache, float, int]]:
    """Each bug in the cache of a text: how far it moves a log-probability, and the first layer that it strikes."""
    text, other = texts[number], model.prefill(texts[(number + 1) % len(texts)])
    cache = model.prefill(text[:-1])
    sound = next_token(model, cache, text.ids[-1])
    likely = sound.topk(5).indices
    context = FaultContext(cache, {"distractor": other}, model.lanes.rotaries)
    for name in ZOO:
        for size, extent in (("reported", {}), ("spot", {"blocks": 1, "layers": 1})):
            try:
                bug = plant(name, cache, context, draws=Draws(number, number), **extent)
            except UserError as error:
                print(f"{name}, {size}, is left out: {error}")
                continue
            finite = all(bool(tensor.isfinite().all()) for tensor in bug.cache.tensors)
            moved = (next_token(model, bug.cache, text.ids[-1])[likely] - sound[likely]).abs().max() if finite else 99.0
            yield name, size, bug.cache, float(moved), min(bug.layers, default=-1)


def next_token(model: Model, cache: KVCache, token: int) -> Tensor:
    """Log-probabilities after one more token."""
    with torch.no_grad():
        return model.extend(cache, Tokens.of([token], start=cache.slots), logits=1)[1][0, -1].double().log_softmax(-1)


if __name__ == "__main__":
    main()
