"""How long runs take, as measured: `timing.json` of a run, and `analyses/durations.json` of the presets that ship.

`benchmarks/durations.py` collects the second from the first.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvprobe.experiments.settings import Settings, as_mapping, digest_of, folder_of
from kvprobe.files import read_json
from kvprobe.progress import Stage, Timing
from kvprobe.shipped import shipped

TIMING = "timing.json"
"""The file of a run that was not interrupted; it says what the run took."""


@dataclass(frozen=True)
class Duration:
    """What a run took.

    Attributes:
        study, preset: their names; no preset for other settings than those of one.
        machine: such as `Linux x86_64, 2 cores`.
        peak_bytes: the most memory that the process held; 0 where the system does not say.
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

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Duration":
        timing = dict(record["timing"])
        stages = tuple(Stage(**stage) for stage in timing.pop("stages"))
        return cls(**{**record, "timing": Timing(**timing, stages=stages)})


@cache
def durations() -> dict[str, Duration]:
    """What was measured of the presets that ship, by `digest_of` their settings."""
    records = read_json(shipped("analyses") / "durations.json", 2**24)
    return {digest: Duration.from_record(record) for digest, record in records.items()}


def plan(study: str, config: Settings, root: Path, name: str | None) -> Iterator[str]:
    """What a run would do, in lines; nothing is loaded or written."""
    folder = folder_of(study, config, root, name)
    states = {"metrics.json": "is finished: its report would be written again", "parts": "would be resumed"}
    state = next((state for file, state in states.items() if (folder / file).exists()), "would be new")
    yield f"{study} would run with these settings:"
    yield from (f"  {setting}: {value}" for setting, value in as_mapping(config).items())
    yield f"The run {folder} {state}."
    took = durations().get(digest_of(study, config))
    if took is None:
        measured = ", ".join(f"{other.preset} {other}" for other in durations().values() if other.study == study)
        yield f"How long it takes was not measured. Of this study: {measured or 'nothing was'}."
        return
    yield f"It took {took} and {took.peak_bytes / 1e9:.1f} GB of memory when it was measured, of which"
    for place, stage in enumerate(took.timing.stages):
        yield f"  {stage.name}: {stage.total:,} × {stage.unit}, {minutes(took.timing.lasted(place))}"


def minutes(seconds: float) -> str:
    """Such as `40 s`, `2.4 min` or `12 min`."""
    if seconds < 55:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 570 else f"{seconds / 60:.0f} min"


def peak_bytes() -> int:
    """The most memory that this process has held; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
