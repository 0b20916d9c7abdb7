"""How every study begins: with its model, and the run directory that belongs to both."""

from collections.abc import Mapping
from pathlib import Path

from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.inference.model import Model, load


def begin(
    study: str,
    config: Settings,
    root: Path,
    name: str | None,
    inputs: Mapping[str, str] | None = None,
    model: Model | None = None,
) -> tuple[Model, Run]:
    """The model that a study's config names, and the directory of the run, new, to be resumed, or finished.

    Args:
        inputs: for settings that name files, a digest of what these hold.
        model: one that is loaded already, in place of the one that the config names.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model = model or load(config.model, device=config.device, dtype=config.dtype)
    device = f"{model.lanes.device}, {model.dtype}"
    return model, Run.open(study, config, model.fingerprint, device, root, name, inputs)
