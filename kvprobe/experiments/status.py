"""How far a run is, from its files alone; nothing heavy is imported, and a run that is at work is not disturbed."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from kvprobe.durations import durations, minutes
from kvprobe.environment import short_commit
from kvprobe.errors import UserError
from kvprobe.experiments.settings import digest_of_settings, folder_with_run
from kvprobe.experiments.stages import FAILED, BegunStage, begun_stages, cases_in
from kvprobe.files import claimed_by, expanded, read_json, read_yaml

MOST_BYTES = 2**28
"""Of `env.json`."""
WIDTH = 100


@dataclass(frozen=True)
class StageStatus:
    """How far a stage is.

    Attributes:
        doing: as its progress bar says.
        total, done: cases, of this `unit`.
        failed: why cases failed that were not measured since, by their number from 0.
        last: when the last part was written, in seconds since 1970; None if there is none.
        left: seconds that its other cases take, at the pace of the last process that had it; None where that process
            has not finished a case.
    """

    name: str
    doing: str
    unit: str
    total: int
    done: int
    failed: Mapping[int, str]
    last: float | None
    left: float | None

    def __str__(self) -> str:
        return f"{self.doing}: {self.done} of {self.total} × {self.unit}" + f", {len(self.failed)} failed" * bool(
            self.failed
        )


@dataclass(frozen=True)
class RunStatus:
    """How far a run is.

    Attributes:
        preset: whose settings these are, if any.
        settings: all of them; and on what it was begun: `model` is a fingerprint, `commit` is of kvprobe's checkout.
        state: `finished`, `at work` (a process holds it), `begun`, or `failed` (begun, and a case failed).
        held_by: the process that holds it.
        stages: that were begun, in order.
        left: seconds to the end of the run, while a stage is unfinished; None where what follows was never measured.
    """

    path: Path
    study: str
    preset: str | None
    settings: Mapping[str, Any]
    model: str
    device: str
    commit: str | None
    command: str
    state: str
    held_by: str | None
    stages: Sequence[StageStatus]
    last: float | None
    left: float | None

    @property
    def present(self) -> StageStatus | None:
        """The stage that is unfinished, if there is one."""
        return next((stage for stage in reversed(self.stages) if stage.done < stage.total), None)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "path": str(self.path)}

    def line(self) -> str:
        """In one line."""
        about = [self.state]
        if self.state != "finished":
            about += [str(self.present or (self.stages[-1] if self.stages else "no stage was begun"))]
            about += [self._left()] if self.present else []
        return f"{self.path}  {self.preset or self.study}: {'; '.join(about)}{self._last()}"

    def lines(self) -> Iterator[str]:
        """At length."""
        held = f", held by {self.held_by}" if self.held_by else ""
        yield f"{self.path}: {self.study}{f' ({self.preset})' * bool(self.preset)}, {self.state}{held}{self._last()}"
        yield f"begun by `{self.command}`, commit {short_commit(self.commit or 'unknown')}"
        settings = (f"{name}={_short(value)}" for name, value in self.settings.items())
        yield from wrap(f"{self.device}; {', '.join(settings)}", WIDTH, subsequent_indent="  ")
        for stage in self.stages:
            yield f"  {stage}"
            for case, reason in stage.failed.items():
                yield f"    case {case} failed: {reason}"
        if self.present:
            yield self._left()
        if self.state in ("begun", "failed"):
            yield "No process holds it; the same command goes on with it."

    def _left(self) -> str:
        stage = self.present
        if stage is None or stage.left is None:
            return "how long it will take is not known before a case is done"
        of_stage = f"about {minutes(stage.left)} more of this stage"
        rest = "how long the rest takes was not measured" if self.left is None else f"{minutes(self.left)} to the end"
        return f"{of_stage}, {rest}"

    def _last(self) -> str:
        return "" if self.last is None else f" (last written {minutes(max(0.0, time.time() - self.last))} ago)"


def status(path: Path, presets: Mapping[str, str] | None = None) -> RunStatus:
    """How far a run is.

    Args:
        presets: names of presets, by the digest of their settings.

    Raises:
        UserError: there is no run at `path`, or its files were altered.
    """
    folder = folder_with_run(path)
    config = read_yaml(folder / "config.yaml")
    made = read_json(folder / "env.json", MOST_BYTES) if (folder / "env.json").is_file() else {}
    study, settings = str(config.get("study")), config.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    digest = digest_of_settings(study, settings)
    holder, finished = claimed_by(folder), (folder / "metrics.json").is_file()
    parts = folder / "parts"
    begun = [] if finished else begun_stages(parts)
    stages = [_status_of(parts, stage, at_work=holder is not None) for stage in begun]
    states = {"finished": finished, "at work": holder, "failed": any(stage.failed for stage in stages)}
    written = [(folder / "metrics.json").stat().st_mtime] if finished else [one.last for one in stages if one.last]
    return RunStatus(
        folder,
        study,
        (presets or {}).get(digest),
        settings,
        str(made.get("model", "unknown")),
        str(made.get("device", "unknown")),
        None if made.get("commit") is None else str(made["commit"]),
        str(made.get("command", "unknown")),
        next((state for state, holds in states.items() if holds), "begun"),
        holder,
        stages,
        max(written, default=None),
        _to_the_end(digest, stages),
    )


def statuses(path: Path, presets: Mapping[str, str] | None = None) -> list[RunStatus]:
    """Of all runs in a folder.

    Raises:
        UserError: there is none.
    """
    folders = [config.parent for config in sorted(expanded(path).glob("*/config.yaml"))]
    if not folders:
        raise UserError(f"There is no run in {path}; give the folder of a run, or one that holds runs.")
    return [status(folder, presets) for folder in folders]


def _status_of(parts: Path, stage: BegunStage, at_work: bool) -> StageStatus:
    done, failed = cases_in(parts, stage), cases_in(parts, stage, FAILED)
    times = [path.stat().st_mtime for path in done.values() if path.is_file()]
    left = None
    if stage.attempts and times:
        began, last = stage.attempts[-1].began, max(times)
        fresh = sum(when > began for when in times)
        if fresh:
            left = ((time.time() if at_work else last) - began) / fresh * (stage.total - len(times))
    return StageStatus(
        stage.name,
        stage.doing,
        stage.unit,
        stage.total,
        len(times),
        {case: _text(path) for case, path in failed.items() if case not in done},
        max(times, default=None),
        left,
    )


def _to_the_end(digest: str, stages: Sequence[StageStatus]) -> float | None:
    """Seconds to the end of a run whose settings were measured before: what this stage still takes, and the following
    ones as much slower or faster than then as this one is."""
    present = next((stage for stage in reversed(stages) if stage.done < stage.total), None)
    measured = durations().get(digest)
    if present is None or present.left is None or measured is None:
        return None
    timing = measured.timing
    place = next((place for place, stage in enumerate(timing.stages) if stage.name == present.doing), None)
    if place is None or not (lasted := timing.lasted(place)):
        return None
    following = timing.seconds - timing.stages[place].began - lasted
    pace = present.left / (present.total - present.done) * present.total / lasted
    return present.left + following * pace


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= WIDTH // 2 else f"{text[: WIDTH // 2]}…"


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return " ".join(file.read(500).split())
