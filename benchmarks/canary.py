"""A canary against llama.cpp or vLLM, sound and with faults planted in a saved cache; `blocks-swapped` is a control.

    python benchmarks/canary.py [FAULT …]
    python benchmarks/canary.py --vllm http://127.0.0.1:8000 FOLDER [FAULT …]
    python benchmarks/canary.py --sound 6 [--seed 0]

With `--vllm`, a server that runs with kvprobe's connector, whose dumps lie in FOLDER (docs/guides/engines.md).

With `--sound`, so many servers in which nothing is wrong, started anew with other words, numbers of threads, portions
in which prompts are read, kinds of attention and types of cache in turn: how often is a sound engine said to fail?

The cache is edited between `save` and `restore`. Prints a line for each fault: the properties that failed, how far the
answers after a restored slot moved, and the seconds that it took.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.detection.canary import canary, llama_server, vllm_endpoint
from kvprobe.engines.plain import open_plain, save_plain
from kvprobe.engines.server import LlamaServer, served
from kvprobe.engines.slot import read_slot, stored, write_slot
from kvprobe.errors import UserError
from kvprobe.faults import Scope, Zeros
from kvprobe.models.catalogue import gguf_of
from kvprobe.stats import binomial

BLOCK, LAYER = 16, 15


def zeroed(cache: KVCache) -> KVCache:
    """One layer of 0."""
    return cache.corrupt(Zeros(scope=Scope(layers=[LAYER])))


def moved(*parts: str, order: Callable[[int], list[int]]) -> Callable[[KVCache], KVCache]:
    """These parts of all layers hold other slots."""

    def damage(cache: KVCache) -> KVCache:
        slots = order(cache.slots)

        def other(tensor: Tensor) -> Tensor:
            return tensor[:, :, slots]

        return cache.with_parts({part: [*map(other, cache.part(part))] for part in parts})

    return damage


def swapped(slots: int) -> list[int]:
    """Two blocks are exchanged."""
    return [*range(BLOCK, 2 * BLOCK), *range(BLOCK), *range(2 * BLOCK, slots)]


def repeated(slots: int) -> list[int]:
    """The second block stands in place of the first, too."""
    return [*range(BLOCK, 2 * BLOCK), *range(BLOCK, slots)]


FAULTS: dict[str, Callable[[KVCache], KVCache]] = {
    "none": lambda cache: cache,
    "zeroed-layer": zeroed,
    "repeated-block": moved("K", "V", order=repeated),
    "keys-swapped": moved("K", order=swapped),
    # Attention is a sum over slots, and a key carries its position: nothing changes.
    "blocks-swapped": moved("K", "V", order=swapped),
}


@dataclass(frozen=True)
class Planted(LlamaServer):
    """A server whose saved slots are damaged before they are restored."""

    damage: Callable[[KVCache], KVCache] = FAULTS["none"]

    def restore(self, slot: int, name: str) -> int:
        path = self.path(name)
        like = read_slot(path)
        write_slot(path, self.damage(stored(like).cache()), like)
        return super().restore(slot, name)


def planted_vllm(url: str, folder: Path, damage: Callable[[KVCache], KVCache]) -> Any:
    """A server whose dumps are damaged before they are loaded."""
    target: Any = vllm_endpoint(url)
    save = target.save

    def damaging(prompt: Any) -> None:
        save(prompt)
        (path,) = folder.glob("*.json")
        save_plain(damage(open_plain(path).cache()), path)

    target.save = damaging
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--vllm", nargs=2, metavar=("URL", "FOLDER"), help="a vLLM with the connector, and its dumps")
    parser.add_argument("--sound", type=int, default=0, help="servers in which nothing is wrong")
    parser.add_argument("--seed", type=int, default=0, help="of the first one's words; the next takes the next")
    arguments = parser.parse_args()
    if arguments.sound:
        sound(arguments.sound, arguments.seed)
    elif arguments.vllm:
        url, folder = arguments.vllm
        for name in arguments.faults or FAULTS:
            report(name, planted_vllm(url, Path(folder), FAULTS[name]))
    else:
        faulty(arguments.faults)


WAYS: tuple[dict[str, Any], ...] = (
    {"threads": 1},
    {"threads": 2},
    {"threads": 1, "portion": 64},
    {"threads": 2, "flash": False},
    {"threads": 1, "cache": "q8_0"},
    {"threads": 2, "portion": 32, "cache": "f32"},
)
"""How sound servers are started."""


def sound(count: int, first: int) -> None:
    """Servers in which nothing is wrong."""
    failed: list[bool] = []
    with TemporaryDirectory() as folder:
        gguf = gguf_of("smollm2-135m", Path(folder))
        for seed in range(first, first + count):
            way = WAYS[seed % len(WAYS)]
            with served(gguf, slots=4, **way) as server:
                try:
                    found = canary(llama_server(server), seed=seed)
                except UserError as error:
                    print(f"seed {seed}, {way}: refused: {error}", flush=True)
                    continue
            failed.append(bool(found.failed))
            once = [one.name for one in found.findings if one.state == "not repeated"]
            worst = max(one.worst for one in found.findings)
            print(
                f"seed {seed}, {way}: failed: {', '.join(found.failed) or 'nothing'}; "
                f"beyond it once: {', '.join(once) or 'nothing'}; worst {worst:.3g} nats, "
                f"threshold {found.threshold:.3g} (long {found.long_threshold:.3g}), power {found.power:.0%}, "
                f"{found.requests} requests in {found.seconds:.0f} s",
                flush=True,
            )
    if failed:
        rate = binomial(sum(failed), len(failed))
        print(f"failed {sum(failed)} of {len(failed)} [{100 * rate.low:.1f}, {100 * rate.high:.1f} %]")


def faulty(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        gguf = gguf_of("smollm2-135m", Path(folder))
        for name in names or FAULTS:
            with served(gguf, slots=4, threads=2) as server:
                report(name, llama_server(Planted(server.url, folder=server.folder, damage=FAULTS[name])))


def report(name: str, target: Any) -> None:
    found = canary(target)
    worst = next(one.worst for one in found.findings if one.name == "slot file")
    print(
        f"{name:16}failed: {', '.join(found.failed) or 'nothing':14}moved by {worst:.3g} nats, threshold "
        f"{found.threshold:.3g}, {found.requests} requests in {found.seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
