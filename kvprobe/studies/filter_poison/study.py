"""The filter-poison study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.filter_poison.analyse import analyse, heads_by_half
from kvprobe.studies.filter_poison.collect import cases_of, collect, collect_heads
from kvprobe.studies.filter_poison.config import Config
from kvprobe.studies.filter_poison.figures import draw_all, example
from kvprobe.studies.filter_poison.narrative import narrate

NAME = "filter_poison"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    cases = cases_of(config, model)
    maps, states = collect(model, config, cases, directory)
    by_half = heads_by_half(maps, config)
    heads = collect_heads(model, config, cases, by_half, directory)
    metrics = analyse(maps, states, heads, by_half, config)
    for table, rows in (("maps", maps), ("states", states), ("heads", heads)):
        directory.save_table(table, rows)
    draw_all(metrics, model.name, directory.path / "figures")
    views = example(model, config, cases[0], metrics)
    directory.finish(metrics, narrate(metrics, config, model, directory.environment, views).to_dict())
    return directory
