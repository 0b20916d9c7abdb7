"""Which layers' caches can bear noise or pruning, and how much of the former is the noise's own scale?"""

from dataclasses import dataclass
from typing import Literal, get_args

from kvprobe.errors import UserError
from kvprobe.experiments.settings import ranged
from kvprobe.report.reported import reported
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AnswerSettings, Timing, UnitName, require_rates

Cut = Literal["all", "halves", "thirds", "quarters", "sixths"]
Scale = Literal[
    "layer", "head", "channel", "effect",
    "mean", "spread", "covariance", "mean+spread", "mean+covariance", "spread+covariance",
]  # fmt: skip
Neutral = Literal["zeros", "scaffold"]
Pruning = Literal["random", "random-sinks", "window"]
Noise = Literal[Scale, Neutral, Pruning]
Part = Literal["kv", "k", "v"]

BANDS: dict[Cut, int] = {"all": 1, "halves": 2, "thirds": 3, "quarters": 4, "sixths": 6}
"""Into how many bands the layers are cut."""
NOISES: tuple[Noise, ...] = get_args(Noise)
NEUTRAL: dict[Neutral, str] = {
    "zeros": "nothing but zeros",
    "scaffold": "the slots of a neutral scaffold (the same chat template around filler)",
}
"""What may stand in place of noise: what it is, at length. Only the prompt's slots are struck, since the scaffold has
no others."""
PRUNED: dict[Pruning, str] = {
    "random": "random slots",
    "random-sinks": "random, first few spared",
    "window": "all but first and last",
}
"""Ways of pruning, which hide slots where noise replaces them: which slots go."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class Config(AnswerSettings):
    """Settings of the band study.

    Attributes:
        bands: which cuts of the layers to strike.
        rates: share of the slots that is struck in a band, in percent.
        single: rate in percent at which every single layer is struck; 0 leaves that out.
        noises: what Gaussian noise is matched to; channel includes the covariance. What lies between layer and channel
            names what each channel has for itself: mean, spread, covariance, or two of them. Or what stands in place of
            noise in the prompt: zeros, or the slots of a neutral scaffold. Or how slots are pruned in place of noise:
            random, random-sinks (spares the first four), window (keeps the first four and the last).
        parts: K and V together, or one of them.
        timing: fresh (drawn anew before each token, and undone after it), once (after the prompt, and left there), or
            piling (anew before each token, and left there).
        unit: what is drawn at once: slot (the same in all layers), layer (each its own slots), head, or number.
        reported: a table to print beside what was measured, such as canarypwn-bands-7b; none by default.
    """

    samples: int = ranged(32, 2, 100_000)
    bands: tuple[Cut, ...] = ("quarters", "halves", "all")
    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    single: float = ranged(10.0, 0, 100)
    noises: tuple[Noise, ...] = NOISES[:4]
    parts: tuple[Part, ...] = PARTS
    timing: Timing = "fresh"
    unit: UnitName = "slot"
    reported: str = ""

    def validate(self) -> None:
        require_rates("rates", self.rates)
        if (pruned := PRUNED.keys() & self.noises) and (
            len(pruned) < len(self.noises) or (self.parts, self.timing) != (("kv",), "once") or self.unit == "number"
        ):
            raise UserError(
                f"Setting 'noises' has {', '.join(sorted(pruned))}, which hide whole slots after the prompt; expected "
                "no noise beside them, parts=kv, timing=once, and another unit than number."
            )
        if not self.reported:
            return
        table = reported(self.reported)
        tasks = [name.partition(":")[0] for name in self.tasks]
        if table.task not in tasks or not any(row.startswith(("quarter", "half")) for row in table.rows):
            raise UserError(
                f"Setting 'reported' is {self.reported!r}, a table of {', '.join(table.rows)} on {table.task}; "
                f"expected a table of bands on one of this run's tasks ({', '.join(self.tasks)}), as "
                "canarypwn-bands-7b with gsm8k."
            )


run = STUDIES["bands"].run
