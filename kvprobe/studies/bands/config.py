"""Settings of the band study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.trial_settings import chosen, listed, percents, require_trial
from kvprobe.studies.published import published

BANDS = {"all": 1, "halves": 2, "quarters": 4}
"""Into how many bands the layers are cut."""
NOISES = ("layer", "head", "channel", "effect")
PARTS = ("kv", "k", "v")


@dataclass(frozen=True)
class Config:
    """Settings of the band study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        tasks: recite, retrieve, needle, gsm8k, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers; commas between.
        samples: items of each task.
        bands: which cuts of the layers to strike: quarters, halves, all; commas between.
        rates: share of the slots that is struck in a band, in percent; commas between.
        single: rate in percent at which every single layer is struck; 0 leaves that out.
        noises: what Gaussian noise is matched to: layer, head, channel (with covariance), effect; commas between.
        parts: kv, k, v; commas between.
        timing: fresh (drawn anew before each token, and undone after it), once (after the prompt, and left there), or
            piling (anew before each token, and left there).
        unit: what is drawn at once: slot (the same in all layers), layer (each its own slots), head, or number.
        follow: also measure KL to the clean run, which takes as long again.
        published: a table to print beside what was measured: seed001-bands-7b; none by default.
        seed: of items and random draws.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    tasks: str = "retrieve"
    samples: int = 14
    bands: str = "quarters,halves,all"
    rates: str = "1,2,4"
    single: float = 10.0
    noises: str = "layer,head,channel,effect"
    parts: str = "kv,k,v"
    timing: str = "fresh"
    unit: str = "slot"
    follow: bool = True
    published: str = ""
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_trial(self.samples, self.timing, self.unit, self.seed)
        require("single", self.single, 0, 100)
        percents("rates", self.rates)
        listed("tasks", self.tasks, str)
        chosen("bands", self.bands, BANDS)
        chosen("noises", self.noises, NOISES)
        chosen("parts", self.parts, PARTS)
        if self.published:
            self._require_published()

    def _require_published(self) -> None:
        """Refuse a table with which nothing here could be compared."""
        table = published(self.published)
        tasks = [name.partition(":")[0] for name in listed("tasks", self.tasks, str)]
        if table.task not in tasks or not any(row.startswith(("quarter", "half")) for row in table.rows):
            raise UserError(
                f"Setting 'published' is {self.published!r}, a table of {', '.join(table.rows)} on {table.task}; expected a "
                f"table of bands on one of this run's tasks ({self.tasks}), as seed001-bands-7b with gsm8k."
            )
