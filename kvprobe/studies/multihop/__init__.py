"""Multihop: how far a hidden turn reaches when every turn is summarised and masked in its turn."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvprobe.studies.multihop.config import Config

if TYPE_CHECKING:
    from kvprobe.experiments.runs import Run
    from kvprobe.inference.model import Model


def run(config: Config, root: Path = Path("runs"), name: str | None = None, model: "Model | None" = None) -> "Run":
    """Run the study; see `kvprobe.experiments.running.run_study`."""
    from kvprobe.experiments.running import run_study
    from kvprobe.studies.multihop.study import STUDY

    return run_study(STUDY, config, root, name, model)
