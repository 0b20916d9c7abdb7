"""The bit-flip study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.bitflips.analyse import analyse
from kvprobe.studies.bitflips.collect import collect, tasks_of
from kvprobe.studies.bitflips.config import Config
from kvprobe.studies.bitflips.figures import draw_all
from kvprobe.studies.bitflips.narrative import narrate
from kvprobe.tasks.task import items_digest

NAME = "bitflips"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: an unknown task, a task whose file is missing, a setting that does not fit the model, or a directory
            that holds another run.
    """
    inputs = {"tasks": items_digest(tasks_of(config), config.samples, config.seed)}
    model, directory = begin(NAME, config, root, name, inputs)
    if directory.finished:
        return directory
    table = collect(model, config, directory)
    metrics = analyse(table, config, model.geometry)
    directory.save_table("samples", table)
    draw_all(metrics, model.name, directory.path / "figures")
    directory.finish(metrics, narrate(metrics, config, model, directory.environment).to_dict())
    return directory
