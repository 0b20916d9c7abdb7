"""What the tests of studies share: whole runs on a model in hand, that stop midway and go on."""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.inference.model import Model
from kvprobe.studies import find


def whole_run(
    study: Study[Any], config: Settings, model: Model, folder: Path, undrawn: Collection[str] = (), unable: int = 0
) -> Run:
    """A run that is interrupted after the first part of each of its stages and started again.

    No part is written twice, the finished run is found again, controls hold, and figures are drawn.

    Args:
        undrawn: figures that have nothing to show.
        unable: how many of the last controls ask for more than a tiny model can do.
    """
    written: Counter[str] = Counter()
    stages: set[str] = set()
    whole = Run.write_part

    def stopping(self: Run, name: str, write: Callable[[Path], object]) -> Path:
        new, stage = not self.part(name).is_file(), name.partition("-")[2]
        path = whole(self, name, write)
        written[name] += new
        if stage in stages:
            return path
        stages.add(stage)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "write_part", stopping)
        while True:
            with suppress(KeyboardInterrupt):
                run = find(study.name).run(config, folder, model=model)
                assert stages
                assert find(study.name).run(config, folder, model=model).path == run.path
                assert set(written.values()) == {1}
                controls = Conclusion.of(run.metrics).controls
                assert [control.holds for control in controls] == [True] * (len(controls) - unable) + [False] * unable
                assert_figures(run, *({figure.file for figure in study.figures}.difference(undrawn)))
                return run


def every(**levels: Any) -> pd.DataFrame:
    """A row for each combination of these."""
    return pd.MultiIndex.from_product(list(levels.values()), names=list(levels)).to_frame(index=False)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """The two are equal but for rounding."""
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


def assert_figures(run: Run, *names: str) -> None:
    """These figures were drawn, both as pixels and as vectors."""
    for name in names:
        assert (run.path / "figures" / f"{name}.png").stat().st_size > 5_000
        assert (run.path / "figures" / f"{name}.svg").is_file()
