"""Tables and tensors of many cases, one file each, so that an interrupted run resumes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pandas as pd
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from kvprobe.experiments.runs import Run
from kvprobe.files import read_table

Case = TypeVar("Case")


def kept_tables(
    run: Run, cases: Sequence[Case], name: str, measure: Callable[[Case], pd.DataFrame], *, doing: str, unit: str
) -> pd.DataFrame:
    """The tables of all cases, one below the other; those that an earlier attempt has made are read.

    Args:
        name: of the files, which the case's place completes.
        doing, unit: what the bar says.
    """
    tables = []
    for number, case in enumerate(tqdm(cases, desc=doing, unit=unit)):
        tables.append(read_table(kept_table(run, f"{number:05d}-{name}", lambda case=case: measure(case))))
    return pd.concat(tables, ignore_index=True)


def kept_table(run: Run, name: str, make: Callable[[], pd.DataFrame]) -> Path:
    """The file of one table; see `Run.keep`."""
    return run.keep(f"{name}.parquet", lambda path: make().to_parquet(path, index=False))


def kept_tensors(run: Run, name: str, make: Callable[[], dict[str, Tensor]]) -> Path:
    """The file of some tensors; see `Run.keep`."""
    return run.keep(f"{name}.safetensors", lambda path: save_file(make(), path))
