"""Which prompts does a wrong cache move most? The table of faults from which the canary's prompts were chosen.

    python benchmarks/canary_prompts.py [--model smollm2-135m] [--texts 4]

Each kind of prompt is a list, read into a cache, and a question for each of its blocks. Bugs of the zoo are planted in
one block of one layer, and in one block of all layers. A kind of prompt sees a bug where an answer moves farther than a
benign difference moves one of any prompt of that kind: the cache computed with rounded products and stored in 8 bits,
the largest that was measured between engines. Prints the share of bugs that are seen, with its interval over bugs and
texts as if they were independent, the median distance as a multiple of the benign one, and the share by thirds of the
model's depth. `no question` is what any other prompt would show: the list goes on.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import pandas as pd

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.detection.clean_texts import as_by_another_engine
from kvprobe.detection.zoo import BLOCK, plant
from kvprobe.errors import UserError
from kvprobe.faults import Draws
from kvprobe.inference.model import Model
from kvprobe.progress import Bar
from kvprobe.shipped import shipped_entries
from kvprobe.stats import binomial
from kvprobe.studies.detection.caches import SIZES, context_of
from kvprobe.studies.detection.questions import QuestionedCaches

BUGS = ("lmcache-4463", "lmcache-4247", "sglang-22819", "vllm-49716", "vllm-51837", "vllm-45357", "llama-cpp-3825",
        "sglang-20705", "bit-flips", "channel-order", "atom-2154")  # fmt: skip
BLOCKS = 6
NOUNS = tuple(shipped_entries("tasks/recite")["words"])
NUMBERS = tuple(str(number) for number in range(100, 1000, 7))
KINDS: dict[str, tuple[Sequence[str], int]] = {
    "words, 8 of them asked": (NOUNS, 8),
    "words, 4": (NOUNS, 4),
    "words, 2": (NOUNS, 2),
    "words, 1": (NOUNS, 1),
    "numbers, 4": (NUMBERS, 4),
    "no question": (NOUNS, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=4)
    arguments = parser.parse_args()
    model = kv.load(arguments.model)
    rows: list[dict[str, object]] = []
    for name, (words, cue) in KINDS.items():
        for number in Bar(range(arguments.texts), desc=name, unit="text"):
            rows += measured(model, name, QuestionedCaches(model, BLOCKS * BLOCK, BLOCK, number, words, cue), number)
    report(pd.DataFrame(rows), model.geometry.n_layers)


def measured(model: Model, name: str, asked: QuestionedCaches, number: int) -> list[dict[str, object]]:
    """How far the answers of one list move, by bug and size."""
    rows: list[dict[str, object]] = []

    def add(bug: str, size: str, layer: int, cache: KVCache) -> None:
        rows.append({"kind": name, "bug": bug, "size": size, "layer": layer, "moved": max(asked.gaps(cache))})

    add("benign", "", -1, as_by_another_engine(model, [asked.tokens]))
    context = context_of(model, asked.tokens, asked.start, number)
    for place, bug in enumerate(BUGS):
        for size in ("spot", "block"):
            draws = Draws(0, number, place)  # of one place, whatever the kind of prompt
            try:
                planted = plant(bug, asked.start, context, draws=draws, **SIZES[size])
            except UserError as error:
                print(f"{bug}, {size}, is left out: {error}")
                continue
            add(bug, size, planted.layers[0], planted.cache)
    return rows


def report(table: pd.DataFrame, layers: int) -> None:
    for name in KINDS:
        of_kind = table[table["kind"] == name]
        moved = of_kind["moved"].to_numpy(float)
        size, bug, layer = (of_kind[column].to_numpy() for column in ("size", "bug", "layer"))
        noise = float(moved[bug == "benign"].max())
        print(f"{name}: benign up to {noise:.3g} nats")
        for one in ("spot", "block"):
            times = moved[size == one] / noise
            third = np.minimum(2, 3 * layer[size == one].astype(int) // layers)
            by_depth = ", ".join(
                f"{100 * float((times[third == part] > 1).mean()):.0f} %" for part in sorted(set(third.tolist()))
            )
            seen = binomial(int((times > 1).sum()), len(times))
            share = f"{100 * seen.mean:.0f} [{100 * seen.low:.0f}, {100 * seen.high:.0f}] %"
            print(
                f"  {one:6} seen {share} of {len(times)}, median {float(np.median(times)):.2g} times the benign one; "
                f"by depth {by_depth}"
            )
        by_bug = [(each, float(np.median(moved[(bug == each) & (size == "block")])) / noise) for each in BUGS]
        print("  by bug, median times: " + ", ".join(f"{each} {times:.2g}" for each, times in by_bug), flush=True)


if __name__ == "__main__":
    main()
