"""From a finished run to published probes: the probes of the run, with the command that makes them again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.probes.card import CARD, Made
from kvprobe.probes.probe import Probe

PROBES = "probes"
"""Where a run has its probes: a folder each, as `Probe.save` writes it."""


@runtime_checkable
class FinishedRun(Protocol):
    """What publishing needs of a `kvprobe.experiments.runs.Run`, whose room lies above this one."""

    @property
    def path(self) -> Path: ...
    @property
    def finished(self) -> bool: ...
    @property
    def environment(self) -> Mapping[str, Any]: ...


def publish(run: FinishedRun, to: Path, name: str | None = None) -> list[Path]:
    """Write the probes of a finished run to `to`, a folder each, and return these folders.

    Args:
        name: only this one.

    Raises:
        UserError: the run is unfinished, has no probes or none of this name, its probes read other weights than it ran
            on, or another probe of the same name is there already.
    """
    if not run.finished:
        raise UserError(f"{run.path} is unfinished; start it again to resume, then publish.")
    made_folders = {path.parent.name: path.parent for path in sorted((run.path / PROBES).glob(f"*/{CARD}"))}
    if not made_folders:
        raise UserError(
            f"{run.path} has no probes; publish a run of the leakage study, of more than one context and this version."
        )
    if name is not None and name not in made_folders:
        raise UserError(unknown(f"probe in {run.path}", name, made_folders))

    environment = run.environment
    made = Made(
        command=_line(environment.get("command")),
        commit=_line(environment.get("commit")),
        kvprobe=_line(environment.get("versions", {}).get("kvprobe")),
        seed=environment.get("seed") or 0,
    )
    chosen = {place: Probe.load(folder) for place, folder in made_folders.items() if name in (None, place)}
    for place, probe in chosen.items():
        if probe.name != place:
            raise UserError(
                f"{made_folders[place]} holds the card of {probe.name!r}; a probe's folder has its name, so rename it."
            )
        if probe.card.weights != environment["model"]:
            raise UserError(
                f"{probe.name} reads the model {probe.card.weights}, but {run.path} ran on {environment['model']}; "
                f"run it again."
            )
        _refuse_other(probe, to / probe.name)
    return [replace(probe, card=replace(probe.card, made=made)).save(to / probe.name) for probe in chosen.values()]


def _refuse_other(probe: Probe, folder: Path) -> None:
    """Refuse to write over the probe of another run."""
    if not folder.exists():
        return
    there = Probe.load(folder) if (folder / CARD).is_file() else None
    if (
        there is None
        or there.card.weights != probe.card.weights
        or not there.linear.weights.equal(probe.linear.weights)
    ):
        raise UserError(f"{folder} holds something else; delete it, or publish to another folder with --to.")


def _line(value: object) -> str:
    """A recorded value as one printable line for a card."""
    return "".join(letter if letter.isprintable() else " " for letter in str(value or ""))[:600]
