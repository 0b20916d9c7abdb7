"""With an executor, functions give the same numbers as without one."""

import os
import warnings

import pytest
import torch

from kvprobe.executors import Processes
from kvprobe.inference.elsewhere import each, shares
from kvprobe.inference.model import Model
from tests.executed import assert_identical, tables
from tests.models import any_model
from tests.refusals import refused


def process_of(model: Model, number: int, added: int) -> tuple[int, int, torch.Tensor]:
    return os.getpid(), number + added, torch.full((2,), float(number))


def test_processes_give_the_same_numbers_to_the_bit(monkeypatch: pytest.MonkeyPatch):
    model, executor, threads = any_model(), Processes(2), torch.get_num_threads()
    torch.set_num_threads(1)  # as forked processes have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = tables(model, None)
        with monkeypatch.context() as patch:
            for module, name in (("patching.run", "Runs.values"), ("layers.suffix", "Suffix._pass")):
                kind, _, method = name.partition(".")
                whole = getattr(__import__(f"kvprobe.{module}", fromlist=[kind]), kind)
                real, mine = getattr(whole, method), os.getpid()

                def elsewhere(*given: object, real: object = real, mine: int = mine, **named: object) -> object:
                    assert os.getpid() != mine, "it is measured here"
                    return real(*given, **named)  # type: ignore[operator]

                patch.setattr(whole, method, elsewhere)
            assert_identical(here, tables(model, executor))
    torch.set_num_threads(threads)


def test_each_item_goes_to_another_process_and_results_come_back_in_order():
    asked = {"executor": Processes(2), "doing": "Adding", "unit": "number", "progress": False}
    found = each(any_model(), process_of, range(5), 10, **asked)
    assert [number for _, number, _ in found] == [10, 11, 12, 13, 14]
    assert os.getpid() not in {process for process, _, _ in found}
    assert torch.equal(torch.stack([tensor for _, _, tensor in found])[:, 0], torch.arange(5.0))
    refused(lambda: Processes(0), "at least 1")


@pytest.mark.parametrize(("count", "whole", "sizes"), [(9, 1, [3, 3, 3]), (9, 4, [4, 4, 1]), (2, 9, [2]), (0, 1, [])])
def test_shares_keep_passes_whole(count: int, whole: int, sizes: list[int]):
    parts = shares(range(count), Processes(1), whole)
    assert [number for part in parts for number in part] == [*range(count)]
    assert [len(part) for part in parts] == sizes
