"""How operators show themselves: their name, and the settings that are not the usual ones."""

from dataclasses import MISSING, fields
from typing import Any


def described(operator: Any) -> str:
    """A dataclass as one would write it."""
    given = [(field, getattr(operator, field.name)) for field in fields(operator) if field.init]
    shown = ", ".join(
        f"{field.name}={value}" for field, value in given if field.default is MISSING or value != field.default
    )
    return f"{type(operator).__name__}({shown})"
