"""What other installed packages add: entry points of the groups `kvprobe.policies` and `kvprobe.studies`. Their code is
imported when its name is used."""

from importlib.metadata import entry_points
from typing import Any, Literal

from kvprobe.errors import UserError
from kvprobe.names import one_line

Kind = Literal["policies", "studies"]


def extensions(kind: Kind) -> dict[str, Any]:
    """Entry points (of the standard library, or of the backport that another package imported) by name."""
    return {point.name: point for point in entry_points(group=f"kvprobe.{kind}")}


def extension(kind: Kind, name: str) -> object:
    """What a name stands for.

    Raises:
        UserError: its code cannot be imported.
    """
    point = extensions(kind)[name]
    try:
        return point.load()
    except Exception as error:
        raise UserError(
            f"{name!r} of {package(point)} cannot be imported: {type(error).__name__}: {one_line(error)}."
        ) from error


def package(point: Any) -> str:
    """The package that an entry point belongs to."""
    return "an unnamed package" if point.dist is None else f"package {point.dist.name}"
