"""A cache in a file, of which a layer is read when it is asked for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import Ledger
from kvprobe.files import FileVersion
from kvprobe.fingerprint import Maker


class LazyLayers(Sequence[Layer]):
    """Layers that are read anew each time they are asked for, so that one of them is in memory at a time."""

    def __init__(self, count: int, read: Callable[[int], Layer], file: FileVersion | None = None) -> None:
        """Layers 0 to `count` - 1, each read by its number; from a file, as long as it is as it was."""
        self._count, self._each, self._file = count, read, file

    def _read(self, number: int) -> Layer:
        if self._file is not None:
            self._file.refuse_another()
        return self._each(number)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(index, slice):
            return [self._read(number) for number in range(self._count)[index]]
        return self._read(range(self._count)[index])

    def __iter__(self) -> Iterator[Layer]:
        return map(self._read, range(self._count))


@dataclass(frozen=True, repr=False)
class StoredCache(Brief):
    """A cache in a file. `layers` and `ledger` are as those of a `KVCache`, which stands wherever this does.

    Attributes:
        layers: what each layer stores by part, in the layout of `KVCache.layers`; read when asked for.
        ledger: of the slots.
        origin: what the file is, in words: "a slot of llama.cpp, K and V in f16".
        made_by: the model that computed it, where the file holds that.
        block: slots in a block, where the file holds that.
        lacks: what such a file does not hold and was assumed, in a sentence; empty where that is nothing.
    """

    layers: Sequence[Layer]
    ledger: Ledger
    origin: str
    made_by: Maker | None = None
    block: int | None = None
    lacks: str = ""

    def cache(self) -> KVCache:
        """The whole cache, in memory."""
        return KVCache(tuple(self.layers), self.ledger, self.made_by)

    def _facts(self) -> Iterable[str]:
        yield self.origin
        yield f"{len(self.layers)} layers, {self.ledger.slots} slots"
        if self.lacks:
            yield self.lacks


AnyCache = KVCache | StoredCache
"""A cache in memory or in a file."""
