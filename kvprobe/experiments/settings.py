"""One dataclass is the Python API, the YAML schema and the command-line flags of a study."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kvprobe.errors import UserError
from kvprobe.names import unknown

Config = TypeVar("Config")


def from_mapping(kind: type[Config], settings: Mapping[str, Any]) -> Config:
    """A config from plain settings.

    Raises:
        UserError: an unknown setting (the near match is named) or a value of the wrong type or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in fields:
            raise UserError(unknown("setting", name, fields))
        expected = fields[name].type
        if expected is float and type(value) is int:
            continue
        if isinstance(expected, type) and type(value) is not expected:
            raise UserError(f"Setting {name!r} is {value!r}, a {type(value).__name__}; expected a {expected.__name__}.")
    return kind(**settings)
