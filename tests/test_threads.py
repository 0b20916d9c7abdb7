import threading
from collections.abc import Iterator

import pytest
import torch

from kvprobe.threads import one_thread, side_by_side


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_as_many_items_at_once_as_torch_has_threads_each_in_one_and_in_order():
    done = [threading.Event() for _ in range(6)]

    def work(item: int) -> tuple[int, int]:
        assert item % 2 or done[item + 1].wait(timeout=60)  # the later of a pair ends first
        done[item].set()
        return item, torch.get_num_threads()

    assert list(side_by_side(work, range(6))) == [(item, 1) for item in range(6)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(("at_once", "ahead"), [(None, 3), (1, 2)])
def test_items_are_drawn_when_they_are_due_and_an_error_ends_the_work(at_once: int | None, ahead: int):
    drawn = []

    def items() -> Iterator[int]:
        for item in range(100):
            drawn.append(item)
            yield item

    def work(item: int) -> int:
        if item == 5:
            raise KeyboardInterrupt
        return item

    results = side_by_side(work, items(), at_once)
    assert next(results) == 0
    assert len(drawn) == ahead
    with pytest.raises(KeyboardInterrupt):
        list(results)
    assert len(drawn) == 5 + ahead
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_a_function_may_ask_for_one_thread():
    assert (one_thread()(torch.get_num_threads)(), torch.get_num_threads()) == (1, 2)
