"""The idle-rebuild study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.idle_rebuild.analyse import Collected, analyse
from kvprobe.studies.idle_rebuild.collect import collect
from kvprobe.studies.idle_rebuild.config import Config
from kvprobe.studies.idle_rebuild.figures import draw_all
from kvprobe.studies.idle_rebuild.narrative import narrate

NAME = "idle_rebuild"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    analysis = analyse(Collected.load(collect(model, config, directory)), config)
    directory.save_table("samples", analysis.samples)
    directory.save_table("tokens", analysis.tokens)
    directory.save_table("layers", analysis.layers)
    draw_all(analysis.layers, analysis.metrics, directory.path / "figures")
    analysis.metrics["precision"] = torch.finfo(model.lanes.dtype).eps
    report = narrate(analysis.metrics, analysis.layers, config, model, directory.environment)
    directory.finish(analysis.metrics, report.to_dict())
    return directory
