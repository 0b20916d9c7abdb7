"""The dangling study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.dangling.analyse import analyse
from kvprobe.studies.dangling.collect import cases_of, collect, collect_memos, collect_rescues, sets_by_half
from kvprobe.studies.dangling.config import Config
from kvprobe.studies.dangling.figures import draw_all, example
from kvprobe.studies.dangling.narrative import narrate

NAME = "dangling"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    cases = cases_of(config, model)
    table = collect(model, cases, directory)
    rescues = collect_rescues(model, cases, sets_by_half(table, config, model), directory)
    memos = collect_memos(config, directory) if config.memos else None
    metrics = analyse(table, rescues, memos, config)
    directory.save_table("samples", table)
    directory.save_table("rescues", rescues)
    if memos is not None:
        directory.save_table("memos", memos)
    draw_all(metrics, model.name, directory.path / "figures")
    views = example(model, cases[0], metrics)
    directory.finish(metrics, narrate(metrics, config, model, directory.environment, views).to_dict())
    return directory
