"""Settings that studies of faults share. Imports nothing heavy, so that the command line can show them at once."""

from collections.abc import Sequence
from typing import Literal, get_args

from kvprobe.errors import UserError

Timing = Literal["once", "fresh", "piling"]
"""When a fault strikes; see `TIMINGS`."""
UnitName = Literal["slot", "layer", "head", "number"]
"""What is drawn at once; `kvprobe.faults.scope.Unit` without its imports."""
FactKind = Literal["code", "name", "number", "instruction"]
"""The facts that `kvprobe.tasks.facts` holds, which a test compares."""

TIMINGS: dict[Timing, str] = {
    "once": "written once, after the prompt, and left there",
    "fresh": "drawn anew before each token, and undone after it",
    "piling": "drawn anew before each token, and left there",
}
FACT_KINDS: tuple[FactKind, ...] = get_args(FactKind)
FACTS_OF_A_KIND = 12


def require_percents(setting: str, rates: Sequence[float]) -> None:
    """Refuse a rate that is not a percentage above 0."""
    for rate in rates:
        if not 0 < rate <= 100:
            raise UserError(f"Setting {setting!r} has {rate:g}; expected percents above 0, up to 100.")
