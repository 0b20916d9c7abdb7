"""From a finished run to published probes: the probes that the run kept, with the command that makes them again."""

import tempfile
from dataclasses import replace
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.experiments.runs import Run
from kvprobe.names import unknown
from kvprobe.probes.card import CARD, WEIGHTS, Made
from kvprobe.probes.probe import Probe

KEPT = "probes"
"""Where a run keeps its probes: a folder each, as `Probe.save` writes it."""


def publish(run: Run, to: Path, name: str | None = None) -> list[Path]:
    """Write the probes of a finished run to `to`, a folder each, and return these folders.

    Args:
        name: only this one.

    Raises:
        UserError: the run is unfinished, keeps no probes or none of this name, its probes read other weights than it ran
            on, or another probe of the same name is there already.
    """
    if not run.finished:
        raise UserError(f"{run.path} is unfinished; start it again to resume, then publish.")
    kept = {path.parent.name: path.parent for path in sorted((run.path / KEPT).glob(f"*/{CARD}"))}
    if not kept:
        raise UserError(
            f"{run.path} kept no probes; publish a run of the leakage study, of more than one context and this version."
        )
    if name is not None and name not in kept:
        raise UserError(unknown(f"probe in {run.path}", name, kept))

    environment = run.environment
    made = Made(
        command=_line(environment.get("command")),
        commit=_line(environment.get("commit")),
        kvprobe=_line(environment.get("versions", {}).get("kvprobe")),
        seed=environment.get("seed") or 0,
    )
    chosen = {each: Probe.load(folder) for each, folder in kept.items() if name in (None, each)}
    for each, probe in chosen.items():
        if probe.name != each:
            raise UserError(
                f"{kept[each]} holds the card of {probe.name!r}; a probe's folder has its name, so rename it."
            )
        if probe.card.weights != environment["model"]:
            raise UserError(
                f"{probe.name} reads the model {probe.card.weights}, but {run.path} ran on {environment['model']}; run it again."
            )
        _refuse_other(probe, to / probe.name)
    return [_saved(replace(probe, card=replace(probe.card, made=made)), to / probe.name) for probe in chosen.values()]


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


def _saved(probe: Probe, folder: Path) -> Path:
    """Written beside its place and then moved there, file by file, so that no half of one is ever found, the card comes last, and
    what else lies in the folder stays."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as made:
        probe.save(made)
        for name in (WEIGHTS, "README.md", CARD):
            (Path(made) / name).replace(folder / name)
    return folder


def _line(value: object) -> str:
    """Something that a run recorded, as a card takes it."""
    return "".join(each if each.isprintable() else " " for each in str(value or ""))[:600]
