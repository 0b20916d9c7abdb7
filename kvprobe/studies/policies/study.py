"""The policies study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.policies.analyse import Collected, analyse
from kvprobe.studies.policies.collect import collect
from kvprobe.studies.policies.config import Config
from kvprobe.studies.policies.figures import draw_all
from kvprobe.studies.policies.narrative import narrate

NAME = "policies"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    collected = Collected.load(collect(model, config, directory))
    metrics = analyse(collected, config)
    directory.save_table("samples", collected.table)
    draw_all(metrics, config, model.name, directory.path / "figures")
    directory.finish(metrics, narrate(metrics, config, model, directory.environment).to_dict())
    return directory
