"""Where the data is that ships with kvprobe."""

from pathlib import Path


def shipped(kind: str) -> Path:
    """Where the data folder `analyses`, `models` or `probes` is: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_shipped" / kind
    return inside if inside.is_dir() else package.parent / kind
