"""A study of the user's own, to begin with: a small one that runs, to be changed line by line."""

from importlib import resources
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.files import write_whole


def write_skeleton(name: str, folder: Path = Path()) -> Path:
    """Write `name`.py and return its path.

    Raises:
        UserError: the name is no Python name, or the file exists.
    """
    if not name.isidentifier():
        raise UserError(f"{name!r} cannot name a study; use letters, digits and underscores, such as hidden_thirds.")
    path = folder / f"{name}.py"
    if path.exists():
        raise UserError(f"{path} exists; choose another name, or delete it.")
    text = resources.files("kvprobe.experiments").joinpath("skeleton.txt").read_text(encoding="utf-8")
    return write_whole(path, text.replace('"NAME"', f'"{name}"'))
