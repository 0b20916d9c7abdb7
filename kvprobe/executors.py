"""Where pieces of work that do not depend on each other are done: in forked processes, or by workers of Ray.

An executor is started with something that all pieces need, such as a model, which is here already, and which workers
that share no memory with this process make again. Workers of Ray, on this machine or on many, need not share files
with this process either: what a piece of work returns comes back over the network. Ray is Apache-2.0,
https://docs.ray.io.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import torch

from kvprobe.arguments import AtLeastOne, Within, check_fields
from kvprobe.environment import software
from kvprobe.errors import UserError
from kvprobe.processes import check_processes, forked
from kvprobe.progress import silence

TRIES, RESTARTS = 3, 10
"""Times that a piece of work is begun anew after the worker that did it was lost, and that a worker is."""
STORE = 200 * 2**20
"""Bytes of shared memory for what travels between the processes of one machine."""
Around = Callable[[int], AbstractContextManager[object]]


@runtime_checkable
class Workers(Protocol):
    """Workers that are ready, each with what was held when they started."""

    @property
    def count(self) -> int:
        """How many work side by side."""
        ...

    def results(
        self, function: Callable[..., Any], items: Sequence[object], *given: object, around: Around = nullcontext
    ) -> Iterator[tuple[int, Any]]:
        """The place of each item and what `function(held, item, *given)` returns, in the order in which they are done.

        Args:
            function: at the top level of a module.
            around: by the place of an item, a context in which its error is raised.

        Raises:
            UserError: a worker was lost again and again.
            BaseException: what `function` raised.
        """
        ...


@runtime_checkable
class Executor(Protocol):
    """Something that starts workers."""

    @property
    def count(self) -> int:
        """How many."""
        ...

    def started(
        self, held: Any, abroad: Callable[[Any], Callable[[], object]], device: torch.device
    ) -> AbstractContextManager[Workers]:
        """Workers, until the context ends.

        Args:
            held: what each piece of work needs, such as a model.
            abroad: gives of it what makes the same elsewhere, or refuses to.
            device: on which it is.

        Raises:
            UserError: workers cannot be started, or cannot hold it.
        """
        ...


@dataclass(frozen=True)
class Processes:
    """Forked processes, which share a model on the CPU under Linux; see `kvprobe.processes`."""

    count: AtLeastOne = 2

    def __post_init__(self) -> None:
        check_fields(self)

    @contextmanager
    def started(self, held: Any, abroad: object, device: torch.device) -> Generator["ForkedWorkers"]:
        """See `Executor.started`."""
        check_processes(self.count, device)
        yield ForkedWorkers(held, self.count)


@dataclass(frozen=True)
class ForkedWorkers:
    """Processes that are forked when there is work."""

    held: object
    count: int

    def results(
        self, function: Callable[..., Any], items: Sequence[object], *given: object, around: Around = nullcontext
    ) -> Iterator[tuple[int, Any]]:
        """See `Workers.results`."""

        def work(place: int) -> tuple[int, object]:
            with around(place):
                return place, function(self.held, items[place], *given)

        return forked(work, range(len(items)), self.count)


@dataclass(frozen=True)
class Cluster:
    """Workers of Ray.

    Attributes:
        address: of a cluster, `auto` for one that this machine belongs to; None starts one here for the work alone.
        workers: that each hold a model.
        threads: of torch in each worker; by default those of this process, or the CPUs of a cluster that has an
            address, shared out.
        gpus: that each worker takes; with a part of one, several share it.
    """

    address: str | None = None
    workers: AtLeastOne = 1
    threads: AtLeastOne | None = None
    gpus: Annotated[float, Within(0, inf)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def count(self) -> int:
        return self.workers

    @contextmanager
    def started(
        self, held: Any, abroad: Callable[[Any], Callable[[], object]], device: torch.device
    ) -> Generator["RayWorkers"]:
        """See `Executor.started`.

        Raises:
            UserError: Ray is not installed or not reached, the cluster is too small, a worker has other software, or it
                cannot hold the model, or holds another one.
        """
        ray, again = _ray(self.address), abroad(held)
        if device.type == "cuda" and not self.gpus:
            raise UserError("The model is on a GPU; say how many GPUs each worker takes, or which part of one: gpus=1.")
        mine = not ray.is_initialized()
        threads = self.threads or max(1, torch.get_num_threads() // self.workers)
        if mine:
            _begin(ray, self.address, self.workers * threads)
        try:
            if self.threads is None and self.address is not None:
                threads = _threads_each(ray, self.workers, self.gpus)
            _refuse_too_small(ray, self.workers, threads, self.gpus)
            worker = ray.remote(
                num_cpus=threads, num_gpus=self.gpus, max_restarts=RESTARTS, max_task_retries=TRIES
            )(_Worker)  # fmt: skip
            own = software()
            actors = [worker.remote(again, threads, os.getcwd(), own) for _ in range(self.workers)]
            try:
                workers = RayWorkers(ray, actors, again)
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
class RayWorkers:
    """Workers of Ray; also an executor that is started already, for several calls with one model."""

    ray: Any
    actors: list[Any]
    again: Callable[[], object]

    @property
    def count(self) -> int:
        return len(self.actors)

    @contextmanager
    def started(
        self, held: Any, abroad: Callable[[Any], Callable[[], object]], device: torch.device
    ) -> Generator["RayWorkers"]:
        """See `Executor.started`.

        Raises:
            UserError: the workers hold something else.
        """
        if abroad(held) != self.again:
            raise UserError("These workers hold another model; start others with this one.")
        yield self

    def results(
        self, function: Callable[..., Any], items: Sequence[object], *given: object, around: Around = nullcontext
    ) -> Iterator[tuple[int, Any]]:
        """See `Workers.results`; each worker has one item at a time."""
        task = self.ray.put((function, given))
        waiting, free = deque(enumerate(items)), deque(self.actors)
        pending: dict[Any, tuple[Any, int]] = {}
        while waiting or pending:
            while waiting and free:
                (place, item), actor = waiting.popleft(), free.popleft()
                pending[actor.result.remote(task, item)] = actor, place
            (done,), _ = self.ray.wait(list(pending))
            actor, place = pending.pop(done)
            free.append(actor)
            with around(place):
                result = self.got(done)
            yield place, result

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
    """In a process of its own, with what the work needs."""

    def __init__(
        self, again: Callable[[], object], threads: int, folder: str, of_caller: Mapping[str, str | None]
    ) -> None:
        _refuse_other_software(software(), of_caller)
        if Path(folder).is_dir():  # on the machine of the caller, where settings may name files
            os.chdir(folder)
        torch.set_num_threads(threads)
        silence()
        self.held = again()

    def ready(self) -> None:
        """Answered once the model is loaded."""

    def result(self, task: tuple[Callable[..., Any], tuple[object, ...]], item: object) -> Any:
        function, given = task
        return function(self.held, item, *given)


def _refuse_other_software(own: Mapping[str, str | None], of_caller: Mapping[str, str | None]) -> None:
    """Refuse a worker whose numbers may be others than those of the caller."""
    for package in of_caller:
        if own.get(package) != of_caller[package]:
            raise UserError(
                f"A worker has {package} {own.get(package) or '(none)'}, and the process that asks "
                f"{of_caller[package] or 'none'}; install the same on all machines."
            )


def _ray(address: str | None) -> Any:
    """Ray, which sends the token of this machine to a cluster at an address, as it does by itself to that of `auto`; it
    looks for that when it is imported."""
    token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if address not in (None, "auto") and (token or (Path.home() / ".ray" / "auth_token").is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
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
        settings |= {"_system_config": {"worker_niceness": 0}}  # beside other work they would hardly run
        settings |= {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
    try:
        ray.init(address=address or "local", **settings)
    except Exception as error:  # Ray raises plain ones, too
        place, reason = "on this machine" if address is None else f"at {address}", str(error).splitlines()[0]
        token = (
            "" if address is None else " If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as there."
        )
        raise UserError(f"No Ray cluster is reached {place}: {reason.rstrip('.')}.{token}") from None


def _threads_each(ray: Any, workers: int, gpus: float) -> int:
    """The most threads with which so many workers find room."""
    every = int(sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]))
    shares = range(every // workers, 1, -1)
    return next((threads for threads in shares if _places(ray, threads, gpus) >= workers), 1)


def _places(ray: Any, threads: int, gpus: float) -> int:
    """For how many workers a cluster has room: a worker is on one machine, and parts of a GPU are of one GPU."""
    places = 0
    for node in ray.nodes():
        if node["Alive"]:
            there = node["Resources"]
            fitting = int(there.get("CPU", 0) // threads)
            if gpus:
                cards = int(there.get("GPU", 0))
                fitting = min(fitting, cards * int(1 / gpus) if gpus < 1 else int(cards // gpus))
            places += fitting
    return places


def _refuse_too_small(ray: Any, workers: int, threads: int, gpus: float) -> None:
    """Refuse what would wait for ever."""
    if (places := _places(ray, threads, gpus)) < workers:
        each = f"{threads} CPUs" + f" and {gpus:g} GPUs" * bool(gpus)
        raise UserError(
            f"The cluster has room for {places} workers with {each} each, not for {workers}; give fewer workers, or "
            "less to each."
        )


def send_code_of(*objects: Any) -> None:
    """Have these functions and classes, which workers of Ray may not be able to import, travel as code."""
    pickling = import_module("ray.cloudpickle")
    for name in {one.__module__ for one in objects}:
        if not name.startswith(("kvprobe.", "__main__")):
            pickling.register_pickle_by_value(sys.modules[name])
