"""The robustness study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.robustness.analyse import analyse
from kvprobe.studies.robustness.collect import beside, collect, require_known_faults
from kvprobe.studies.robustness.config import Config
from kvprobe.studies.robustness.figures import draw_all
from kvprobe.studies.robustness.narrative import narrate
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import items_digest

NAME = "robustness"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: an unknown fault, task or reported table, a setting that does not fit the model, or a directory that
            holds another run.
    """
    tasks = [find_task(name) for name in config.tasks]
    require_known_faults(config)
    table = beside(config, tasks)
    inputs = {"tasks": items_digest(tasks, config.samples, config.seed)}
    model, directory = begin(NAME, config, root, name, inputs)
    if directory.finished:
        return directory
    rows = collect(model, config, directory, tasks)
    windows = [window for window in model.geometry.windows if window is not None]
    dtype = str(model.lanes.dtype).removeprefix("torch.")
    metrics = analyse(rows, config, tasks, window=min(windows, default=None), dtype=dtype)
    directory.save_table("samples", rows)
    draw_all(metrics, config, table, model.name, directory.path / "figures")
    directory.finish(metrics, narrate(metrics, config, tasks, table, model, directory.environment).to_dict())
    return directory
