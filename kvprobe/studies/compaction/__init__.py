"""Mask or restart: what provenance, positions and delimiters each do to a compacted conversation."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvprobe.studies.compaction.config import Config

if TYPE_CHECKING:
    from kvprobe.experiments.runs import Run
    from kvprobe.inference.model import Model


def run(config: Config, root: Path = Path("runs"), name: str | None = None, model: "Model | None" = None) -> "Run":
    """Run the study; see `kvprobe.experiments.running.run_study`."""
    from kvprobe.experiments.running import run_study
    from kvprobe.studies.compaction.study import STUDY

    return run_study(STUDY, config, root, name, model)
