"""A model's `config.json`, read as untrusted input."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe.errors import UserError
from kvprobe.files import read_json

LARGEST_FILE = 4 << 20
"""Bytes. The longest config on the hub is a few hundred kilobytes of quantisation exceptions."""

LARGEST = 1 << 40
"""No size in a config may be larger, so that a product of a few of them can still be printed."""

_MISSING: Any = object()


@dataclass(frozen=True)
class Config:
    """The fields of one model, or of the text model within one; each is checked when it is read.

    Attributes:
        name: of the model, in error messages.
        fields: as in the file.
    """

    name: str
    fields: Mapping[str, object]

    @property
    def kind(self) -> str:
        """The family, `model_type`."""
        return self.word("model_type")

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.fields.get(name) is not None

    def size(self, *names: str, default: int | None = _MISSING, low: int = 1) -> int:
        """A whole number under the first of these names that the config has.

        Raises:
            UserError: it is missing without a default, or is not a whole number of at least `low`.
        """

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST

        return self._checked(names, default, fits, f"a whole number of at least {low}")

    def optional_size(self, *names: str) -> int | None:
        """Such a number; None if the field is null or missing."""
        present = [name for name in names if name in self.fields]
        return self.size(present[0]) if present and self.has(present[0]) else None

    def flag(self, *names: str, default: bool | None = _MISSING) -> bool:
        """True or false; null counts as missing.

        Raises:
            UserError: it is missing without a default, or is neither true nor false.
        """
        return bool(self._checked(names, default, lambda value: isinstance(value, bool | None), "true or false"))

    def word(self, *names: str, default: str = _MISSING) -> str:
        """A text.

        Raises:
            UserError: it is missing without a default, or is not a text.
        """
        return self._checked(names, default, lambda value: isinstance(value, str), "a text")

    def items(self, name: str, length: int | None = None) -> list[object]:
        """A list, with `length` entries if one is given.

        Raises:
            UserError: it is missing, not a list, or of another length.
        """
        value = self._checked((name,), _MISSING, lambda value: isinstance(value, list), "a list")
        if length is not None and len(value) != length:
            raise UserError(
                f"{self.name} has {len(value)} {name} in its config for {length} layers; give one for each."
            )
        return value

    def within(self, name: str) -> "Config":
        """The config nested under this name, such as `text_config`.

        Raises:
            UserError: it is missing, or not a mapping.
        """
        fields = self._checked((name,), _MISSING, lambda value: isinstance(value, Mapping), "a mapping of fields")
        return Config(self.name, fields)

    def _checked(self, names: tuple[str, ...], default: object, fits: Callable[[Any], bool], expected: str) -> Any:
        name, value = self._find(names, default)
        if not fits(value):
            raise UserError(f"{self.name} has {name}={_short(value)} in its config; it must be {expected}.")
        return value

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                return name, value
        if default is not _MISSING:
            return names[0], default
        raise UserError(
            f"{self.name} has no {names[0]} in its config, which the budget of a "
            f"{self.fields.get('model_type', 'model')} needs; add the field."
        )


def read_config(path: Path, name: str) -> Config:
    """The config in a JSON file.

    Raises:
        UserError: the file is too large, or not JSON with named fields.
    """
    fields = read_json(path, LARGEST_FILE, "give a model's config.json")
    return Config(name, fields)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
