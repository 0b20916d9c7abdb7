"""Settings that studies of faults share. Imports nothing heavy, so that the command line can show them at once."""

from collections.abc import Callable, Collection
from typing import TypeVar

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.names import unknown

TIMINGS = {
    "once": "written once, after the prompt, and left there",
    "fresh": "drawn anew before each token, and undone after it",
    "piling": "drawn anew before each token, and left there",
}
FACT_KINDS, FACTS_OF_A_KIND = ("code", "name", "number", "instruction"), 12
"""What `kvprobe.tasks.facts` holds, which a test compares."""
UNITS = ("slot", "layer", "head", "number")

Value = TypeVar("Value")


def listed(setting: str, text: str, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """A setting's values, with commas between, each once.

    Args:
        read: a value from its text; may raise ValueError.
    """
    found = tuple(read(piece.strip()) for piece in text.split(",") if piece.strip())
    if not found or len(set(found)) != len(found):
        raise UserError(
            f"Setting {setting!r} is {text!r}; expected one or more values, each once, with commas between."
        )
    return found


def chosen(setting: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """A setting's names, all of which are known."""

    def read(name: str) -> str:
        if name not in known:
            raise UserError(f"Setting {setting!r}: {unknown('value', name, known)}")
        return name

    return listed(setting, text, read)


def percents(setting: str, text: str) -> tuple[float, ...]:
    """A setting's rates in percent, smallest first."""

    def read(piece: str) -> float:
        try:
            value = float(piece)
        except ValueError:
            value = -1.0
        if not 0 < value <= 100:
            raise UserError(
                f"Setting {setting!r} is {text!r}, in which {piece!r} is no rate; expected percents above 0, to 100."
            )
        return value

    return tuple(sorted(listed(setting, text, read)))


def require_trial(samples: int, timing: str, unit: str, seed: int) -> None:
    """Refuse settings out of range that all studies of faults share."""
    require("samples", samples, 2, 100_000)
    require("seed", seed, 0)
    chosen("timing", timing, TIMINGS)
    chosen("unit", unit, UNITS)
