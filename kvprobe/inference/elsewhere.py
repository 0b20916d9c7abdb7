"""A model that works in other processes too: the same one, loaded there by its name, and what is done with it."""

import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, TypeVar

from kvprobe.errors import UserError
from kvprobe.executors import Executor, Workers
from kvprobe.fingerprint import differing
from kvprobe.inference.model import Model, load
from kvprobe.models.catalogue import check_source
from kvprobe.progress import Bar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SameModel:
    """Loads a model by its name, placed in the same way, and refuses another than the one that it was made of."""

    source: str
    loading: Mapping[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, model: Model) -> "SameModel":
        """Of a model that was loaded by its name.

        Raises:
            UserError: it has an adapter added, or was loaded from an object.
        """
        placing, source = model.placing, model.placing.source_of(model.name)
        try:
            check_source(source)
        except UserError as error:
            if " with " in model.name:
                why = "has an adapter added; load the adapter's own folder as the model, or save the two as one"
            else:
                why = "was loaded from an object; save it to a folder that all machines have, and load that"
            raise UserError(f"A cluster loads models by their name alone, and {model.name!r} {why}.") from error
        device = "auto" if placing.mapped else model.lanes.device.type
        loading = {"device": device, "dtype": model.dtype, "chunk": model.lanes.chunk, **vars(placing)}
        return cls(source, loading, model.fingerprint)

    def __call__(self) -> Model:
        """The model.

        Raises:
            UserError: it is another one here, or cannot be loaded so.
        """
        model = load(self.source, **self.loading)
        if model.fingerprint != self.fingerprint:
            raise UserError(
                f"The model {self.source} of a worker on {platform.node()} is not that of the caller (it differs in "
                f"{differing(self.fingerprint, model.fingerprint)}); give all machines the same files, and load it by "
                "its name alone."
            )
        return model


@contextmanager
def working(executor: Executor, model: Model) -> Generator[Workers]:
    """Workers that hold this model; those of a cluster can be given as the executor of several calls.

    Raises:
        UserError: as `Executor.started` and `SameModel`.
    """
    with executor.started(model, SameModel.of, model.lanes.device) as workers:
        yield workers


def each(
    model: Model,
    function: Callable[Concatenate[Model, Item, ...], Result],
    items: Sequence[Item],
    *given: object,
    executor: Executor,
    doing: str,
    unit: str,
    progress: bool = True,
) -> list[Result]:
    """What a function of the model gives for each item, in order.

    Args:
        function: at the top level of a module, so that other processes find it.
        given: what it takes after the item.
        doing, unit: what the progress bar says.
    """
    results: dict[int, Result] = {}
    with (
        working(executor, model) as workers,
        Bar[Any](total=len(items), desc=doing, unit=unit, disable=not progress) as bar,
    ):
        for place, result in workers.results(function, items, *given):
            results[place] = result
            bar.update()
    return [results[place] for place in range(len(items))]


def shares(items: Sequence[Item], executor: Executor, whole: int = 1) -> list[Sequence[Item]]:
    """Items for workers, a few shares for each, so that one that is late does not have much left.

    Args:
        whole: items of which so many stay together.
    """
    passes = -(-len(items) // whole)
    size = whole * max(1, -(-passes // (4 * executor.count)))
    return [items[start : start + size] for start in range(0, len(items), size)]
