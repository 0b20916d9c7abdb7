"""A run is a directory: what was asked, on what it ran, what came out. An interrupted run resumes."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvprobe.arguments import checked_arguments
from kvprobe.environment import environment
from kvprobe.errors import UserError
from kvprobe.executors import Workers
from kvprobe.experiments.settings import Settings, as_mapping, folder_of, folder_with_run
from kvprobe.experiments.stages import FAILED, STAGES
from kvprobe.files import (
    HOLDER,
    LOCK,
    PARTIAL,
    read_json,
    read_table,
    read_yaml,
    refuse_damaged,
    replacing,
    told,
    write_whole,
)
from kvprobe.fingerprint import differing
from kvprobe.report.findings import Findings

FORMAT = 3
"""Of run directories. The first recorded neither what the settings' files held nor the model's config and tokenizer;
the second had its numbers in another shape."""
MOST_BYTES = 2**28
"""Of a JSON file of a run that is read at all."""


@checked_arguments
@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        path: holds `config.yaml`, `env.json`, `samples.parquet` and other tables, `figures/`, `metrics.json` and
            `report.html`; and `parts/` while the run is unfinished.
        begun: the environment that it was opened with; None for a run that is only read.
        processes: parts that are worked on side by side, each in a process of its own; see `kvprobe.processes`.
        workers: of a cluster, which work on parts instead.
        share: which of how many shares of the cases is measured here; others elsewhere, and `merge` joins them.
    """

    path: Path
    begun: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    processes: int = field(default=1, compare=False, repr=False)
    workers: Workers | None = field(default=None, compare=False, repr=False)
    share: tuple[int, int] = field(default=(1, 1), compare=False, repr=False)

    @classmethod
    def open(
        cls,
        study: str,
        config: Settings,
        model: str,
        device: str,
        root: Path = Path("runs"),
        name: str | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> "Run":
        """The directory for this study and config, new or to be resumed.

        Its default name is made from the config, so the same command finds its own unfinished run. One that has no
        content yet, as after a start that failed, is begun anew whatever it was begun with.

        Args:
            config: its settings.
            model: its fingerprint.
            device: where, and in which dtype, it runs.
            inputs: for settings that name files, a digest of what these hold.

        Raises:
            UserError: the directory holds another run, or one begun with another model, other files or versions; or the
                name cannot be that of a folder.
        """
        settings = {"study": study, "settings": as_mapping(config)}
        run = cls(folder_of(study, config, root, name))
        asked = {"model": model, "inputs": dict(inputs or {}), "device": device, "seed": config.seed}
        begun = {"format": FORMAT, **asked, **environment()}
        with told(run.path):
            texts = {"env.json": json.dumps(begun, indent=2), "config.yaml": yaml.safe_dump(settings, sort_keys=False)}
            wrong = f"{run.path} is not empty and not a run; choose another --out."
            if (run.path / "config.yaml").is_file():
                difference = run.difference(settings, begun)
                if difference is None:
                    return cls(run.path, run.environment)
                wrong = f"{run.path} {difference}; delete it to start afresh, or choose another --name or --out."
            if run._has_content():
                raise UserError(wrong)
            (run.path / "figures").mkdir(parents=True, exist_ok=True)
            for file, text in texts.items():
                write_whole(run.path / file, text)
        return cls(run.path, begun)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """An existing run.

        Raises:
            UserError: there is no run at `path`.
        """
        return cls(folder_with_run(path))

    @property
    def finished(self) -> bool:
        return (self.path / "metrics.json").is_file()

    @property
    def config(self) -> dict[str, Any]:
        return read_yaml(self.path / "config.yaml")

    @property
    def environment(self) -> dict[str, Any]:
        """On what it ran.

        Raises:
            UserError: `env.json` is missing or was altered.
        """
        environment = self._json("env.json")
        for name, kind in {"model": str, "device": str, "versions": dict, "seed": int | None}.items():
            if not isinstance(environment.get(name), kind):
                raise UserError(f"{self.path / 'env.json'} has no {name!r}, or one of the wrong type; it was altered.")
        return environment

    @property
    def metrics(self) -> dict[str, Any]:
        """The run's numbers, each with its interval."""
        return self._json("metrics.json")

    @property
    def findings(self) -> pd.DataFrame:
        """The run's numbers as a tidy table: one row each, with its name, keys, interval and unit.

        Raises:
            UserError: the run has none, as one of an earlier version.
        """
        metrics = self.metrics
        if "findings" not in metrics:
            raise UserError(f"{self.path} has no table of findings; an earlier version made it, so run it again.")
        return Findings.from_records(metrics["findings"]).frame()

    def df(self, table: str = "samples") -> pd.DataFrame:
        """A table of the run: `samples` has one row per sample and condition."""
        path = self.path / f"{table}.parquet"
        if not path.is_file():
            raise UserError(f"{self.path} has no {table}.parquet; the run is unfinished, start it again to resume.")
        return read_table(path)

    def tables(self) -> pd.DataFrame | dict[str, pd.DataFrame]:
        """All tables of the run by name; `samples` itself where there is no other."""
        names = sorted(path.stem for path in self.path.glob("*.parquet"))
        return {name: self.df(name) for name in names} if names != ["samples"] else self.df()

    def part(self, name: str) -> Path:
        """Where a part, an intermediate file or folder, lies until the run is finished."""
        folder = self.path / "parts"
        with told(folder):
            folder.mkdir(exist_ok=True)
        return folder / name

    def write_part(self, name: str, write: Callable[[Path], object]) -> Path:
        """A part: the file that an earlier attempt wrote, or what `write` writes now.

        Raises:
            UserError: the file is damaged, or another command has begun the run anew meanwhile.
        """
        path = self.part(name)
        if path.is_file():
            refuse_damaged(path)
            return path
        with replacing(path) as partial:
            write(partial)
            if self.begun is not None and self.environment != self.begun:
                raise UserError(
                    f"{self.path} was begun anew by another command; choose another --name for one of them."
                )
        return path

    def save_table(self, table: str, rows: pd.DataFrame) -> None:
        with replacing(self.path / f"{table}.parquet") as partial:
            rows.to_parquet(partial, index=False)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics, which make the run finished; drop the intermediate results."""
        write_whole(self.path / "metrics.json", json.dumps(metrics, indent=2))
        for left in self.path.glob(f"*{PARTIAL}"):
            left.unlink()
        if (folder := self.path / "parts").is_dir():
            shutil.rmtree(folder)

    def difference(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str | None:
        """How this run was begun differently; None if nothing that decides its numbers is different."""
        if self.config != settings:
            return "holds a run with other settings"
        before = self.environment
        if before.get("format") != FORMAT or environment.get("format") != FORMAT:
            return "was begun by another version of kvprobe, whose runs are of another format"
        if before["model"] != environment["model"]:
            return f"was begun with another model (it differs in {differing(before['model'], environment['model'])})"
        if before.get("inputs") != environment["inputs"]:
            return f"was begun when its {' and '.join(environment['inputs'])} held something else"
        # A finished run of another version is still that version's answer.
        for key in ("device",) if self.finished else ("device", "versions", "commit"):
            if before[key] != environment[key]:
                return f"was begun with another {key} ({before[key]}, now {environment[key]})"
        return None

    def _has_content(self) -> bool:
        """Whether there is more than the record of a start."""
        record = {"config.yaml", "env.json", LOCK, HOLDER, STAGES}
        return any(
            path.name not in record and path.suffix not in (PARTIAL, FAILED)
            for path in self.path.rglob("*")
            if not path.is_dir()
        )

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            raise UserError(f"{self.path} has no {name}; the run is unfinished, start it again to resume.")
        return read_json(path, MOST_BYTES)
