"""Use: whether the model uses what a probe reads, by erasing it from the cache and by exchanging it for another
run's."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvprobe.studies.use.config import Config

if TYPE_CHECKING:
    from kvprobe.experiments.runs import Run
    from kvprobe.inference.model import Model


def run(config: Config, root: Path = Path("runs"), name: str | None = None, model: "Model | None" = None) -> "Run":
    """Run the study; see `kvprobe.experiments.running.run_study`."""
    from kvprobe.experiments.running import run_study
    from kvprobe.studies.use.study import STUDY

    return run_study(STUDY, config, root, name, model)
