"""Parts: one file for each case of a run, so that an interrupted run resumes."""

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


def write_parts(
    run: Run, cases: Sequence[Case], name: str, write: Callable[[Case, Path], object], *, doing: str, unit: str
) -> list[Path]:
    """The parts of all cases, in order; those that an earlier attempt wrote stay as they are.

    Args:
        name: of the files, with their suffix; each file's name begins with the case's place.
        write: writes the part of a case.
        doing, unit: what the progress bar says.
    """
    return [
        run.write_part(f"{place:05d}-{name}", lambda path, case=case: write(case, path))
        for place, case in enumerate(tqdm(cases, desc=doing, unit=unit))
    ]


def table_parts(
    run: Run, cases: Sequence[Case], name: str, measure: Callable[[Case], pd.DataFrame], *, doing: str, unit: str
) -> list[Path]:
    """A table of each case as a parquet file; see `write_parts`."""

    def write(case: Case, path: Path) -> None:
        measure(case).to_parquet(path, index=False)

    return write_parts(run, cases, f"{name}.parquet", write, doing=doing, unit=unit)


def tensor_parts(
    run: Run, cases: Sequence[Case], name: str, measure: Callable[[Case], dict[str, Tensor]], *, doing: str, unit: str
) -> list[Path]:
    """Tensors of each case as a safetensors file; see `write_parts`."""

    def write(case: Case, path: Path) -> None:
        save_file(measure(case), path)

    return write_parts(run, cases, f"{name}.safetensors", write, doing=doing, unit=unit)


def table_of_parts(
    run: Run, cases: Sequence[Case], name: str, measure: Callable[[Case], pd.DataFrame], *, doing: str, unit: str
) -> pd.DataFrame:
    """The tables of all cases, one below the other; see `write_parts`."""
    paths = table_parts(run, cases, name, measure, doing=doing, unit=unit)
    return pd.concat([read_table(path) for path in paths], ignore_index=True)
