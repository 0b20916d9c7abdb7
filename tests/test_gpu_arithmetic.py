"""The work that `benchmarks/gpu.py` holds against a card's roofline, beside what torch counts."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvprobe.inference.model import Model
from tests.models import llama


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
        yield importlib.import_module("gpu")


@pytest.fixture(scope="module")
def model() -> Model:
    return llama()


@pytest.mark.parametrize("tokens", [1, 12])
def test_products_with_weights_are_those_that_torch_counts(gpu: Any, model: Model, tokens: int):
    shape, plain = gpu.Shape.of(model), model.lanes.plain
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(torch.arange(tokens)[None], logits_to_keep=1)
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counted.items() if "mm" in str(operation))
    norms = sum(weight.numel() for weight in plain.parameters() if weight.dim() == 1)
    attention = 4 * shape.wide * tokens * (tokens + 1) / 2
    assert shape.reading(tokens).flop - attention - 2 * tokens * norms == pytest.approx(products, rel=0.01)


def test_a_roofline_is_the_slower_of_work_and_traffic(gpu: Any, model: Model):
    shape = gpu.Shape.of(model)
    read, step = shape.reading(64), shape.reading(1, 64)
    assert step.bytes - shape.reading(1, 63).bytes == shape.slot == model.prefill([1, 2]).nbytes / 2
    limits = gpu.Ceilings(flop=4 * step.flop, bytes=step.bytes)
    assert limits.seconds(step) == 1
    assert limits.seconds(read) == read.flop / (4 * step.flop) > 2
    assert limits.seconds(gpu.added([step, step])) == 2
