"""Presets: the YAML files of `analyses/`, which ship with kvprobe, and those that a user writes.

A file names its study and the settings that differ from the study's defaults, and says what it asks (`question`),
and where the question comes from (`source`). A run's own `config.yaml` is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvprobe.errors import UserError
from kvprobe.files import read_yaml
from kvprobe.names import unknown
from kvprobe.shipped import shipped

_KEYS = ("study", "settings", "question", "source")


@dataclass(frozen=True)
class Preset:
    """A study with settings."""

    name: str
    study: str
    settings: Mapping[str, Any]
    question: str = ""
    source: str = ""


@cache
def presets() -> dict[str, Preset]:
    """The presets that ship with kvprobe, by name."""
    return {path.stem: read_preset(path) for path in sorted(shipped("analyses").glob("*.yaml"))}


def read_preset(path: Path) -> Preset:
    """A preset from a file.

    Raises:
        UserError: unreadable YAML, an unknown key, or no study.
    """
    content = read_yaml(path)
    for key in content:
        if key not in _KEYS:
            raise UserError(f"In {path}: {unknown('key', str(key), _KEYS)}")
    settings = content.get("settings") or {}
    named = isinstance(settings, dict) and all(isinstance(key, str) for key in settings)
    if not isinstance(content.get("study"), str) or not named:
        raise UserError(f"{path} must name its 'study' and may hold a mapping of 'settings'.")
    return Preset(
        name=path.stem,
        study=content["study"],
        settings=settings,
        question=str(content.get("question", "")).strip(),
        source=str(content.get("source", "")).strip(),
    )
