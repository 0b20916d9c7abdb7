"""How often `diff` calls a benign pair different, from pairs that are independent: each has a text of its own, and one
way to differ, drawn at random.

    python benchmarks/benign_pairs.py [--pairs smollm2-135m=120 …] [--longest 64] [--seed …] [--gone-on] --out PATH

Ways are portions, a batch, eager attention, numbers stored in 16 bits, all of it in bfloat16, bfloat16 against float32,
and llama.cpp (4-bit weights) in f32, f16 and q8_0 against transformers and against each other. `random` is a model with
random weights, which is read in float32 alone. `--gone-on` draws other ways: llama.cpp computed the first part of a
cache and transformers the second, or the other way round, against transformers. Pairs that are in the file already are
not computed again.
"""

import argparse
import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
import torch
from diff_kinds import random_model

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.cache.stored import AnyCache
from kvprobe.detection.clean_texts import clean_texts
from kvprobe.detection.diff import diff
from kvprobe.engines.llamacpp import to_slot
from kvprobe.engines.server import served
from kvprobe.inference.model import Model
from kvprobe.models.catalogue import gguf_of
from kvprobe.stats import binomial
from kvprobe.text.tokens import Tokens

SEED = 480_300
PAIRS = ("random=80", "smollm2-135m=130", "gemma3-270m=80", "qwen2.5-coder-0.5b=14")
TYPES = ("f32", "f16", "q8_0")
ACROSS = tuple(f"llama.cpp {one} / {other}" for one, other in (
    ("f32", "float32"), ("f16", "float32"), ("q8_0", "float32"), ("q8_0", "f16"), ("f16", "f32"), ("q8_0", "f32"),
))  # fmt: skip
GONE_ON = tuple(f"{first}, then {second}" for kind in TYPES for first, second in (
    (f"llama.cpp {kind}", "float32"), ("float32", f"llama.cpp {kind}"),
))  # fmt: skip
IN_FLOAT = {"portions": 6, "batch": 5, "eager": 6, "stored in bfloat16": 1, "stored in float16": 1}
IN_HALF = {"bfloat16 portions": 3, "bfloat16 batch": 3, "bfloat16 eager": 3, "bfloat16 / float32": 4}
Pair = tuple[AnyCache, AnyCache]


def read(model: Model, text: Tokens, other: Tokens, way: str, cut: float) -> KVCache:
    """The text as it is read in some way."""
    if way == "portions":
        first = max(1, int(cut * len(text)))
        return model.extend(model.prefill([text[:first]]), [text[first:]])[0]
    if way == "batch":
        batch = model.prefill([text, other]).rows([0])
        return batch.evict(slots=batch.ledger.padding)
    return model.prefill([text], lane="hooked" if way == "eager" else "plain")


def stored(cache: KVCache, dtype: torch.dtype) -> KVCache:
    return replace(cache, layers=tuple({part: one.to(dtype) for part, one in layer.items()} for layer in cache.layers))


def in_transformers(model: Model, text: Tokens, other: Tokens, way: str, cut: float) -> Pair:
    right = model.prefill([text])
    if way.startswith("stored in "):
        return stored(right, getattr(torch, way.removeprefix("stored in "))), right
    return read(model, text, other, way, cut), right


def in_half(full: Model, half: Model, text: Tokens, other: Tokens, way: str, cut: float) -> Pair:
    own = half.prefill([text])
    if way == "bfloat16 / float32":
        return own, full.prefill([text])
    return read(half, text, other, way.removeprefix("bfloat16 "), cut), own


def in_llama_cpp(name: str, model: Model, texts: Sequence[Tokens], ways: dict[int, str]) -> Iterator[tuple[int, Pair]]:
    """The pairs of these numbers; a server is started once for each type of its cache."""
    with TemporaryDirectory() as folder:
        gguf, longest = gguf_of(name, Path(folder)), max(len(texts[number]) for number in ways)
        slots: dict[tuple[int, str], Path] = {}
        for kind in TYPES:
            with served(gguf, cache=kind, context=longest + 8, flash=kind != "f32", threads=1) as server:
                for number, way in ways.items():
                    if kind in way.split():
                        server.complete([*texts[number].ids], reuse=False)
                        server.save(0, "run")
                        slots[number, kind] = Path(folder) / f"{kind}-{number}"
                        shutil.copy(server.path("run"), slots[number, kind])
        for number, way in ways.items():
            one, other = way.removeprefix("llama.cpp ").split(" / ")
            held = kv.open_cache(slots[number, one], model)
            right = model.prefill([texts[number]]) if other == "float32" else kv.open_cache(slots[number, other], model)
            yield number, (held, right)


def gone_on(
    name: str, model: Model, texts: Sequence[Tokens], ways: dict[int, str], cuts: Sequence[float]
) -> Iterator[tuple[int, Pair]]:
    """Pairs of which the first cache went on elsewhere than it began."""
    with TemporaryDirectory() as folder:
        gguf, longest = gguf_of(name, Path(folder)), max(len(texts[number]) for number in ways)
        for kind in TYPES:
            with served(gguf, cache=kind, context=longest + 8, flash=kind != "f32", threads=1) as server:
                for number, way in ways.items():
                    if kind not in way.replace(",", "").split():
                        continue
                    text, begins = texts[number], way.startswith("llama.cpp")
                    server.complete([*text[: max(2, int(cuts[number] * len(text)))].ids], reuse=False)
                    server.save(0, "run")
                    first = kv.open_cache(server.path("run"), model).cache()
                    if begins:
                        yield number, (model.extend(first, [text[first.slots :]])[0], model.prefill([text]))
                        continue
                    shutil.copy(server.path("run"), like := Path(folder) / "like")
                    to_slot(model.prefill([text[: first.slots]]), server.path("run"), like, model)
                    server.restore(0, "run")
                    server.complete([*text.ids])
                    server.save(0, "run")
                    whole = kv.open_cache(server.path("run"), model).cache()
                    yield number, (whole, model.prefill([text[: whole.slots]]))


def pairs_of(
    name: str, count: int, longest: int, seed: int, done: set[int], elsewhere: bool
) -> Iterator[tuple[int, str, Pair]]:
    model = random_model() if name == "random" else kv.load(name, dtype="float32")
    rng = np.random.default_rng([seed, crc32(name.encode())])
    texts = clean_texts(model, 2 * count, longest, rng)
    weights = IN_FLOAT if name == "random" else IN_FLOAT | IN_HALF | dict.fromkeys(ACROSS, 2)
    weights = dict.fromkeys(GONE_ON, 1) if elsewhere else weights
    shares = np.array([*weights.values()]) / sum(weights.values())
    ways = {number: str(way) for number, way in enumerate(rng.choice([*weights], count, p=shares))}
    cuts = rng.uniform(0.1, 0.9, count)
    left = {number: way for number, way in ways.items() if number not in done}
    for number, way in left.items():
        if way in IN_FLOAT:
            yield number, way, in_transformers(model, texts[number], texts[count + number], way, cuts[number])
    if any(way in IN_HALF for way in left.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            half = kv.load(name, dtype="bfloat16")
            for number, way in left.items():
                if way in IN_HALF:
                    yield number, way, in_half(model, half, texts[number], texts[count + number], way, cuts[number])
        del half
    if across := {number: way for number, way in left.items() if way in ACROSS}:
        for number, pair in in_llama_cpp(name, model, texts, across):
            yield number, across[number], pair
    if mixed := {number: way for number, way in left.items() if way in GONE_ON}:
        for number, pair in gone_on(name, model, texts, mixed, cuts.tolist()):
            yield number, mixed[number], pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="how many of each model")
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--gone-on", action="store_true", help="caches that went on elsewhere than they began")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    for name, count in (given.split("=") for given in arguments.pairs):
        done = {row["number"] for row in rows if (row["model"], row["seed"]) == (name, arguments.seed)}
        if len(done) >= int(count):
            continue
        for number, way, pair in pairs_of(name, int(count), arguments.longest, arguments.seed, done, arguments.gone_on):
            found = diff(*pair)
            row = {"model": name, "seed": arguments.seed, "number": number, "way": way, "slots": found.slots}
            row |= {"excess": float(found.excess.max()), "differs": found.differs, "verdict": found.verdict}
            rows.append(row)
            with arguments.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            if found.differs:
                print(name, number, way, found, flush=True)
    for axis in ("model", "way"):
        groups: dict[str, list[bool]] = defaultdict(list)
        for row in rows:
            groups[row[axis]].append(row["differs"])
        for group, called in [*groups.items(), ("all", [row["differs"] for row in rows])]:
            rate = binomial(sum(called), len(called))
            print(f"{axis} {group}: {sum(called)} of {len(called)} [{100 * rate.low:.1f}, {100 * rate.high:.1f} %]")


if __name__ == "__main__":
    main()
