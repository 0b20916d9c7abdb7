"""The compaction study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.compaction.analyse import Collected, analyse
from kvprobe.studies.compaction.collect import collect
from kvprobe.studies.compaction.config import Config
from kvprobe.studies.compaction.figures import draw_all
from kvprobe.studies.compaction.narrative import narrate

NAME = "compaction"


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
    directory.save_table("conversations", analysis.conversations)
    directory.save_table("probes", analysis.probes)
    analysis.metrics["precision"] = torch.finfo(model.lanes.dtype).eps
    draw_all(analysis.metrics, directory.path / "figures")
    report = narrate(analysis.metrics, analysis.conversations, config, model, directory.environment)
    directory.finish(analysis.metrics, report.to_dict())
    return directory
