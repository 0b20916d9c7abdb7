"""The place of the data that ships with kvprobe."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C, ten times as fast, where PyYAML was built with it."""


def shipped(kind: str) -> Path:
    """The data folder `analyses`, `models` or `probes`: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind


@cache
def shipped_entries(name: str) -> Any:
    """What a YAML file of the library holds, as `tasks/passcode`."""
    return yaml.load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"), _LOADER)
