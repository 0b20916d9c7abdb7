"""The use study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.use.analyse import analyse
from kvprobe.studies.use.check import check
from kvprobe.studies.use.collect import (
    cases_of,
    chosen_places,
    collect_doses,
    collect_effects,
    collect_reads,
    fit_halves,
    tell,
)
from kvprobe.studies.use.config import Config
from kvprobe.studies.use.figures import draw_all
from kvprobe.studies.use.narrative import narrate

NAME = "use"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    cases = cases_of(config, model.tokenizer)
    reads = collect_reads(model, cases, config, directory)
    erasers = fit_halves(reads, config)
    checked = check(reads, erasers)
    effects = collect_effects(model, cases, reads, erasers, config, directory)
    places = chosen_places(effects)
    doses = collect_doses(model, cases, reads, erasers, places, config, directory)
    replies = tell(model, cases, reads, erasers)
    metrics = analyse(effects, doses, checked, places, erasers)
    metrics["precision"] = torch.finfo(model.lanes.dtype).eps
    for table, rows in (("samples", effects), ("doses", doses), ("probes", checked), ("replies", replies)):
        directory.save_table(table, rows)
    draw_all(metrics, directory.path / "figures")
    report = narrate(metrics, replies, config, model, directory.environment)
    directory.finish(metrics, report.to_dict())
    return directory
