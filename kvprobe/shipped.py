"""The place of the data that ships with kvprobe."""

from pathlib import Path


def shipped(kind: str) -> Path:
    """The data folder `analyses`, `models` or `probes`: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind
