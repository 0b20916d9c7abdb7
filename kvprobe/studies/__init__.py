"""Studies: one folder, one question. Listing them imports nothing heavy."""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import UserError
from kvprobe.extensions import extension, extensions
from kvprobe.names import one_line, shown, unknown

if TYPE_CHECKING:
    from kvprobe.executors import Cluster
    from kvprobe.experiments.runs import Run
    from kvprobe.experiments.study import Study
    from kvprobe.inference.model import Model


@dataclass(frozen=True)
class Entry:
    """A study in the list of all; its code is imported when it is run.

    Attributes:
        elsewhere: reads a study that does not ship with kvprobe.
    """

    name: str
    elsewhere: "Callable[[], Study[Any]] | None" = None

    @property
    def question(self) -> str:
        """In a sentence: the first line of its package."""
        return self.elsewhere().question if self.elsewhere else self._own().__doc__ or ""

    @property
    def config(self) -> type[Any]:
        """The dataclass of its settings."""
        return self.elsewhere().config if self.elsewhere else self._own().Config

    @property
    def declaration(self) -> "Study[Any]":
        """The study itself."""
        return self.elsewhere() if self.elsewhere else self._own(".study").STUDY

    def run(
        self,
        config: Any,
        root: Path = Path("runs"),
        name: str | None = None,
        model: "Model | None" = None,
        processes: int = 1,
        cluster: "Cluster | None" = None,
        share: tuple[int, int] = (1, 1),
        again: bool = False,
    ) -> "Run":
        """Run it with these settings (or resume) in a directory below `root`; see `experiments.running.run_study`."""
        from kvprobe.experiments.running import run_study

        return run_study(self.declaration, config, root, name, model, processes, cluster, share, again)

    def _own(self, module: str = "") -> Any:
        """A module of a study that ships with kvprobe."""
        return import_module(f"kvprobe.studies.{self.name}{module}")


STUDIES = {
    name: Entry(name)
    for name in (
        "leakage",
        "leakage_scaling",
        "compaction",
        "policies",
        "idle_rebuild",
        "robustness",
        "bands",
        "bitflips",
        "patching",
        "carriers",
        "dangling",
        "memory",
        "use",
        "filter_poison",
        "multihop",
        "features",
        "routing",
        "poisoning",
        "code_poisoning",
        "reliance",
        "memento_toy",
        "lossy_memento",
        "pointers",
        "guard",
        "ghost_state",
        "detection",
        "engines",
        "finetuned",
        "forgetting",
        "compose",
    )
}


_NO_STUDY = "{} declares no study; it must set STUDY to a kvprobe.experiments.study.Study."


def find(name: str) -> Entry:
    """The study of this name, which another package may have added, or of this Python file.

    Raises:
        UserError: there is none; the near match is named.
    """
    if name in STUDIES:
        return STUDIES[name]
    if not name.endswith(".py") and name not in extensions("studies"):
        raise UserError(unknown("study", name, [*STUDIES, *extensions("studies")]))
    read = partial(read_study, Path(name)) if name.endswith(".py") else partial(added_study, name)
    return Entry(read().name, read)


def study_of(run: "Run", file: Path | None = None) -> Entry:
    """The study of a run, or the one that a file declares.

    Raises:
        UserError: the run is of a study that kvprobe does not have, and no file is named.
    """
    name = str(run.config.get("study"))
    if file is None and name not in STUDIES and name not in extensions("studies"):
        raise UserError(f"{run.path} is a run of {shown(name)}; name its file with --study.")
    return find(name if file is None else str(file))


def read_study(path: Path) -> "Study[Any]":
    """The study that a Python file declares as `STUDY`. The file's code is run.

    Raises:
        UserError: there is no such file, it raises an error when it is imported, or it declares no study.
    """
    if not path.is_file():
        raise UserError(f"There is no Python file {path}; `kvprobe new study NAME` writes one to begin with.")
    return _study_of(path.resolve(), path.stat().st_mtime_ns)


def added_study(name: str) -> "Study[Any]":
    """The study that another package added under this name.

    Raises:
        UserError: it cannot be imported, is no study, or has another name.
    """
    from kvprobe.experiments.study import Study

    study = extension("studies", name)
    if not isinstance(study, Study) or study.name != name:
        raise UserError(f"The entry point {name!r} of kvprobe.studies must be a Study whose name is {name!r}.")
    return study


@cache
def _study_of(path: Path, _: int) -> "Study[Any]":
    """The study of a file as it is now; one that was changed since is read again."""
    from kvprobe.experiments.study import Study

    _refuse_no_study(path)
    name = f"kvprobe_study_{path.stem}"
    spec = util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be imported: {_told(error)}.") from error
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise UserError(_NO_STUDY.format(path))
    return study


def _told(error: BaseException) -> str:
    """An error's kind and message."""
    return ": ".join(filter(None, (type(error).__name__, one_line(error))))


def _refuse_no_study(path: Path) -> None:
    """Refuse a file whose code does not even name a STUDY, before the code is run."""
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be imported: {_told(error)}.") from error
    names = {value for node in nodes for name in ("id", "name", "asname", "value") if (value := getattr(node, name, 0))}
    if not {"STUDY", "*"} & {name for name in names if isinstance(name, str)}:
        raise UserError(_NO_STUDY.format(path))
