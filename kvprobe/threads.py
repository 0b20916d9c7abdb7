"""Threads for many small matrices: each is solved in one thread, and several at once.

Torch gives all its threads to each batch of small matrices, which LAPACK then solves one after the other. On two cores
a batch of Cholesky factors of 192 × 192 takes three to seven times as long so as in one thread.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Generator[int]:
    """While this lasts, torch uses one thread; gives the number that it had. Decorates functions, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`work` of each item, in order, as many at once as torch may use threads, each in one."""
    with one_thread() as threads, ThreadPoolExecutor(threads) as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
