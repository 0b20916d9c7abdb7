"""A canary against llama.cpp, sound and with faults planted through its slot file; `blocks-swapped` is a control.

    python benchmarks/canary.py [FAULT …]

The slot file is edited between `save` and `restore`. Prints a line for each fault: the properties that failed, how far
the answers after a restored slot moved, and the seconds that it took.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.detection.canary import canary, llama_server
from kvprobe.engines.server import LlamaServer, served
from kvprobe.engines.slot import read_slot, stored, write_slot
from kvprobe.faults import Scope, Zeros
from kvprobe.models.catalogue import gguf_of

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


def main(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        gguf = gguf_of("smollm2-135m", Path(folder))
        for name in names or FAULTS:
            with served(gguf, slots=4, threads=1) as server:
                found = canary(llama_server(Planted(server.url, folder=server.folder, damage=FAULTS[name])))
            worst = next(one.worst for one in found.findings if one.name == "slot file")
            print(
                f"{name:16}failed: {', '.join(found.failed) or 'nothing':14}moved by {worst:.3g} nats, threshold "
                f"{found.threshold:.3g}, {found.requests} requests in {found.seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
