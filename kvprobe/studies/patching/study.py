"""The patching study from start to report data."""

from pathlib import Path

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.studies.patching.analyse import analyse, bands_by_half
from kvprobe.studies.patching.collect import cases_of, collect, collect_bands, collect_example
from kvprobe.studies.patching.config import Config
from kvprobe.studies.patching.figures import draw_all
from kvprobe.studies.patching.narrative import narrate

NAME = "patching"


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name)
    if directory.finished:
        return directory
    cases = cases_of(config, model.tokenizer)
    table = collect(model, cases, config, directory)
    bands = bands_by_half(table, model.geometry.n_layers)
    table = collect_bands(model, cases, table, bands, directory)
    example = collect_example(model, cases, table, directory)
    metrics = analyse(table, example, bands, config, model.geometry.n_layers)
    directory.save_table("samples", table)
    if example is not None:
        directory.save_table("example", example)
    draw_all(metrics, model.name, directory.path / "figures")
    directory.finish(metrics, narrate(metrics, config, model, directory.environment).to_dict())
    return directory
