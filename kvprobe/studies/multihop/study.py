"""The multihop study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.multihop.analyse import analyse
from kvprobe.studies.multihop.collect import collect
from kvprobe.studies.multihop.collected import Collected
from kvprobe.studies.multihop.config import Config
from kvprobe.studies.multihop.figures import draw_all
from kvprobe.studies.multihop.narrative import narrate

NAME = "multihop"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    analysis = analyse(Collected.load(collect(model, config, directory), config), config)
    analysis.metrics["precision"] = torch.finfo(model.lanes.dtype).eps
    directory.save_table("samples", analysis.samples)
    directory.save_table("probes", analysis.probes)
    draw_all(analysis.probes, analysis.metrics, directory.path / "figures")
    report = narrate(analysis.metrics, analysis.probes, config, model, directory.environment)
    directory.finish(analysis.metrics, report.to_dict())
    return directory
