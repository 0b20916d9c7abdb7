import threading
import time

import pytest
import torch

from kvprobe.threads import one_thread, side_by_side


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_as_many_items_at_once_as_torch_has_threads_each_in_one_and_in_order():
    meeting = threading.Barrier(2)

    def work(item: int) -> tuple[int, int]:
        meeting.wait(timeout=60)  # passes only if two are at work
        time.sleep(0.01 * (item % 2 == 0))
        return item, torch.get_num_threads()

    assert list(side_by_side(work, range(6))) == [(item, 1) for item in range(6)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_ends_the_work_and_threads_are_given_back():
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise KeyboardInterrupt
        time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side(work, range(100)))
    assert len(begun) < 20
    assert torch.get_num_threads() == 2

    @one_thread()
    def inside() -> int:
        return torch.get_num_threads()

    assert (inside(), torch.get_num_threads()) == (1, 2)
