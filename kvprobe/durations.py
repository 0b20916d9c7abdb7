"""How long runs take, as measured: `timing.json` of a run, and `analyses/durations.json` of the presets that ship.

`benchmarks/durations.py` collects the second from the first.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvprobe.files import read_json, write_whole
from kvprobe.progress import Stage, Timing
from kvprobe.shipped import shipped

TIMING = "timing.json"
"""The file of a run that was not interrupted; it says what the run took."""


@dataclass(frozen=True)
class Duration:
    """What a run took.

    Attributes:
        study, preset: their names; no preset for other settings than those of one.
        machine: such as `Linux x86_64, 2 cores with AVX2`.
        peak_bytes: the most memory that the run held; 0 where the system does not say.
    """

    study: str
    preset: str
    machine: str
    peak_bytes: int
    timing: Timing

    def __str__(self) -> str:
        cores = self.machine.split(", ")[-1]
        return f"{minutes(self.timing.seconds)} on {cores} ({minutes(self.timing.cpu_seconds)} of CPU)"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, run: Path) -> Path:
        """Write `timing.json` into the folder of a run."""
        return write_whole(run / TIMING, json.dumps(self.record()))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Duration":
        timing = dict(record["timing"])
        stages = tuple(Stage(**stage) for stage in timing.pop("stages"))
        return cls(**{**record, "timing": Timing(**timing, stages=stages)})


@cache
def durations() -> dict[str, Duration]:
    """What was measured of the presets that ship, by the digest of their settings."""
    records = read_json(shipped("analyses") / "durations.json", 2**24)
    return {digest: Duration.from_record(record) for digest, record in records.items()}


def minutes(seconds: float) -> str:
    """Such as `40 s`, `2.4 min` or `12 min`."""
    if seconds < 55:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 570 else f"{seconds / 60:.0f} min"
