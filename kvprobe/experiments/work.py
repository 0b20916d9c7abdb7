"""What a stage of a study does for each of its cases: measure it, and write the part that it leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import pandas as pd
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings
from kvprobe.inference.model import Model
from kvprobe.models.noted import loads_noted

Kept = TypeVar("Kept")
_kept: list[Callable[[], None]] = []
TABLE, TENSORS = ".parquet", ".safetensors"
"""Of the files of parts."""


def kept(make: Callable[..., Kept]) -> Callable[..., Kept]:
    """A function whose last result is kept until the run ends: for what many cases need, and must not be made for
    each, as another model."""
    last = lru_cache(maxsize=1)(make)
    _kept.append(last.cache_clear)
    return last


def forget_kept() -> None:
    """Weights and files may have changed when the next run begins."""
    for clear in _kept:
        clear()


class Labelled(NamedTuple):
    """Tensors of a case, and texts that stand beside them."""

    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Work:
    """What is measured of each case: a function at the top level of a module, of the model, the settings and the case,
    and of what it needs of former stages, which is given to it. So it can be called by its name anywhere: in a forked
    process, or on another machine.
    """

    name: str
    measure: Callable[..., Any]
    given: tuple[object, ...]
    suffix: str

    def __post_init__(self) -> None:
        name = getattr(self.measure, "__qualname__", repr(self.measure))
        if not isinstance(self.measure, FunctionType) or "<" in name:
            raise UserError(
                f"The stage {self.name!r} is measured by {name}, which other processes cannot find; define it at the "
                "top level of its module, and give it what it needs after the case."
            )

    def write(self, model: Model, config: Settings, case: object, path: Path) -> None:
        """Measure a case and write its part: a table, or tensors."""
        measured = self.measure(model, config, case, *self.given)
        if self.suffix == TABLE:
            table = measured if isinstance(measured, pd.DataFrame) else pd.DataFrame(list(measured))
            table.to_parquet(path, index=False)
        else:
            tensors, texts = measured if isinstance(measured, Labelled) else (measured, {})
            save_file(dict(tensors), path, metadata=dict(texts) or None)


def part_of(model: Model, case: object, work: Work, config: Settings) -> tuple[bytes, dict[str, str]]:
    """The part of a case, where its file cannot be written; and the fingerprints of other models that were loaded."""
    with TemporaryDirectory(prefix="kvprobe-part-") as folder, loads_noted() as loaded:
        path = Path(folder) / "part"
        work.write(model, config, case, path)
        return path.read_bytes(), {name: other.fingerprint for name, other in loaded.items()}
