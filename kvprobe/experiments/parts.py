"""Parts: one file for each case of a run, so that an interrupted run resumes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, TypeVar

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.executors import Workers, send_code_of
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.stages import BegunStage, note_begun, noted, refuse_other_models
from kvprobe.experiments.work import TABLE, TENSORS, Labelled, Work, part_of
from kvprobe.files import read_table, refuse_damaged
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.models.noted import name_in
from kvprobe.probing.arms import Arms
from kvprobe.processes import forked
from kvprobe.progress import Bar
from kvprobe.tasks.designs import Target

Case = TypeVar("Case")
Config = TypeVar("Config", bound=Settings)


class ShareMeasured(UserError):
    """The share of a stage that was asked for is there; what follows needs all of it."""


LACKS = "{path} has no {name!r}; the part is not of this study, so delete it and start again."


@dataclass(frozen=True)
class Parts(Generic[Config]):
    """What a study measures, stage by stage, with a file for each case of a stage. Those that an earlier attempt wrote
    stay as they are."""

    model: Model
    config: Config
    run: Run

    def table(
        self,
        measure: Callable[Concatenate[Model, Config, Case, ...], pd.DataFrame | Iterable[Mapping[str, Any]]],
        cases: Sequence[Case],
        name: str,
        *given: object,
        doing: str,
        unit: str,
        alone: bool = False,
    ) -> pd.DataFrame:
        """The rows of all cases, of which there must be one, in one table.

        Args:
            name: of the stage, which is in the names of its files.
            given: what `measure` takes after the case.
            doing, unit: what the progress bar says.
            alone: whether a case suffers from others that are worked on beside it, as a time does.

        Raises:
            UserError: there is no case, other processes cannot find `measure`, or a file is damaged.
        """
        if not cases:
            raise UserError(f"There is no {unit} to measure; ask for at least one.")
        paths = self._written(Work(name, measure, given, TABLE), cases, doing, unit, alone)
        return pd.concat([read_table(path) for path in paths], ignore_index=True)

    def tensors(
        self,
        measure: Callable[Concatenate[Model, Config, Case, ...], Mapping[str, Tensor] | Labelled],
        cases: Sequence[Case],
        name: str,
        *given: object,
        doing: str,
        unit: str,
    ) -> list[Path]:
        """Safetensors files of all cases, in order; see `table`."""
        return self._written(Work(name, measure, given, TENSORS), cases, doing, unit)

    def _written(self, work: Work, cases: Sequence[object], doing: str, unit: str, alone: bool = False) -> list[Path]:
        run, (number, shares) = self.run, self.run.share
        parts = {run.part(f"{place:05d}-{work.name}{work.suffix}"): case for place, case in enumerate(cases)}
        missing = [path for path in parts if not path.is_file()]
        asked = [path for place, path in enumerate(parts) if place % shares == number - 1 and path in missing]
        for path in sorted(parts.keys() - missing):
            refuse_damaged(path)
        there = len(parts) - len(missing)
        if missing:
            note_begun(run.part(""), BegunStage(work.name, work.suffix, doing, unit, len(parts)), there)

        def write(path: Path) -> None:
            with noted(path):
                run.write_part(path.name, lambda partial: work.write(self.model, self.config, parts[path], partial))

        def come(workers: Workers) -> Iterator[Path]:
            send_code_of(work.measure, type(self.config))
            cases = [parts[path] for path in asked]
            inputs = (run.begun or {}).get("inputs", {})  # a study loads its models as it does the run's own
            known = {name_in(name, self.model): inputs[name] for name in inputs}
            measured = workers.results(part_of, cases, work, self.config, around=lambda place: noted(asked[place]))
            for place, (content, loaded) in measured:
                refuse_other_models(run.part(""), loaded, known)
                yield run.write_part(asked[place].name, lambda partial: partial.write_bytes(content))  # noqa: B023, now

        done = come(run.workers) if run.workers and not alone else forked(write, asked, 1 if alone else run.processes)
        with Bar(total=len(parts), initial=there, desc=doing, unit=unit) as bar:
            for _ in done:
                bar.update()
        if len(asked) < len(missing):
            raise ShareMeasured(
                f"Share {number}/{shares} of the stage {work.name!r} is measured, {there + len(asked)} of {len(parts)} "
                f"cases of it are in {run.path}; join them with the others by `kvprobe merge`, and go on."
            )
        return list(parts)


@dataclass(frozen=True)
class TensorOfParts:
    """A tensor of all parts that is read when it is asked for; to workers that do not share the files it travels as its
    numbers."""

    paths: Sequence[Path]
    name: str
    held: Tensor | None = None

    def read(self) -> Tensor:
        """See `tensor_of_parts`."""
        return tensor_of_parts(self.paths, self.name) if self.held is None else self.held

    def __reduce__(self) -> tuple[object, ...]:
        return TensorOfParts, ((), self.name, self.read())


def tensor_of_parts(paths: Sequence[Path], name: str, *, stacked: bool = False) -> Tensor:
    """A tensor of all parts, one below the other; or each part's as one row.

    Raises:
        UserError: a part has none of this name, or one of another shape.
    """
    pieces = []
    for path in paths:
        with safe_open(path, framework="pt") as file:
            if name not in file.keys():  # noqa: SIM118, the file is no mapping
                raise UserError(LACKS.format(path=path, name=name))
            pieces.append(file.get_tensor(name))
        if pieces[-1].shape[not stacked :] != pieces[0].shape[not stacked :]:
            shapes = [list(piece.shape) for piece in (pieces[0], pieces[-1])]
            raise UserError(f"{path} has {name!r} of shape {shapes[1]}, others {shapes[0]}; delete it and start again.")
    return torch.stack(pieces) if stacked else torch.cat(pieces)


def arms_of_parts(paths: Sequence[Path], families: Sequence[Family], target: Target) -> Arms:
    """What was read of contexts, a part each, for probes; with the `labels` that stand beside it, samples first.

    Tensors are read from the files whenever they are asked for.
    """
    labels = tensor_of_parts(paths, "labels")
    contexts = np.repeat(np.arange(len(paths)), len(labels) // len(paths))
    return Arms(partial(tensor_of_parts, paths), families, labels.T.contiguous(), contexts, target)


def text_of_part(path: Path, name: str) -> str:
    """A text that stands beside the tensors of a part.

    Raises:
        UserError: there is none.
    """
    with safe_open(path, framework="pt") as file:
        texts = file.metadata() or {}
    if name not in texts:
        raise UserError(LACKS.format(path=path, name=name))
    return texts[name]
