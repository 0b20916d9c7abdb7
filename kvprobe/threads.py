"""Threads for many small matrices: each is solved in one thread, and several at once.

Torch gives all its threads to each batch of small matrices, which LAPACK then solves one after the other. On two cores
a batch of Cholesky factors of 192 × 192 takes three to seven times as long in both as in one.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from kvprobe.restoring import restoring

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Generator[int]:
    """While this lasts, torch uses one thread; gives the number that it had. Decorates functions, too."""
    threads = torch.get_num_threads()
    with restoring(lambda: torch.set_num_threads(threads)):
        torch.set_num_threads(1)
        yield threads


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], at_once: int | None = None) -> Iterator[Result]:
    """`work` of each item, in order, several at once, each in one thread. Items are drawn only when they are due, since
    each may be large.

    Args:
        at_once: as many as torch may use threads, by default.
    """
    with one_thread() as threads, ThreadPoolExecutor(at_once or threads) as pool:
        begun: deque[Future[Result]] = deque()
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > (at_once or threads):
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
