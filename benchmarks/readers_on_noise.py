"""How often a reader of a certificate claims to read a secret that caches do not hold: they differ by noise alone.

    python benchmarks/readers_on_noise.py ridge transformer --runs 100

Each run plants noise in slots of a tiny model's restart, another for each of 64 secrets.
"""

import argparse

import numpy as np
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.forgetting import HiddenSecret
from kvprobe.forgetting.readers import known_readings
from kvprobe.forgetting.trace import Slots, trace_of
from kvprobe.forgetting.ways import WAYS, forgotten
from kvprobe.stats import binomial
from kvprobe.text.transcript import Transcript
from tests.models import llama, tiny_tokenizer

SECRETS = 64


def noisy(cache: KVCache, rng: torch.Generator) -> KVCache:
    """With noise in V of the last two slots of every layer."""
    values = [value.clone() for value in cache.values]
    for value in values:
        value[:, :, -2:] += torch.randn(value[:, :, -2:].shape, generator=rng)
    return cache.with_parts({"V": values})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("readers", nargs="+")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = llama(tokenizer=tiny_tokenizer(), intermediate_size=64)
    texts = [{"role": "user", "content": "The code is 481."}, {"role": "assistant", "content": "I see it."}]
    case = HiddenSecret(Transcript.from_messages(texts, names=["T1", "reply"]), ("T1",), "481")
    restart = forgotten(model, WAYS["restart in place"], case, "481")
    digits, bits, either = (dict.fromkeys(given.readers, 0) for _ in range(3))
    for run in range(given.seed, given.seed + given.runs):
        rng, noise = np.random.default_rng(run), torch.Generator().manual_seed(run)
        secrets = case.secrets(model.tokenizer, SECRETS, rng)
        caches = [noisy(restart, noise) for _ in secrets]
        slots = Slots.of(caches)
        readings = known_readings(
            model, caches, slots, trace_of(model, caches, [caches[0]], slots), secrets, given.readers, rng
        )
        for one in readings:
            digits[one.reader] += one.digits.above(one.chance)
            bits[one.reader] += one.bits.above()
            either[one.reader] += one.above_chance
    for reader in given.readers:
        shares = ", ".join(
            f"{name} {binomial(found[reader], given.runs)}"
            for name, found in (("digits", digits), ("bits", bits), ("either", either))
        )
        print(f"{reader}: {given.runs} runs, claims by {shares}")


if __name__ == "__main__":
    main()
