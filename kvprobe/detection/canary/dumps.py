"""A canary of dumps: caches that an engine wrote to files while it answered requests.

Two requests that begin alike have the same K and V in the slots of that beginning, whether they were computed, found in
a cache, moved or loaded. So each dump is held against an earlier one that begins alike, or against what the model
computes from its tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief, Table
from kvprobe.cache.stored import StoredCache
from kvprobe.detection.diff import CacheDifference, diff
from kvprobe.engines.opened import open_cache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model

FEWEST = 16
"""Slots that two dumps must have in common from the first on, to be held against each other."""


@dataclass(frozen=True)
class ComparedDump:
    """A dump, held against another or the model.

    Attributes:
        reference: name of the other, or of the model; empty where no earlier one begins alike.
        shared: slots that were compared.
        difference: in those; None where nothing was compared.
    """

    name: str
    reference: str = ""
    shared: int = 0
    difference: CacheDifference | None = None

    @property
    def wrong(self) -> bool:
        """Whether a number differs by more than numerics."""
        return self.difference is not None and self.difference.first is not None

    @property
    def sentence(self) -> str:
        if self.difference is None:
            return f"{self.name}: held against nothing, since no earlier dump begins alike."
        said = self.difference
        found = f"{said.kind}, first in {said.first}" if self.wrong else "alike"
        return f"{self.name}: {self.shared} slots against {self.reference}: {found}."


@dataclass(frozen=True, repr=False)
class DumpsCanary(Brief):
    """What a canary of dumps found, dump by dump in the order of their names."""

    dumps: tuple[ComparedDump, ...]

    @property
    def failed(self) -> list[str]:
        """Names of dumps that are wrong."""
        return [dump.name for dump in self.dumps if dump.wrong]

    @property
    def verdict(self) -> str:
        """In a sentence."""
        compared = sum(dump.difference is not None for dump in self.dumps)
        if self.failed:
            return f"Failed: {', '.join(self.failed)} ({len(self.failed)} of {compared} dumps that were compared)."
        return f"Sound: {compared} dumps hold what those that begin alike hold."

    def as_mapping(self) -> dict[str, object]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "failed": self.failed,
            "dumps": [
                {
                    "name": dump.name,
                    "reference": dump.reference,
                    "shared": dump.shared,
                    "difference": None if dump.difference is None else dump.difference.as_mapping(),
                }
                for dump in self.dumps
            ],
        }

    def __str__(self) -> str:
        return "\n".join([*(dump.sentence for dump in self.dumps), self.verdict])

    def _facts(self) -> Iterator[str]:
        yield f"{len(self.dumps)} dumps"
        yield f"{len(self.failed)} wrong"

    def _table(self) -> Table:
        rows = [(dump.name, dump.reference, dump.shared, dump.sentence) for dump in self.dumps]
        return ("dump", "against", "slots", "found"), rows


@checked_arguments
def canary_of_dumps(folder: Path, model: Model | None = None) -> DumpsCanary:
    """Which dumps of an engine are wrong?

    Args:
        folder: of the files, in any format that `kv.open_cache` reads, one text each. In the order of their names the
            first of those that begin alike is taken to be right: name dumps of requests without reuse first.
        model: reads the tokens of each dump again, and is what they are held against.

    Raises:
        UserError: there are no dumps in the folder, or nothing can be compared.
    """
    dumps = {path.name: open_cache(path, model) for path in _dumps(folder)}
    for name, cache in dumps.items():
        if cache.ledger.batch != 1:
            raise UserError(f"{name} holds {cache.ledger.batch} texts; dump each to a file of its own.")
    compared = list[ComparedDump]()
    for name, cache in dumps.items():
        right = {dump.name: dumps[dump.name] for dump in compared if not dump.wrong}
        compared.append(_held(name, cache, right, model))
    if all(dump.difference is None for dump in compared):
        raise UserError(
            f"No two of the {len(dumps)} dumps in {folder} have their first {FEWEST} tokens in common; dump requests "
            "that begin alike, with and without reuse, or give the model."
        )
    return DumpsCanary(tuple(compared))


def _dumps(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}; give one with the caches that an engine dumped.")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = [path for path in paths if path.suffix != ".safetensors" or not path.with_suffix(".json").is_file()]
    if not found:
        raise UserError(f"There are no files in {folder}; dump caches of requests there.")
    return found


def _held(name: str, cache: StoredCache, right: Mapping[str, StoredCache], model: Model | None) -> ComparedDump:
    """A dump, held against the model or the right one with which it has most slots in common."""
    if model is not None:
        return ComparedDump(name, model.name, int(cache.ledger.live_somewhere.sum()), diff(cache, model))
    shared = {other: _shared(cache, dump) for other, dump in right.items()}
    nearest = max(shared, key=lambda other: shared[other], default="")
    if not nearest or shared[nearest] < FEWEST:
        return ComparedDump(name)
    return ComparedDump(name, nearest, shared[nearest], diff(cache, right[nearest]))


def _shared(one: StoredCache, other: StoredCache) -> int:
    """Slots from the first on that hold the same tokens at the same positions, less those that are hidden; fitted ones
    hold none."""
    count = min(one.ledger.slots, other.ledger.slots)
    same = (one.ledger.tokens[0, :count] == other.ledger.tokens[0, :count]) & (
        one.ledger.origins[0, :count] == other.ledger.origins[0, :count]
    )
    same = same & ~one.ledger.fitted[0, :count]
    live = one.ledger.live_somewhere[0, :count] & other.ledger.live_somewhere[0, :count]
    return int((same.long().cumprod(0).bool() & live).sum())
