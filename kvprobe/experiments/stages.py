"""Which stages a run has begun and which cases failed, noted beside their parts until the run is finished."""

import json
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.files import PARTIAL, read_json, write_whole
from kvprobe.names import one_line
from kvprobe.plain_data import Limits, filled

STAGES, FAILED, MODELS = ".stages.json", ".failed", ".models.json"
"""The file that lists stages, the ending of one that says why a case failed, and the file that says which models
workers have loaded beside that of the run."""
LIMITS = Limits(text=4096, entries=10_000)


@dataclass(frozen=True)
class Attempt:
    """A process begins with a stage, or goes on with it: when (seconds since 1970), and how many parts are there."""

    began: float
    there: int


@dataclass(frozen=True)
class BegunStage:
    """A stage that a run has begun.

    Attributes:
        name: in the names of its parts, which end in `suffix`.
        doing, unit: as its progress bar says.
        total: cases.
    """

    name: str
    suffix: str
    doing: str
    unit: str
    total: int
    attempts: tuple[Attempt, ...] = ()


def begun_stages(parts: Path) -> list[BegunStage]:
    """The stages that were begun, in order, by the folder of a run's parts.

    Raises:
        UserError: the file that lists them was altered.
    """
    if not (parts / STAGES).is_file():
        return []
    listed = read_json(parts / STAGES, 2**24).get("stages")
    return list(filled(tuple[BegunStage, ...], listed, f"The list of stages in {parts / STAGES}", LIMITS))


def save_stages(parts: Path, stages: Sequence[BegunStage]) -> None:
    write_whole(parts / STAGES, json.dumps({"stages": [asdict(stage) for stage in stages]}))


def note_begun(parts: Path, stage: BegunStage, there: int) -> None:
    """Note that a stage is begun now, with so many parts there."""
    listed = {known.name: known for known in begun_stages(parts)}
    before = listed.pop(stage.name, stage).attempts
    save_stages(parts, [*listed.values(), replace(stage, attempts=(*before, Attempt(time.time(), there))[-100:])])


@contextmanager
def noted(part: Path) -> Generator[None]:
    """While this lasts, an error is noted beside the part of the case that it is of; without one, a note that an
    earlier attempt left is gone."""
    note = part.with_name(part.name + FAILED)
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the disk may be full, which is an error of its own
            write_whole(note, one_line(error, 500))
        raise
    with suppress(OSError):
        note.unlink()


def cases_in(parts: Path, stage: BegunStage, ending: str = "") -> dict[int, Path]:
    """The parts of a stage, or with `FAILED` as the ending the notes beside them, by the place of their case."""
    name = re.compile(rf"(\d{{5,9}})-{re.escape(stage.name + stage.suffix + ending)}")
    named = ((name.fullmatch(path.name), path) for path in sorted(parts.glob(f"*{stage.suffix}{ending}")))
    return {place: path for match, path in named if match and (place := int(match[1])) < stage.total}


def measured_parts(parts: Path) -> list[Path]:
    """All that stages have left so far, files and folders."""
    return sorted(path for path in parts.glob("[!.]*") if path.suffix not in (PARTIAL, FAILED))


def refuse_other_models(parts: Path, loaded: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Note which models a worker has loaded beside that of the run.

    Args:
        loaded: their fingerprints, by name and numbers.
        known: those of the caller, likewise.

    Raises:
        UserError: a model of the same name, of the caller or of another worker, is another one.
    """
    if not loaded:
        return
    from kvprobe.fingerprint import differing  # here, since it needs torch, and the command line reads this module

    path = parts / MODELS
    noted = {**(read_json(path, 2**20) if path.is_file() else {}), **known}
    for name, fingerprint in loaded.items():
        if (other := noted.setdefault(name, fingerprint)) != fingerprint:
            raise UserError(
                f"{name!r} of one worker is not that of another, or of the caller (it differs in "
                f"{differing(str(other), fingerprint)}); give all machines the same files."
            )
    write_whole(path, json.dumps({name: noted[name] for name in noted if name not in known}))
