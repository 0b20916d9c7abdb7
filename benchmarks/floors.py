"""Measures how far the caches of one text lie apart when they are computed in different ways, and writes the table
that `kvprobe.cache.floors` reads.

    python -m benchmarks.floors measure smollm2-135m --texts 200 --out floors/
    python -m benchmarks.floors measure smollm2-135m --texts 200 --out floors/ --engine llamacpp
    python -m benchmarks.floors measure smollm2-135m --texts 120 --out floors/ --engine vllm
    python -m benchmarks.floors states --texts 40 --out floors/
    python -m benchmarks.floors write floors/
    python -m benchmarks.floors check floors/

`measure` takes the relative distance of each vector, ‖a - b‖ / ‖b‖, of every layer, head and slot, of K and of V, and
keeps them all. `write` makes the table, of the models that it learns from together and of each that has texts
enough; `check` counts false alarms on texts that were left out, by the floor of all models and by that of their own,
and on the model that was held out. vLLM runs in the environment that `make engines` makes.
"""

import argparse
import copy
import json
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import asdict
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch
from transformers import DynamicCache

import kvprobe as kv
from benchmarks.vllm_dumps import WAYS
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import vectors_apart
from kvprobe.cache.floors import FILE, RATE, TOGETHER, MeasuredPair, Place, counted, distances_of_rows, fitted
from kvprobe.cache.layer import Layer
from kvprobe.detection.clean_texts import SHORTEST, clean_texts
from kvprobe.engines.llamacpp import from_slot
from kvprobe.engines.server import LlamaServer, served
from kvprobe.inference.model import Model
from kvprobe.models.catalogue import gguf_of
from kvprobe.models.loading import resolve_folder
from kvprobe.stats import binomial
from kvprobe.text.tokens import Tokens

CHUNK, DECODED, ROWS = 16, 2, 4
"""Tokens of a chunk, of the end that is read one at a time, and rows of a batch."""
CACHES = ("f32", "f16", "q8_0", "q4_0")
DTYPES = ("float32", "bfloat16")
VLLM, OTHER_WAYS = Path(".venv-engines/bin/python"), [way for way in WAYS if way != "whole"]
RECURRENT = {
    "qwen3_next": "delta rule",
    "kimi_linear": "delta rule",
    "bamba": "Mamba-2",
    "granitemoehybrid": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "lfm2": "convolution",
}
LEARNT, HELD_OUT, FOLDS = ("smollm2-135m", "qwen2.5-coder-0.5b"), "gemma3-270m", 5
LEAST = 30
"""Texts by which a model gets a floor of its own."""
PAIRS: dict[str, tuple[str, ...]] = {
    "float32 / float32": ("float32 eager", "float32 batched", "float32 portions"),
    "bfloat16 / bfloat16": ("bfloat16 eager", "bfloat16 portions"),
    "bfloat16 / float32": ("bfloat16",),
    "float16 / float32": ("float16",),
    **{f"llama.cpp {kind} / float32": (f"llama.cpp {kind}",) for kind in CACHES},
    **{f"llama.cpp {kind} / llama.cpp {kind}": (f"llama.cpp {kind} portions",) for kind in CACHES},
    "vLLM float32 / float32": ("vLLM float32",),
    "vLLM bfloat16 / float32": ("vLLM bfloat16",),
    "vLLM bfloat16 / bfloat16": ("vLLM bfloat16 to bfloat16",),
    **{f"vLLM {dtype} / vLLM {dtype}": tuple(f"vLLM {dtype} {way}" for way in OTHER_WAYS) for dtype in DTYPES},
    **{
        f"float32 / float32, {kept}": (f"float32 {kept} portions", f"float32 {kept} batched")
        for kept in ("delta rule", "Mamba-2", "convolution")
    },
}
"""What is measured of each pair; of several ways the largest distance of each vector counts. States are measured in
float32 alone: in bfloat16 tiny models give the same bits of most texts."""
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def read(bare: Any, runs: list[list[int]], cuts: tuple[int, ...] = ()) -> list[Layers]:
    """K and V of each layer, `[1, heads, slots, d]`, of runs that are read as rows of one batch, in portions."""
    longest = max(map(len, runs))
    ids = torch.tensor([[*run, *[0] * (longest - len(run))] for run in runs])
    mask = torch.tensor([[1] * len(run) + [0] * (longest - len(run)) for run in runs]) if len(runs) > 1 else None
    past = DynamicCache()
    ends = [0, *cuts, longest]
    with torch.no_grad():
        for begin, end in pairwise(ends):
            bare(ids[:, begin:end], past_key_values=past, attention_mask=mask, logits_to_keep=1)
    return [
        [
            (layer.keys[row : row + 1, :, : len(run)], layer.values[row : row + 1, :, : len(run)])
            for layer in past.layers
        ]
        for row, run in enumerate(runs)
    ]


def in_dtype(bare: Any, name: str) -> Any:
    """A copy with weights in this dtype, as transformers loads it: frequencies of rotation stay in float32, which
    `bare.to(dtype)` would round, so that keys were off by more the later they stand."""
    other = copy.deepcopy(bare)
    for weights in other.parameters():
        weights.data = weights.data.to(getattr(torch, name))
    return other


def as_layers(layers: Layers) -> list[Layer]:
    return [{"K": keys, "V": values} for keys, values in layers]


def distances(ours: Layers, theirs: Layers) -> np.ndarray:
    return distances_of_rows(as_layers(ours), as_layers(theirs))


def portions(length: int) -> tuple[int, ...]:
    last = max(1, length - DECODED)
    return (*range(CHUNK, last, CHUNK), *range(last, length))


def in_transformers(
    model: Model, texts: list[Tokens], half: list[str], done: Collection[int]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Distances of ways to compute, for each text: `float32 eager` and so on to float32 as it is, `bfloat16` to
    float32, and `bfloat16 eager` and so on to bfloat16. Texts that were measured before are left out."""
    bare: Any = model.lanes.plain
    eager = copy.deepcopy(bare)
    eager.set_attn_implementation("eager")
    in_half = {name: in_dtype(bare, name) for name in half}
    eager_half = {name: in_dtype(bare, name) for name in half}
    for other in eager_half.values():
        other.set_attn_implementation("eager")
    for start in range(0, len(texts), ROWS):
        numbers = range(start, min(start + ROWS, len(texts)))
        if set(numbers) <= set(done):
            continue
        runs = [[*texts[number].ids] for number in numbers]
        batched = read(bare, runs)
        for row, (number, run) in enumerate(zip(numbers, runs, strict=True)):
            (true,) = read(bare, [run])
            found = {
                "float32 eager": distances(read(eager, [run])[0], true),
                "float32 batched": distances(batched[row], true),
            }
            found["float32 portions"] = distances(read(bare, [run], portions(len(run)))[0], true)
            if number % 8 == 0:
                torch.set_num_threads(2)
                found["float32 threads"] = distances(read(bare, [run])[0], true)
                torch.set_num_threads(1)
            for name, other in in_half.items():
                (own,) = read(other, [run])
                found[name] = distances(own, true)
                if name == "bfloat16":
                    found[f"{name} eager"] = distances(read(eager_half[name], [run])[0], own)
                    found[f"{name} portions"] = distances(read(other, [run], portions(len(run)))[0], own)
            yield number, found


def state_of(layer: Any, kept: str) -> torch.Tensor:
    """What a recurrent layer of transformers keeps, as rows of heads."""
    return layer.conv_states[0][:1].transpose(1, 2) if kept == "convolution" else layer.recurrent_states[0][0]


def in_states(kind: str, texts: int, longest: int, seed: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Distances of the states of a tiny model with random weights that read a text in portions or in a batch to those
    where it read the text at once, which are what kvprobe folds of the writes, bit for bit (in float32)."""
    from tests.models.every import VOCABULARY, tiny, tiny_config

    rule = RECURRENT[kind]
    # Twice the layers, so that some states follow attention, as in a trained model.
    config = tiny_config(kind)
    names = [name for name in ("layer_types", "mlp_layer_types") if rule == "delta rule" and hasattr(config, name)]
    deep = {name: 2 * list(getattr(config, name)) for name in names}
    plain: Any = tiny(kind, **deep, **({"num_hidden_layers": 8} if deep else {}))
    rng = np.random.default_rng(seed)
    for number in range(texts):
        length = round(float(np.exp(rng.uniform(np.log(SHORTEST), np.log(longest)))))
        runs = torch.tensor(rng.integers(2, VOCABULARY, (ROWS, length)))

        def read_in(rows: torch.Tensor, cuts: tuple[int, ...], length: int = length) -> DynamicCache:
            past = DynamicCache(config=plain.config)
            with torch.no_grad():
                for begin, end in pairwise([0, *cuts, length]):
                    # Bamba would count positions by its first layer, which has no slots.
                    plain(rows[:, begin:end], past_key_values=past, position_ids=torch.arange(begin, end)[None])
            return past

        right = read_in(runs[:1], ())
        ways = {"portions": read_in(runs[:1], portions(length)), "batched": read_in(runs, ())}
        found: dict[str, np.ndarray] = {}
        layers = [number for number, layer in enumerate(right.layers) if hasattr(layer, "conv_states")]
        for (way, past), kept in product(ways.items(), {rule, "convolution"}):
            pairs = [[state_of(one.layers[layer], kept) for one in (past, right)] for layer in layers]
            off = [vectors_apart(*pair) for pair in pairs]
            found[f"float32 {kept} {way}"] = torch.stack(off)[:, None].float().numpy()
        yield number, found


def in_llama_cpp(model: Model, texts: list[Tokens], name: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Distances of llama.cpp's caches of each type to float32 in transformers, and to themselves where the first half
    of the text was read before."""

    with TemporaryDirectory() as folder:
        gguf = gguf_of(name, Path(folder))
        for kind in CACHES:
            with served(gguf, cache=kind, context=max(map(len, texts)) + 8, flash=kind != "f32", threads=1) as server:

                def cache_of(run: list[int], ends: tuple[int, ...] = (), server: LlamaServer = server) -> KVCache:
                    for number, end in enumerate((*ends, len(run))):
                        server.complete(run[:end], reuse=number > 0)
                    server.save(0, "run")
                    return from_slot(server.path("run"), model)

                for number, text in enumerate(texts):
                    run = [*text.ids]
                    own, (true,) = cache_of(run), read(model.lanes.plain, [run])
                    again = cache_of(run, (len(run) // 2, *range(len(run) - DECODED, len(run))))
                    yield (
                        number,
                        {
                            f"llama.cpp {kind}": distances_of_rows(own.layers, as_layers(true)),
                            f"llama.cpp {kind} portions": distances_of_rows(again.layers, own.layers),
                        },
                    )


def in_vllm(
    model: Model, texts: list[Tokens], others: int, weights: Path, dumps: Path
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Distances of vLLM's caches in each dtype to float32 in transformers and to the same dtype there, and to
    themselves where the text was read otherwise: of the first texts alone, where `others` are fewer. Dumps that are
    there are not made again."""
    dumps.mkdir(parents=True, exist_ok=True)
    runs = [[*text.ids] for text in texts]
    for dtype, way in product(DTYPES, WAYS):
        (out := dumps / f"{dtype}-{way}").mkdir(exist_ok=True)
        wanted = runs if way == "whole" else runs[:others]
        if len([*out.glob("*.json")]) < len(wanted):
            (listed := dumps / "texts.json").write_text(json.dumps(wanted), encoding="utf-8")
            how = ["--dtype", dtype, "--way", way, "--out", out]
            subprocess.run([VLLM, "-m", "benchmarks.vllm_dumps", weights, listed, *how], check=True)
    bare: Any = model.lanes.plain
    plain = {dtype: in_dtype(bare, dtype) for dtype in DTYPES}
    for number, run in enumerate(runs):
        found: dict[str, np.ndarray] = {}
        true = {dtype: as_layers(read(plain[dtype], [run])[0]) for dtype in DTYPES}
        for dtype in DTYPES:
            caches = {
                way: kv.open_cache(dumps / f"{dtype}-{way}" / f"{number:03}.json").cache()
                for way in (WAYS if number < others else ("whole",))
            }
            whole = caches.pop("whole").layers
            found[f"vLLM {dtype}"] = distances_of_rows(whole, true["float32"])
            if dtype != "float32":
                found[f"vLLM {dtype} to {dtype}"] = distances_of_rows(whole, true[dtype])
            for way, other in caches.items():
                found[f"vLLM {dtype} {way}"] = distances_of_rows(other.layers, whole)
        yield number, found


def measure(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = kv.load(arguments.model)
    texts = clean_texts(model, arguments.texts, arguments.longest, np.random.default_rng(arguments.seed))
    out = arguments.out / arguments.model
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model.lanes.maker.config), encoding="utf-8")
    done = {int(path.stem.rsplit("-", 1)[1]) for path in out.glob(f"float32 eager {arguments.seed}-*.npy")}
    if arguments.engine == "vllm":
        dumps = arguments.out / "dumps" / f"{arguments.model}-{arguments.seed}"
        ways = in_vllm(model, texts, arguments.others, resolve_folder(arguments.model), dumps)
    elif arguments.engine == "llamacpp":
        ways = in_llama_cpp(model, texts, arguments.model)
    else:
        ways = in_transformers(model, texts, arguments.half, done)
    for number, found in ways:
        for way, off in found.items():
            np.save(out / f"{way} {arguments.seed}-{number:03}.npy", off.astype(np.float32))
        print(number, len(texts[number]), {way: f"{off.max():.1e}" for way, off in found.items()}, flush=True)


def states(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for kind in RECURRENT:
        out = arguments.out / f"random {kind}"
        out.mkdir(parents=True, exist_ok=True)
        if [*out.glob(f"float32 * {arguments.seed}-{arguments.texts - 1:03}.npy")]:
            continue  # measured before
        most: dict[str, float] = {}
        for number, found in in_states(kind, arguments.texts, arguments.longest, arguments.seed):
            for way, off in found.items():
                np.save(out / f"{way} {arguments.seed}-{number:03}.npy", off)
                most[way] = max(most.get(way, 0.0), float(off.max()))
        print(kind, {way: f"{off:.1e}" for way, off in most.items()}, flush=True)


def texts_of(folder: Path, model: str, ways: tuple[str, ...]) -> list[np.ndarray]:
    """The distances of each text; of several ways the largest."""
    of_ways = [
        {path.stem.rsplit(" ", 1)[1]: path for path in (folder / model).glob(f"{way} [0-9]*-*.npy")} for way in ways
    ]
    common = sorted(set.intersection(*map(set, of_ways)))
    return [np.max([np.load(paths[text]) for paths in of_ways], 0).astype(float) for text in common]


def learnt(folder: Path, ways: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    texts = {model: texts_of(folder, model, ways) for model in (*LEARNT, *(f"random {kind}" for kind in RECURRENT))}
    return {model: found for model, found in texts.items() if found}


def write(arguments: argparse.Namespace) -> None:
    """The table, with what was measured in this folder in place of what it held of these pairs."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    fits: dict[str, MeasuredPair] = {}
    for pair, ways in PAIRS.items():
        found = learnt(arguments.folder, ways)
        # Of pairs that were equal bit for bit nothing is known of how they differ.
        if not any(off.any() for texts in found.values() for off in texts):
            continue
        fits[pair] = fitted(found)
        known[TOGETHER][pair] = asdict(fits[pair])
        for model in (name for name in LEARNT if name in found):
            if len(found[model]) >= LEAST and any(off.any() for off in found[model]):
                fits[f"{pair}, {model}"] = own = fitted({model: found[model]})
                config = json.loads((arguments.folder / model / "config.json").read_text(encoding="utf-8"))
                known["models"].setdefault(config, {})[pair] = asdict(own)
    FILE.write_text(json.dumps(known) + "\n", encoding="utf-8")
    print(f"{len(fits)} floors, {FILE.stat().st_size / 1e3:.1f} kB\n")
    print("| pair | texts | usual | vectors | layers | outliers | blocks |\n|---|---|---|---|---|---|---|")
    for pair, of in fits.items():
        usual = of.at("state" if "state" in of.usual else "V", 0.5)
        cells = [pair, str(of.tails["vector"].caches), f"{usual:.1e}"]
        for place in get_args(Place):
            if not of.tails[place].worst:
                cells.append("")
                continue
            slots, tail = counted(place, 100), of.tails[place]
            low, high = (usual * end for end in tail.interval(slots, RATE))
            cells.append(f"{usual * tail.limit(slots, RATE):.1e} [{low:.1e}, {high if high < np.inf else '?'}]")
        print(f"| {' | '.join(cells)} |")


def check(arguments: argparse.Namespace) -> None:
    """False alarms: of texts of the same models in five folds, and of the model that was held out."""
    for pair, ways in PAIRS.items():
        found = learnt(arguments.folder, ways)
        if not found:
            continue
        tested: dict[str, list[tuple[MeasuredPair, np.ndarray]]] = {"new texts": [], "of its own": [], HELD_OUT: []}
        for fold in range(FOLDS):
            rest = {model: [one for n, one in enumerate(texts) if n % FOLDS != fold] for model, texts in found.items()}
            part = fitted(rest)
            tested["new texts"] += [(part, one) for texts in found.values() for one in texts[fold::FOLDS]]
            for model in (name for name in LEARNT if name in found):
                own = fitted({model: rest[model]})
                tested["of its own"] += [(own, one) for one in found[model][fold::FOLDS]]
        whole = fitted(found)
        tested[HELD_OUT] = [(whole, one) for one in texts_of(arguments.folder, HELD_OUT, ways)]
        for what, cases in tested.items():
            scores = [(of, off.shape[-1], of.scores(off)) for of, off in cases]
            for place in get_args(Place) if cases else ():
                if not any(place in found for _, _, found in scores):
                    continue
                shares = []
                for rate in (0.01, 0.05, 0.1):
                    beyond = [
                        found[place] > of.tails[place].limit(counted(place, slots), rate)
                        for of, slots, found in scores
                        if place in found
                    ]
                    shares.append(f"{binomial(sum(beyond), len(beyond))} of {len(beyond)}")
                print(pair, what, place, *shares, sep=" | ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.add_argument("model")
    one.add_argument("--texts", type=int, default=200)
    one.add_argument("--longest", type=int, default=128)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--half", nargs="*", default=["bfloat16", "float16"])
    one.add_argument("--engine", choices=["transformers", "llamacpp", "vllm"], default="transformers")
    one.add_argument("--others", type=int, default=200, help="texts that vLLM also reads in portions and otherwise")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=measure)
    two = commands.add_parser("states")
    two.add_argument("--texts", type=int, default=40)
    two.add_argument("--longest", type=int, default=128)
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--out", type=Path, required=True)
    two.set_defaults(run=states)
    for run in (write, check):
        other = commands.add_parser(run.__name__)
        other.add_argument("folder", type=Path)
        other.set_defaults(run=run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
