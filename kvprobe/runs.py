"""A run is a directory: what was asked, on what it ran, what came out. An interrupted run resumes."""

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvprobe.studyconfig import read_yaml

PACKAGES = ("kvprobe", "torch", "transformers", "transformer-lens", "sae-lens", "numpy")


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        path: holds `config.yaml`, `env.json`, `samples.parquet`, `metrics.json`, `report.json`, `figures/` and
            `report.html`; and `parts/` while the run is unfinished.
    """

    path: Path

    @classmethod
    def open(
        cls, study: str, config: Any, model: str, device: str, root: Path = Path("runs"), name: str | None = None
    ) -> "Run":
        """The directory for this study and config, new or to be resumed.

        Its default name is made from the config, so the same command finds its own unfinished run.

        Args:
            config: a dataclass instance.
            model: fingerprint of the weights.
            device: where, and in which dtype, it runs.

        Raises:
            ValueError: the directory holds another run, or one begun with other versions or weights.
        """
        settings = {"study": study, "settings": dataclasses.asdict(config)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        run = cls(root / (name or f"{study}-{digest}"))
        environment = _environment(model, device, settings)
        if (run.path / "config.yaml").is_file():
            run._refuse_mismatch(settings, environment)
            return run
        if run.path.exists() and any(run.path.iterdir()):
            raise ValueError(f"{run.path} is not empty and not a run; choose another --out.")
        (run.path / "figures").mkdir(parents=True, exist_ok=True)
        run._write("env.json", json.dumps(environment, indent=2))
        run._write("config.yaml", yaml.safe_dump(settings, sort_keys=False))
        return run

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """An existing run.

        Raises:
            ValueError: there is no run at `path`.
        """
        run = cls(Path(path))
        if not (run.path / "config.yaml").is_file():
            raise ValueError(f"{run.path} is not a run directory (it has no config.yaml); see `kvprobe run`.")
        return run

    @property
    def finished(self) -> bool:
        return (self.path / "report.json").is_file()

    @property
    def config(self) -> dict[str, Any]:
        return read_yaml(self.path / "config.yaml")

    @property
    def environment(self) -> dict[str, Any]:
        return self._json("env.json")

    @property
    def metrics(self) -> dict[str, Any]:
        """The run's numbers, each with its interval."""
        return self._json("metrics.json")

    @property
    def report(self) -> dict[str, Any]:
        """What the report page says, as data; see `kvprobe.narrative`."""
        return self._json("report.json")

    def df(self, table: str = "samples") -> pd.DataFrame:
        """A table of the run: `samples` has one row per sample and condition."""
        path = self.path / f"{table}.parquet"
        if not path.is_file():
            raise ValueError(f"{self.path} has no {table}.parquet; the run is unfinished, start it again to resume.")
        return pd.read_parquet(path)

    def part(self, name: str) -> Path:
        """Where an intermediate result is kept until the run is finished."""
        folder = self.path / "parts"
        folder.mkdir(exist_ok=True)
        return folder / name

    def save_table(self, table: str, rows: pd.DataFrame) -> None:
        partial = self.path / f"{table}.parquet.partial"
        rows.to_parquet(partial, index=False)
        partial.replace(self.path / f"{table}.parquet")

    def finish(self, metrics: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        """Write the results and drop the intermediate ones."""
        self._write("metrics.json", json.dumps(metrics, indent=2))
        self._write("report.json", json.dumps(report, indent=2))
        folder = self.path / "parts"
        if folder.is_dir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    def _refuse_mismatch(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        if self.config != settings:
            raise ValueError(f"{self.path} holds a run with other settings; choose another --out.")
        # A finished run of another version is still that version's answer; one of other weights is none at all.
        for key in ("model", "device") if self.finished else ("model", "device", "versions"):
            if self.environment.get(key) != environment[key]:
                raise ValueError(
                    f"{self.path} was begun with another {key} ({self.environment.get(key)}, now {environment[key]}); "
                    f"delete it to start afresh, or choose another --name."
                )

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{self.path} has no {name}; the run is unfinished, start it again to resume.")
        return json.loads(path.read_text(encoding="utf-8"))

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)


def _environment(model: str, device: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "commit": _commit(),
        "model": model,
        "device": device,
        "seed": settings["settings"].get("seed"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of kvprobe's own checkout, if it runs from one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "log", "-1", "--format=%H", "--", str(here)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
