"""What the tests of studies share: whole runs on a model in hand, that stop midway and go on."""

import pickle
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.experiments.parts import Work
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings, folder_of
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.inference.model import Model
from kvprobe.studies import find


def whole_run(
    study: Study[Any],
    config: Settings,
    model: Model,
    folder: Path,
    hold: Sequence[bool | None],
    undrawn: Collection[str] = (),
) -> Run:
    """A run that is interrupted after the first part of each of its stages and started again.

    Stages and cases are as another process gets them. No part is written twice, the finished run is found again, its
    tables give the same conclusion again, and figures are drawn.

    Args:
        hold: whether each control does, or None where it is none; some ask for more than a tiny model can do.
        undrawn: figures that have nothing to show.
    """
    written: Counter[str] = Counter()
    whole, path_of_run = Run.write_part, folder_of(study.name, config, folder, None)

    def stopping(self: Run, name: str, write: Callable[[Path], object]) -> Path:
        begun = name.partition("-")[2] in {known.partition("-")[2] for known in written}
        new = not self.part(name).is_file()
        path = whole(self, name, write)
        written[name] += new
        if begun:
            return path
        raise KeyboardInterrupt

    measured = Work.write

    def elsewhere(work: Work, model: Model, *given: Any) -> None:
        *abroad, path = work, *given
        travels = pickle.dumps(abroad)
        assert str(path_of_run).encode() not in travels, "workers share no files with the run"
        there, config, case = pickle.loads(travels)
        measured(there, model, config, case, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "write_part", stopping)
        patch.setattr(Work, "write", elsewhere)
        while True:
            with suppress(KeyboardInterrupt):
                run = find(study.name).run(config, folder, model=model)
                assert find(study.name).run(config, folder, model=model).path == run.path
                assert set(written.values()) == {1}
                conclusion = Conclusion.of(run.metrics)
                again = study.conclude(run.tables(), replace(config, model=model.name), model).findings
                pd.testing.assert_frame_equal(again.frame(), conclusion.findings.frame(), check_dtype=False)
                assert [control.holds for control in conclusion.controls] == [*hold]
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
