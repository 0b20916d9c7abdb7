"""Products by oneDNN are those of torch but for rounding, in passes of kvprobe alone, and nothing is left of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvprobe.inference.model import Model, load
from kvprobe.models.products import FEWEST_NUMBERS, by_onednn
from tests.models import llama
from tests.models.test_packed import needs_onednn
from tests.random_caches import random_tokens

PROMPT = random_tokens(1, {"T1": 9})
LARGE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture
def model() -> Model:
    """Whose MLPs have weights that are large enough."""
    return llama(intermediate_size=FEWEST_NUMBERS // 32)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by oneDNN, which is taken to be faster."""
    rows, product = list[int](), torch.ops.mkldnn._linear_pointwise

    def counting(x: Tensor, *others: Any) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return product(x, *others)

    monkeypatch.setattr("torch.ops.mkldnn._linear_pointwise", counting)
    monkeypatch.setattr("kvprobe.models.unproved.onednn_is_faster", lambda: True)
    return rows


@needs_onednn
def test_each_pass_takes_it_for_large_weights_and_leaves_the_model_as_it_was(model: Model, counted: list[int]):
    plain = model.lanes.plain
    model.prefill(PROMPT)  # the gate
    counted.clear()
    cache = model.prefill(PROMPT)
    assert counted == [len(PROMPT)] * len(LARGE) * model.geometry.n_layers
    assert not [module for module in plain.modules() if "forward" in vars(module)]
    written = model.lanes.written
    vars(model.lanes)["_slow_products"] = False
    counted.clear()
    usual = model.prefill(PROMPT)
    assert not counted
    assert model.lanes.written == written
    for one, other in zip(cache.values, usual.values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@needs_onednn
def test_what_is_to_be_differentiated_or_rounded_or_was_replaced_is_left_alone(model: Model, counted: list[int]):
    plain, ids = model.lanes.plain, torch.arange(15).view(3, 5)
    own = plain.get_submodule("model.layers.0.mlp.up_proj")
    vars(own)["forward"] = lambda x: nn.Linear.forward(own, x)
    with by_onednn(plain):
        plain(ids).logits.sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            plain(ids)
        assert not counted
        with torch.no_grad():
            plain(ids)
    assert counted == [15] * (len(LARGE) * model.geometry.n_layers - 1)
    assert "forward" in vars(own)
    assert not load(plain.to(torch.bfloat16)).lanes._slow_products
