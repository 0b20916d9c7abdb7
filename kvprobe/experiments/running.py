"""How every declared study runs: measure what is missing, conclude, draw, write the report."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pandas as pd

from kvprobe.durations import Duration, durations
from kvprobe.environment import environment, machine, version_in_words
from kvprobe.errors import UserError
from kvprobe.executors import Cluster
from kvprobe.experiments.page import write_page
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings, digest_of, folder_of
from kvprobe.experiments.study import Study
from kvprobe.experiments.work import forget_kept
from kvprobe.files import folder_claimed
from kvprobe.inference.elsewhere import working
from kvprobe.inference.model import Model, load
from kvprobe.processes import check_processes, peak_bytes
from kvprobe.progress import watched
from kvprobe.report.findings import Findings
from kvprobe.report.plots.style import save_or_remove

Config = TypeVar("Config", bound=Settings)


def run_study(
    study: Study[Config],
    config: Config,
    root: Path = Path("runs"),
    name: str | None = None,
    model: Model | None = None,
    processes: int = 1,
    cluster: Cluster | None = None,
    share: tuple[int, int] = (1, 1),
    again: bool = False,
) -> Run:
    """Run a study (or resume, or find it finished), write its report, and return the run.

    Args:
        root: folder that holds the runs.
        name: of the run; made from the settings by default.
        model: any loaded model, in place of the one that the config names.
        processes: parts that are worked on side by side, each in a forked process. Numbers are the same but for
            rounding, as with another number of threads.
        cluster: where parts are worked on instead, by workers that load the model that the config names.
        share: which of how many shares of each stage's cases is measured here, (1, 2) the first half. Others are
            measured elsewhere with the same command, and `kvprobe.experiments.merging.merge` joins them.
        again: conclude a finished run from its tables again, as this version does.

    Raises:
        ShareMeasured: the share that was asked for is there, and what follows needs the others.
        UserError: a setting that does not fit the model, a directory that holds another run, or processes where none
            can be forked.
    """
    number, shares = share
    if not 1 <= number <= shares:
        raise UserError(f"Share {number}/{shares} is none; give the number of a share and how many there are, as 1/2.")
    if model is not None:
        if cluster is not None:
            raise UserError("Workers of a cluster load their model by its name; give it as the setting 'model'.")
        config = replace(
            config,
            model=model.placing.source_of(model.name),
            **dict.fromkeys(("device_map", "offload_folder")),
            max_memory=(),
            quantization=model.placing.quantization,
            chunk=model.lanes.chunk,
        )
    study = study.instead(config) or study
    measured = durations().get(digest_of(study.name, config))
    inputs = {**study.inputs(config), **study.measuring}
    with (
        watched(measured and measured.timing) as clock,
        begin(study.name, config, root, name, inputs, model) as (model, run),
        working(cluster, model) if cluster and not run.finished else nullcontext() as workers,
    ):
        check_processes(processes, model.lanes.device)
        run = replace(run, processes=processes, workers=workers, share=share)
        # What a user's study concludes may have changed since it was measured.
        if again or not run.finished or not study.ships:
            resumed = (run.path / "parts").is_dir()
            try:
                rows = run.tables() if run.finished else study.collect(model, config, run)
            finally:
                forget_kept()
            if not study.ships and not isinstance(rows, pd.DataFrame) and set(rows) == {"samples"}:
                raise UserError(f"The study {study.name!r} gives its only table by name; let it return the table.")
            if not run.finished:
                for name, table in ({"samples": rows} if isinstance(rows, pd.DataFrame) else rows).items():
                    run.save_table(name, table)
            conclusion = study.conclude(rows, config, model)
            if run.finished and (other := other_version(run)):
                conclusion = replace(conclusion, warnings=(*conclusion.warnings, other))
            draw(study, conclusion.findings, model.name + config.and_more, run.path / "figures")
            if not (run.finished or resumed or cluster):
                Duration(study.name, "", machine(), peak_bytes(), clock.timing).write(run.path)
            run.finish(conclusion.record())
        write_page(study, run)
    return run


def other_version(run: Run) -> str:
    """Which version measured a run that this one concludes; nothing to say if it is the same."""
    measured, concluded = map(version_in_words, (run.environment, environment()))
    return "" if measured == concluded else f"Measured with {measured}, concluded again with {concluded}."


@contextmanager
def begin(
    study: str,
    config: Settings,
    root: Path,
    name: str | None,
    inputs: Mapping[str, str] | None = None,
    model: Model | None = None,
) -> Generator[tuple[Model, Run]]:
    """The model in hand, or else the one that a study's config names, and the directory of the run; see `Run.open`.
    While this lasts, no other command can use that directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that is in use or holds another run.
    """
    model = model or load(config.model, **config.loading)
    with folder_claimed(folder_of(study, config, root, name)):
        yield model, Run.open(study, config, model.fingerprint, model.computes, root, name, inputs)


def draw(study: Study[Config], findings: Findings, title: str, folder: Path) -> None:
    """Draw all figures of a study into `folder` as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    for figure in study.figures:
        save_or_remove(figure.draw(findings, study.label, title), folder / figure.file)
