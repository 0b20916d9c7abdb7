"""The leakage study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.probing.controls import random_model
from kvprobe.studies.leakage.analyse import Collected, analyse
from kvprobe.studies.leakage.collect import collect
from kvprobe.studies.leakage.config import Config
from kvprobe.studies.leakage.figures import draw_all
from kvprobe.studies.leakage.narrative import narrate
from kvprobe.studies.leakage.probes import keep_probes
from kvprobe.tasks.secrets import secret

NAME = "leakage"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    target = secret(config.secret).target
    collected = Collected.load(collect(model, config, directory), target)
    untrained = None
    if config.untrained:
        blank = random_model(model, config.seed)
        untrained = Collected.load(collect(blank, config, directory, "untrained"), target)
    analysis = analyse(model, collected, untrained, config)
    directory.save_table("samples", analysis.samples)
    directory.save_table("probes", analysis.probes)
    directory.save_table("readings", analysis.readings)
    draw_all(analysis.probes, analysis.metrics, directory.path / "figures")
    analysis.metrics["precision"] = torch.finfo(model.lanes.dtype).eps
    if config.contexts > 1:
        keep_probes(model, collected, analysis, config, directory)
    report = narrate(analysis, config, model, directory.environment)
    directory.finish(analysis.metrics, report.to_dict())
    return directory
