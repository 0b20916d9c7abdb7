"""Settings that studies of faults share. Imports nothing heavy, so that the command line can show them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged

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
AVAILABLE_CONTEXTS = 48
"""Of `kvprobe.tasks.passcode`."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(Settings):
    """Settings of studies in which items of tasks are answered.

    Attributes:
        tasks: recite, retrieve, needle, gsm8k, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers.
        samples: items of each task.
        follow: also measure KL to the clean run, which takes as long again.
        together: items answered in one batch, as far as their rows fit. Where items have few conditions, this takes
            about a third less time. Rounding, and so a near tie, may depend on it.
        seed: of items and random draws.
    """

    tasks: tuple[str, ...] = ("retrieve",)
    samples: int = ranged(20, 2, 100_000)
    follow: bool = True
    together: int = ranged(1, 1, 64)


def require_samples(samples: int, groups: int, of: str, folds: int) -> None:
    """Refuse samples that are too few for so many groups and folds, or that groups cannot share equally.

    Args:
        of: what groups are called.
    """
    require("samples", samples, max(2 * groups, 10 * folds), 40_000)
    if samples % groups:
        below = samples - samples % groups
        raise UserError(
            f"Setting 'samples' is {samples}, not a multiple of the {groups} {of}; expected {below} or "
            f"{below + groups}."
        )


def require_rates(setting: str, rates: Sequence[float], whole: int = 100, of: str = "percents") -> None:
    """Refuse a rate that is not above 0, or more than the whole."""
    for rate in rates:
        if not 0 < rate <= whole:
            raise UserError(f"Setting {setting!r} has {rate:g}; expected {of} above 0, up to {whole}.")
