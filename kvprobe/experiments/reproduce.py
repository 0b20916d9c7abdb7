"""How a report says to get its numbers again."""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from kvprobe.environment import short_commit
from kvprobe.experiments.settings import Settings, types_of


def reproduced(study: str, config: Settings, environment: Mapping[str, Any]) -> list[str]:
    """The command of a run; its seed, model and versions; its machine."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return [
        " ".join(["kvprobe run", study, *flags(config)]),
        f"Seed {config.seed}; model {environment['model']}; {versions}; Python {environment['python']}.",
        f"{environment['machine']}; {environment['device']}"
        + (f"; commit {short_commit(environment['commit'])}." if environment["commit"] else "."),
    ]


def flags(config: Settings) -> list[str]:
    """The settings that differ from their defaults, as flags of the command line."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values = ((name, getattr(config, name)) for name in types_of(type(config)))
    return [_flag(name.replace("_", "-"), value) for name, value in values if value != defaults[name]]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{name}", *(shlex.quote(str(value)) for value in values)])
