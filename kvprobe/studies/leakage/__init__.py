"""Leakage: how much of a hidden number survives in the KV cache after the turn that held it was masked."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvprobe.studies.leakage.config import Config

if TYPE_CHECKING:
    from kvprobe.experiments.runs import Run
    from kvprobe.inference.model import Model


def run(config: Config, root: Path = Path("runs"), name: str | None = None, model: "Model | None" = None) -> "Run":
    """Run the study; see `kvprobe.experiments.running.run_study`."""
    from kvprobe.experiments.running import run_study
    from kvprobe.studies.leakage.study import STUDY

    return run_study(STUDY, config, root, name, model)
