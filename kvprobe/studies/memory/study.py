"""The memory study from start to report data."""

from pathlib import Path

import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.memory.analyse import analyse
from kvprobe.studies.memory.collect import collect_growth, collect_peaks, collect_times
from kvprobe.studies.memory.config import Config
from kvprobe.studies.memory.figures import draw_all
from kvprobe.studies.memory.narrative import narrate

NAME = "memory"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    longest = max(*config.contexts, *config.timed, config.prompt + config.new)
    model.lanes.refuse_far_positions(torch.tensor([[longest - 1]]))
    peaks = collect_peaks(model, config, directory)
    growth = collect_growth(model, config, directory)
    times = collect_times(model, config, directory)
    metrics = analyse(peaks, growth, times)
    for table, rows in (("samples", peaks), ("growth", growth), ("times", times)):
        directory.save_table(table, rows)
    stack = model.budget(context=config.prompt, memory=config.memory)
    draw_all(stack, peaks, growth, times, directory.path / "figures")
    report = narrate(metrics, stack, peaks, config, model, directory.environment)
    directory.finish(metrics, report.to_dict())
    return directory
