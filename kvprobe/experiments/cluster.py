"""Parts that are measured on a Ray cluster, by workers that each hold a model, on this machine or on many.

Workers need not share files with the process that hands out the cases: a part comes back as bytes and is written there.
Ray is Apache-2.0, https://docs.ray.io.
"""

import os
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch

from kvprobe.arguments import AtLeastOne, Within, check_fields
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.work import Work
from kvprobe.inference.model import load
from kvprobe.progress import silence

TRIES = 3
"""Times that a case is begun anew after the worker that measured it was lost."""
STORE = 200 * 2**20
"""Bytes of shared memory for what travels between the processes of one machine."""


@dataclass(frozen=True)
class Cluster:
    """Where a run's parts are measured by Ray.

    Attributes:
        address: of a cluster, `auto` for one that this machine belongs to; None starts one here for the run alone.
        workers: that each hold a model.
        threads: of torch in each worker; by default those of this process, shared out.
        gpus: that each worker takes; with a part of one, several share it.
    """

    address: str | None = None
    workers: AtLeastOne = 1
    threads: AtLeastOne | None = None
    gpus: Annotated[float, Within(0, inf)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @contextmanager
    def started(self, config: Settings, fingerprint: str) -> Generator["Workers"]:
        """Workers with the model of a config, until the run ends.

        Raises:
            UserError: Ray is not installed or not reached, the cluster is too small, or its workers hold another model.
        """
        ray = _ray()
        threads = self.threads or max(1, torch.get_num_threads() // self.workers)
        mine = not ray.is_initialized()
        if mine:
            _begin(ray, self.address, self.workers * threads)
        try:
            _refuse_too_small(ray, {"CPU": self.workers * threads, "GPU": self.workers * self.gpus})
            worker = ray.remote(
                num_cpus=threads, num_gpus=self.gpus, max_restarts=-1, max_task_retries=TRIES
            )(_Worker)  # fmt: skip
            actors = [worker.remote(config, fingerprint, threads, os.getcwd()) for _ in range(self.workers)]
            try:
                yield Workers(ray, actors, config)
            finally:
                for actor in actors:
                    ray.kill(actor)
        finally:
            if mine:
                ray.shutdown()


@dataclass(frozen=True)
class Workers:
    """Workers that are ready for cases."""

    ray: Any
    actors: list[Any]
    config: Settings

    def parts(self, work: Work, cases: Mapping[Path, object], alone: bool = False) -> Iterator[tuple[Path, bytes]]:
        """The part of each case, as workers are done with it; each has one case at a time.

        Args:
            alone: whether one worker does them all, one after the other.

        Raises:
            UserError: a worker was lost again and again, or refuses the case.
        """
        _send_code_of(work, self.config)
        given = self.ray.put((work, self.config))
        waiting, free = deque(cases.items()), deque(self.actors[:1] if alone else self.actors)
        pending: dict[Any, tuple[Any, Path]] = {}
        while waiting or pending:
            while waiting and free:
                (path, case), actor = waiting.popleft(), free.popleft()
                pending[actor.part.remote(given, case)] = actor, path
            (done,), _ = self.ray.wait(list(pending))
            actor, path = pending.pop(done)
            free.append(actor)
            yield path, self._got(done)

    def _got(self, done: Any) -> bytes:
        errors = self.ray.exceptions
        try:
            return self.ray.get(done)
        except errors.RayTaskError as error:
            cause = error.cause
            raise (UserError(str(cause)) if isinstance(cause, UserError) else cause) from error
        except errors.RayError as error:
            reason = getattr(error, "error_msg", "") or str(error)
            if "UserError: " in reason:
                raise UserError(reason.rpartition("UserError: ")[2].splitlines()[0]) from error
            raise UserError(
                f"A worker was lost {TRIES + 1} times on the same case, probably because memory ran out; give fewer "
                "workers a machine, and start the run again: it resumes."
            ) from error


class _Worker:
    """In a process of its own, with the model of the run."""

    def __init__(self, config: Settings, fingerprint: str, threads: int, folder: str):
        if Path(folder).is_dir():  # on the machine of the run, where its settings may name files
            os.chdir(folder)
        torch.set_num_threads(threads)
        silence()
        self.model = load(config.model, device=config.device, dtype=config.dtype)
        if self.model.fingerprint != fingerprint:
            raise UserError(
                f"The model {config.model} of a worker on {os.uname().nodename} is not that of the run; give all "
                "machines the same files."
            )

    def part(self, given: tuple[Work, Settings], case: object) -> bytes:
        work, config = given
        with TemporaryDirectory(prefix="kvprobe-part-") as folder:
            path = Path(folder) / "part"
            work.write(self.model, config, case, path)
            return path.read_bytes()


def _ray() -> Any:
    try:
        ray = import_module("ray")
        import_module("ray.exceptions")
    except ImportError:
        raise UserError("A cluster needs Ray, which is not installed: pip install 'kvprobe[ray]' does it.") from None
    return ray


def _begin(ray: Any, address: str | None, cpus: int) -> None:
    """Connect to a cluster, or start one on this machine; its processes find the modules that this one does."""
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address is None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        settings |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
        settings |= {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
    try:
        ray.init(address=address or "local", **settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"No Ray cluster is reached at {address}: {str(error).splitlines()[0]}") from None


def _refuse_too_small(ray: Any, needed: Mapping[str, int | float]) -> None:
    """Refuse what would wait for ever."""
    there = ray.cluster_resources()
    for kind, number in needed.items():
        if number > there.get(kind, 0):
            raise UserError(
                f"The workers need {number:g} {kind}s, and the cluster has {there.get(kind, 0):g}; give fewer workers, "
                "or less to each."
            )


def _send_code_of(work: Work, config: Settings) -> None:
    """Have functions and settings of a study that workers may not be able to import travel as code."""
    pickling = import_module("ray.cloudpickle")
    for name in {work.measure.__module__, type(config).__module__}:
        if not name.startswith(("kvprobe.", "__main__")):
            pickling.register_pickle_by_value(sys.modules[name])
