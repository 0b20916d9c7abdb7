"""One dataclass is the Python API, the YAML schema and the command-line flags of a study."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvprobe.suggest import unknown

Config = TypeVar("Config")


def from_mapping(kind: type[Config], settings: Mapping[str, Any]) -> Config:
    """A config from plain settings.

    Raises:
        ValueError: an unknown setting (the near match is named) or a value of the wrong type or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in fields:
            raise ValueError(unknown("setting", name, fields))
        expected = fields[name].type
        if expected is float and type(value) is int:
            continue
        if isinstance(expected, type) and type(value) is not expected:
            raise ValueError(
                f"Setting {name!r} is {value!r}, a {type(value).__name__}; expected a {expected.__name__}."
            )
    return kind(**settings)


def require(name: str, value: int | float, low: int | float, high: int | float | None = None) -> None:
    """Refuse a number that is not between `low` and `high`."""
    if not value >= low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"Setting {name!r} is {value}; expected {expected}.")


def read_yaml(path: Path, limit: int = 1_000_000) -> dict[str, Any]:
    """The mapping in a YAML file of bounded size.

    Raises:
        ValueError: the file is missing, too large, not YAML, or not a mapping.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.stat().st_size > limit:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a settings file has at most {limit}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping of settings; it holds a {type(content).__name__}.")
    return content
