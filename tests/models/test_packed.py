"""Packed weights give the same products; when they are used; and that nothing is left of them."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvprobe.faults import Scope, Zeros
from kvprobe.inference.forward import extend
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Question, Trial, sweep
from kvprobe.models.gate import prove_plain
from kvprobe.models.lanes import Lanes
from kvprobe.models.packed import FEWEST_ROWS, FEWEST_STEPS, is_worth_packing, packed
from tests.models import gpt_neox, llama
from tests.random_caches import random_tokens

PROMPT = random_tokens(1, {"T1": 9})

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN (torch.backends.mkldnn)"
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each product with packed weights the number of its rows; all models are worth it."""
    rows, product = list[int](), torch.ops.mkldnn._linear_pointwise

    def counted(x: Tensor, *others: Any) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return product(x, *others)

    monkeypatch.setattr("torch.ops.mkldnn._linear_pointwise", counted)
    monkeypatch.setattr("kvprobe.models.packed.is_worth_packing", lambda *_: True)
    return rows


def linear_modules(plain: nn.Module) -> list[nn.Linear]:
    return [module for module in plain.modules() if type(module) is nn.Linear]


@needs_onednn
@pytest.mark.parametrize("model", [gpt_neox, llama])  # with biases and without
@torch.no_grad()
def test_products_are_the_same_but_for_rounding_and_the_model_is_left_as_it_was(
    model: Callable[[], Model], products: list[int]
):
    plain = model().lanes.plain
    ids = torch.arange(15).view(3, 5)
    before = plain(ids).logits
    with packed(plain, rows=3):
        torch.testing.assert_close(plain(ids).logits, before)
        assert products == [15] * len(linear_modules(plain))
    assert torch.equal(plain(ids).logits, before)
    assert len(products) == len(linear_modules(plain))


@needs_onednn
@pytest.mark.parametrize("at", [0, 2])
def test_an_interrupted_model_is_left_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch):
    plain, calls, pack = llama().lanes.plain, count(), torch.ops.mkldnn._reorder_linear_weight

    def interrupted(*weight: Any) -> Tensor:
        if next(calls) == at:
            raise KeyboardInterrupt
        return pack(*weight)

    monkeypatch.setattr("torch.ops.mkldnn._reorder_linear_weight", interrupted)
    with pytest.raises(KeyboardInterrupt), packed(plain, rows=3):
        pass
    assert not any("forward" in vars(module) for module in plain.modules())


def written(module: nn.Linear) -> None:
    module.weight.mul_(2)


def exchanged(module: nn.Linear) -> None:
    module.weight.data = 2 * module.weight.data


@needs_onednn
@pytest.mark.parametrize("change", [written, exchanged])
@torch.no_grad()
def test_weights_that_change_meanwhile_are_used_as_they_are(change: Callable[[nn.Linear], None]):
    plain, ids = llama().lanes.plain, torch.arange(15).view(3, 5)
    with packed(plain, rows=3):
        change(linear_modules(plain)[0])
        inside = plain(ids).logits
    torch.testing.assert_close(inside, plain(ids).logits)


@needs_onednn
def test_the_hooked_lane_can_be_built_meanwhile_and_multiplies_with_the_models_own_weights(products: list[int]):
    lanes, rows = llama().lanes, [PROMPT, PROMPT]
    lanes.prove()
    with packed(lanes.plain, rows=2):
        assert lanes.hooked
        products.clear()  # of its proof, which compares it with the plain lane
        inside = extend(lanes, None, rows, "hooked")[1]
        assert not products
    assert torch.equal(inside, extend(lanes, None, rows, "hooked")[1])


@needs_onednn
def test_gradients_and_autocast_are_those_of_the_model(products: list[int]):
    plain, ids = llama().lanes.plain, torch.arange(15).view(3, 5)
    weight = linear_modules(plain)[0].weight
    (expected,) = torch.autograd.grad(plain(ids).logits.sum(), weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = plain(ids).logits
    with packed(plain, rows=3):
        (actual,) = torch.autograd.grad(plain(ids).logits.sum(), weight)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(plain(ids).logits, rounded)
    assert torch.equal(actual, expected)
    assert not products


@needs_onednn
@torch.no_grad()
def test_a_module_whose_forward_was_replaced_keeps_it_and_so_does_a_model_that_is_packed_twice(products: list[int]):
    plain, ids = llama().lanes.plain, torch.arange(15).view(3, 5)
    first, *others = linear_modules(plain)
    first.forward = lambda x: torch.zeros(*x.shape[:-1], first.out_features)
    steered = plain(ids).logits
    with packed(plain, rows=3):
        with packed(plain, rows=3):
            torch.testing.assert_close(plain(ids).logits, steered)
        products.clear()
        torch.testing.assert_close(plain(ids).logits, steered)
        assert len(products) == len(others)
    assert torch.equal(plain(ids).logits, steered)


def swept(lanes: Lanes) -> list[tuple[int, ...]]:
    trials = [Trial(Zeros(scope=Scope(rate=rate))) for rate in (0.4, 0.9)]
    (answered,) = sweep(lanes, [Question(PROMPT, trials)], max_new_tokens=6, stop=())
    return [answered.clean.tokens, *(outcome.tokens for outcome in answered.outcomes)]


def generated(lanes: Lanes, **settings: Any) -> list[tuple[int, ...]]:
    return [*generate(lanes, [PROMPT, PROMPT[:7], PROMPT[:5]], max_new_tokens=6, stop=(), **settings).tokens]


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
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("said", [swept, generated])
def test_the_gate_proves_a_model_with_its_own_products(
    said: Callable[[Lanes], list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
):
    packed_meanwhile = list[bool]()

    def proved(lanes: Lanes) -> bool:
        packed_meanwhile.append(any("forward" in vars(module) for module in lanes.plain.modules()))
        return prove_plain(lanes)

    monkeypatch.setattr("kvprobe.models.lanes.prove_plain", proved)
    said(llama().lanes)
    assert packed_meanwhile == [False]


@needs_onednn
def test_a_single_row_and_the_hooked_lane_are_left_as_they_are(products: list[int]):
    lanes = llama().lanes
    generate(lanes, [PROMPT[:1]], max_new_tokens=6, stop=())
    generated(lanes, lane="hooked")
    assert not products


def test_only_long_answers_of_several_rows_of_large_models_in_float32_on_cpus_that_mkl_is_slow_on_are_worth_it(
    monkeypatch: pytest.MonkeyPatch,
):
    plain = llama().lanes.plain
    size = sum(weight.nbytes for weight in plain.parameters())

    def worth(
        rows: int = FEWEST_ROWS,
        steps: int = FEWEST_STEPS,
        fewest: int = size,
        free: int = 3 * size,
        cpu: str = "AVX2",
        name: str = "Intel(R) Xeon(R)",
    ) -> bool:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name})
        monkeypatch.setattr("kvprobe.models.packed.FEWEST_BYTES", fewest)
        monkeypatch.setattr("kvprobe.models.packed.free_bytes", lambda _: free)
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: cpu)
        return is_worth_packing(plain, rows, steps)

    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    assert worth()
    assert not worth(rows=FEWEST_ROWS - 1)
    assert not worth(steps=FEWEST_STEPS - 1)
    assert not worth(fewest=size + 1)
    assert not worth(free=2 * size)
    assert not worth(cpu="AVX512")
    assert worth(cpu="AVX512", name="AMD EPYC")
    assert not worth(cpu="AVX512")
    with monkeypatch.context() as older:  # of torch, which does not name the processor
        older.delattr(torch.cpu, "get_capabilities")
        assert not is_worth_packing(plain, FEWEST_ROWS, FEWEST_STEPS)
    with monkeypatch.context() as other:
        other.setattr("multiprocessing.parent_process", lambda: "another")
        assert not worth()
    with monkeypatch.context() as other:
        other.setattr("torch.backends.mkldnn.is_available", lambda: False)
        assert not worth()
    plain.bfloat16()
    assert not worth(fewest=0)
