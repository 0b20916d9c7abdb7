"""What is changed for a while is put back, whatever happens meanwhile."""

from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def restoring(undo: Callable[[], object]) -> Generator[None]:
    """`undo` is called when this ends. An interruption may come in the middle of it, so it is called twice.

    Whatever it puts back must be changed while this lasts, not before.
    """
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()
