"""The carriers study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.carriers.analyse import analyse
from kvprobe.studies.carriers.collect import collect
from kvprobe.studies.carriers.config import Config
from kvprobe.studies.carriers.figures import draw_all
from kvprobe.studies.carriers.narrative import narrate

NAME = "carriers"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    table = collect(model, config, directory)
    metrics = analyse(table, config) | {"precision": torch.finfo(model.lanes.dtype).eps}
    directory.save_table("samples", table)
    draw_all(metrics, directory.path / "figures")
    directory.finish(metrics, narrate(metrics, config, model, directory.environment).to_dict())
    return directory
