"""Packed weights give the same products; when they are used; and that nothing is left of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprobe.faults import Scope, Zeros
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Question, Trial, sweep
from kvprobe.models.lanes import Lanes
from kvprobe.models.packed import ROWS, STEPS, _product, is_worth_packing, packed
from tests.models import gpt_neox, llama
from tests.random_caches import random_tokens

PROMPT = random_tokens(1, {"T1": 9})

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN (torch.backends.mkldnn)"
)


@needs_onednn
@pytest.mark.parametrize("model", [gpt_neox, llama])  # with biases and without
def test_products_are_the_same_but_for_rounding_and_the_model_is_left_as_it_was(model: Callable[[], Model]):
    plain = model().lanes.plain
    ids = torch.randint(0, plain.config.vocab_size, (3, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = plain(ids).logits
        with packed(plain, rows=3):
            first, *_ = [module for module in plain.modules() if type(module) is torch.nn.Linear]
            first.weight.mul_(2)  # packed already: a product that changes was not made with the packed weights
            inside = plain(ids).logits
            first.weight.div_(2)
        torch.testing.assert_close(inside, before)
        assert torch.equal(plain(ids).logits, before)


@needs_onednn
def test_an_interrupted_model_is_left_as_it_was():
    plain = llama().lanes.plain
    with pytest.raises(KeyboardInterrupt), packed(plain, rows=3):
        raise KeyboardInterrupt
    assert not any("forward" in vars(module) for module in plain.modules())


def swept(lanes: Lanes) -> list[tuple[int, ...]]:
    trials = [Trial(Zeros(scope=Scope(rate=rate))) for rate in (0.4, 0.9)]
    (answered,) = sweep(lanes, [Question(PROMPT, trials)], max_new_tokens=6, stop=())
    return [answered.clean.tokens, *(outcome.tokens for outcome in answered.outcomes)]


def generated(lanes: Lanes, **settings: Any) -> list[tuple[int, ...]]:
    return [*generate(lanes, [PROMPT, PROMPT[:7], PROMPT[:5]], max_new_tokens=6, stop=(), **settings).tokens]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each product with packed weights the number of its rows; all models are worth it."""
    rows = list[int]()

    def product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        rows.append(len(x))
        return _product(weight, bias, x)

    monkeypatch.setattr("kvprobe.models.packed._product", product)
    monkeypatch.setattr("kvprobe.models.packed.is_worth_packing", lambda *_: True)
    return rows


@needs_onednn
@pytest.mark.parametrize("said", [swept, generated])
def test_batches_say_the_same_with_packed_weights(
    said: Callable[[Lanes], list[tuple[int, ...]]], products: list[int], monkeypatch: pytest.MonkeyPatch
):
    lanes = llama().lanes
    packed_weights = said(lanes)
    assert products[-1] == 3  # rows of the batch
    products.clear()
    monkeypatch.setattr("kvprobe.models.packed.is_worth_packing", lambda *_: False)
    assert said(lanes) == packed_weights
    assert not products


@needs_onednn
def test_what_may_want_gradients_or_write_weights_is_not_given_packed_ones(products: list[int]):
    lanes = llama().lanes
    generated(lanes, on_step=lambda step, cache: None)
    generated(lanes, lane="hooked")
    assert not products


def test_only_long_answers_of_several_rows_of_large_models_in_float32_on_cpus_without_avx512_are_worth_it(
    monkeypatch: pytest.MonkeyPatch,
):
    plain = llama().lanes.plain
    size = sum(weight.nbytes for weight in plain.parameters())

    def worth(
        rows: int = ROWS, steps: int = STEPS, smallest: int = size, free: int = 3 * size, cpu: str = "AVX2"
    ) -> bool:
        monkeypatch.setattr("kvprobe.models.packed.SMALLEST", smallest)
        monkeypatch.setattr("kvprobe.models.packed.free_bytes", lambda _: free)
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: cpu)
        return is_worth_packing(plain, rows, steps)

    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert worth()
    assert not worth(rows=ROWS - 1)
    assert not worth(steps=STEPS - 1)
    assert not worth(smallest=size + 1)
    assert not worth(free=2 * size)
    assert not worth(cpu="AVX512")
    plain.bfloat16()
    assert not worth(smallest=0)
