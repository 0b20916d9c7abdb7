"""Tables of many cases, one file each, so that an interrupted run resumes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pandas as pd
from tqdm import tqdm

from kvprobe.runs import Run

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
        path = run.part(f"{number:05d}-{name}.parquet")
        if not path.is_file():
            partial = path.with_suffix(".partial")
            measure(case).to_parquet(partial, index=False)
            partial.replace(path)
        tables.append(pd.read_parquet(path))
    return pd.concat(tables, ignore_index=True)
