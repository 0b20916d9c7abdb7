"""What it costs that a run is kept in parts, and that workers of Ray measure them, beside the plain loop over cases.

    python benchmarks/executor.py [PRESET] [SAMPLES] [ROUNDS]

The arms take turns in one process and do the same work, with the same threads and one worker; their tables must be
equal. A first turn of each is not counted. What starting the worker costs is given by itself. Seconds of the processor
are those of all processes together, so that other work on the machine counts little.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pandas as pd
import psutil
import torch

from kvprobe.executors import Cluster
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.experiments.work import forget_kept
from kvprobe.inference.elsewhere import working
from kvprobe.inference.model import load
from kvprobe.presets import presets
from kvprobe.studies import find

PLAIN, PARTS, RAY = "plain loop", "parts", "parts by a worker of Ray"


def plain(
    parts: Parts[Any], measure: Callable[..., Any], cases: Sequence[Any], name: str, *given: Any, **_: Any
) -> Any:
    """The rows of a stage without anything that is kept."""
    tables = (measure(parts.model, parts.config, case, *given) for case in cases)
    return pd.concat([one if isinstance(one, pd.DataFrame) else pd.DataFrame(list(one)) for one in tables])


def busy() -> float:
    """Seconds of the processor of this process and all that it has started."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)) if one.is_running())


def main() -> None:
    name, samples, rounds = (*sys.argv[1:], *("robustness-quick", "4", "5")[len(sys.argv) - 1 :])
    preset = presets()[name]
    study = find(preset.study).declaration
    config = replace(from_mapping(study.config, preset.settings), samples=int(samples))
    model = load(config.model, device=config.device, dtype=config.dtype)
    before = time.perf_counter(), busy()
    with working(Cluster(threads=torch.get_num_threads()), model) as workers:
        print(f"Ray and its worker start in {time.perf_counter() - before[0]:.1f} s, {busy() - before[1]:.1f} s of CPU")
        took: dict[str, list[tuple[float, float]]] = {PLAIN: [], PARTS: [], RAY: []}
        tables: dict[str, Any] = {}
        for turn in range(int(rounds) + 1):
            for arm in (*took, *reversed(took))[turn % 2 * 3 :][:3]:
                with TemporaryDirectory() as folder:
                    run = Run(Path(folder), workers=workers if arm == RAY else None)
                    start = time.perf_counter(), busy()
                    with patch.object(Parts, "table", plain if arm == PLAIN else Parts.table):
                        collected = study.collect(model, config, run)
                    seconds = time.perf_counter() - start[0], busy() - start[1]
                forget_kept()
                if turn:
                    took[arm].append(seconds)
                given = {"samples": collected} if isinstance(collected, pd.DataFrame) else collected
                for table, rows in tables.setdefault("rows", given).items():
                    pd.testing.assert_frame_equal(
                        rows.reset_index(drop=True), given[table].reset_index(drop=True), check_exact=True
                    )
    print(f"{name} with {samples} samples, {os.cpu_count()} cores, {torch.get_num_threads()} threads; tables are equal")
    for arm, seconds in took.items():
        ratios = [
            [one[clock] / base[clock] for one, base in zip(seconds, took[PLAIN], strict=True)] for clock in (0, 1)
        ]
        wall, cpu = (f"{median(of):.3f} ({min(of):.3f} to {max(of):.3f})" for of in ratios)
        print(f"{arm}: {median(cpu for _, cpu in seconds):.2f} s of CPU; ratio of CPU {cpu}, of the wall {wall}")


if __name__ == "__main__":
    main()
