"""Parts that are measured on a Ray cluster, by workers that each hold a model, on this machine or on many.

Workers need not share files with the process that hands out the cases: a part comes back as bytes and is written there.
Ray is Apache-2.0, https://docs.ray.io.
"""

import os
import platform
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
from kvprobe.experiments.stages import noted
from kvprobe.experiments.work import Work
from kvprobe.inference.model import Model, load
from kvprobe.progress import silence

TRIES, RESTARTS = 3, 10
"""Times that a case is begun anew after the worker that measured it was lost, and that a worker is."""
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
    def started(self, config: Settings, model: Model) -> Generator["Workers"]:
        """Workers that hold the model of a config, until the run ends.

        Raises:
            UserError: Ray is not installed or not reached, the cluster is too small, or a worker cannot hold the model,
                or holds another one.
        """
        ray = _ray()
        threads = self.threads or max(1, torch.get_num_threads() // self.workers)
        if model.lanes.device.type == "cuda" and not self.gpus:
            raise UserError("The model is on a GPU; say how many GPUs each worker takes, or which part of one: gpus=1.")
        mine = not ray.is_initialized()
        if mine:
            _begin(ray, self.address, self.workers * threads)
        try:
            _refuse_too_small(ray, self.workers, threads, self.gpus)
            worker = ray.remote(
                num_cpus=threads, num_gpus=self.gpus, max_restarts=RESTARTS, max_task_retries=TRIES
            )(_Worker)  # fmt: skip
            same = (model.fingerprint, model.lanes.device.type, str(model.dtype))
            actors = [worker.remote(config, same, threads, os.getcwd()) for _ in range(self.workers)]
            try:
                workers = Workers(ray, actors, config)
                for ready in [actor.ready.remote() for actor in actors]:
                    workers.got(ready)
                yield workers
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

    def parts(self, work: Work, cases: Mapping[Path, object]) -> Iterator[tuple[Path, bytes]]:
        """The part of each case, as workers are done with it; each has one case at a time.

        Raises:
            UserError: a worker was lost again and again, or refuses the case.
        """
        _send_code_of(work, self.config)
        given = self.ray.put((work, self.config))
        waiting, free = deque(cases.items()), deque(self.actors)
        pending: dict[Any, tuple[Any, Path]] = {}
        while waiting or pending:
            while waiting and free:
                (path, case), actor = waiting.popleft(), free.popleft()
                pending[actor.part.remote(given, case)] = actor, path
            (done,), _ = self.ray.wait(list(pending))
            actor, path = pending.pop(done)
            free.append(actor)
            with noted(path):
                content = self.got(done)
            yield path, content

    def got(self, done: Any) -> Any:
        """What a worker gave.

        Raises:
            UserError: it refused, or was lost.
        """
        errors = self.ray.exceptions
        try:
            return self.ray.get(done)
        except errors.RayTaskError as error:
            cause = error.cause
            raise (UserError(str(cause)) if isinstance(cause, UserError) else cause) from error
        except errors.RayError as error:
            reason = [line for line in str(error).splitlines() if line.strip()]
            refusal = next((line for line in reason if "UserError: " in line), None)
            if refusal is not None:
                raise UserError(refusal.partition("UserError: ")[2]) from error
            raise UserError(
                f"A worker was lost again and again; Ray says: {reason[-1].strip()} If memory ran out, give a machine "
                "fewer workers; then start the run again, and it resumes."
            ) from error


class _Worker:
    """In a process of its own, with the model of the run."""

    def __init__(self, config: Settings, same: tuple[str, str, str], threads: int, folder: str):
        if Path(folder).is_dir():  # on the machine of the run, where its settings may name files
            os.chdir(folder)
        torch.set_num_threads(threads)
        silence()
        self.model = load(config.model, device=config.device, dtype=config.dtype)
        fingerprint, *computed = same
        own = [self.model.lanes.device.type, str(self.model.dtype)]
        if own != computed:
            raise UserError(
                f"A worker computes on {' in '.join(own)}, and the run on {' in '.join(computed)}; give device and "
                "dtype."
            )
        if self.model.fingerprint != fingerprint:
            raise UserError(
                f"The model {config.model} of a worker on {platform.node()} is not that of the run; give all "
                "machines the same files."
            )

    def ready(self) -> None:
        """Answered once the model is loaded."""

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
        place = "on this machine" if address is None else f"at {address}"
        raise UserError(f"No Ray cluster is reached {place}: {str(error).splitlines()[0]}") from None


def _refuse_too_small(ray: Any, workers: int, threads: int, gpus: float) -> None:
    """Refuse what would wait for ever: a worker is on one machine, and parts of a GPU are of one GPU."""
    places = 0
    for node in ray.nodes():
        if node["Alive"]:
            there = node["Resources"]
            fitting = int(there.get("CPU", 0) // threads)
            if gpus:
                cards = int(there.get("GPU", 0))
                fitting = min(fitting, cards * int(1 / gpus) if gpus < 1 else int(cards // gpus))
            places += fitting
    if places < workers:
        each = f"{threads} CPUs" + f" and {gpus:g} GPUs" * bool(gpus)
        raise UserError(
            f"The cluster has room for {places} workers with {each} each, not for {workers}; give fewer workers, or "
            "less to each."
        )


def _send_code_of(work: Work, config: Settings) -> None:
    """Have functions and settings of a study that workers may not be able to import travel as code."""
    pickling = import_module("ray.cloudpickle")
    for name in {work.measure.__module__, type(config).__module__}:
        if not name.startswith(("kvprobe.", "__main__")):
            pickling.register_pickle_by_value(sys.modules[name])
