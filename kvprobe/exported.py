"""Results as plain data: one JSON object each, of a schema with a version, for programs and pages in any language."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

SCHEMA = "results.schema.json"
"""The JSON Schema (2020-12) of all that `Exported.to_json` writes: a definition for each kind, by its name."""


class Exported:
    """A result that gives itself as JSON.

    A subclass says in `_plain` what it holds; its version is that of its definition in the schema.
    """

    def to_json(self, indent: int | None = None) -> str:
        """The result as one JSON object of the published schema; what is not finite is null.

        Args:
            indent: of nested lines; one line by default.
        """
        return json.dumps(self.to_plain(), indent=indent, ensure_ascii=False, allow_nan=False)

    def to_plain(self) -> dict[str, Any]:
        """The same as Python's lists, mappings, texts and numbers."""
        kind = type(self).__name__
        version = json_schema()["$defs"][kind]["properties"]["version"]["const"]
        return {"kind": kind, "version": version, **cast(dict[str, Any], plain(self._plain()))}

    def _plain(self) -> Mapping[str, object]:
        assert is_dataclass(self)
        return {field.name: getattr(self, field.name) for field in fields(self)}


@cache
def json_schema() -> dict[str, Any]:
    """The JSON Schema of all results that have `to_json`."""
    return json.loads(files("kvprobe").joinpath(SCHEMA).read_text(encoding="utf-8"))


def plain(value: Any) -> object:
    """A value as JSON holds it: tables as lists by column, arrays as nested lists, dataclasses by field."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "columns") and hasattr(value, "to_dict"):
        table = value if value.index.name is None else value.reset_index()
        return {str(name): [plain(entry) for entry in table[name].tolist()] for name in table.columns}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in cast(Mapping[object, object], value).items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(entry) for entry in cast(Sequence[object], value)]
    return None if type(value).__name__ == "NAType" else str(value)  # pandas' missing entry
