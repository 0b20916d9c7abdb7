"""The band study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.bands.analyse import analyse
from kvprobe.studies.bands.collect import collect, tasks_of
from kvprobe.studies.bands.config import Config
from kvprobe.studies.bands.figures import draw_all
from kvprobe.studies.bands.narrative import narrate
from kvprobe.tasks.task import items_digest

NAME = "bands"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    inputs = {"tasks": items_digest(tasks_of(config), config.samples, config.seed)}
    model, directory = begin(NAME, config, root, name, inputs)
    if directory.finished:
        return directory
    table = collect(model, config, directory)
    metrics = analyse(table, config, tasks_of(config))
    directory.save_table("samples", table)
    draw_all(metrics, config, model.name, directory.path / "figures")
    directory.finish(metrics, narrate(metrics, config, model, directory.environment).to_dict())
    return directory
