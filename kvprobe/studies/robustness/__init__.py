"""How much of the cache can be damaged, and how, before answers go wrong?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AnswerSettings, Timing, UnitName, require_rates


@dataclass(frozen=True, kw_only=True)
class Config(AnswerSettings):
    """Settings of the robustness study.

    Attributes:
        faults: by the names of the report's table.
        rates: share of the slots that is struck, in percent.
        repeats: draws of each fault at each rate.
        timing: fresh (drawn anew before each token, and undone after it), once (after the prompt, and left there), or
            piling (anew before each token, and left there).
        unit: what is drawn at once: slot (the same in all layers), layer (each its own slots), head, or number.
        procedure: rate in percent at which canarypwn's faults are also run in every timing and unit; 0 leaves that out.
        reported: a table to print beside what was measured, such as canarypwn-7b; none by default.
    """

    tasks: tuple[str, ...] = ("recite", "retrieve", "needle")
    faults: tuple[str, ...] = (
        "gaussian",
        "gaussian-channel",
        "zeros",
        "zero-values",
        "distractor",
        "permuted",
        "permuted-keys",
        "pointers-repeated",
        "foreign-block",
        "overlapping",
        "shifted",
        "fp8-scale",
    )
    rates: tuple[float, ...] = (2.0, 5.0, 10.0, 20.0, 30.0, 50.0)
    repeats: int = ranged(1, 1, 1000)
    timing: Timing = "fresh"
    unit: UnitName = "slot"
    procedure: float = ranged(10.0, 0, 100)
    reported: str = ""

    def validate(self) -> None:
        require_rates("rates", self.rates)


run = STUDIES["robustness"].run
