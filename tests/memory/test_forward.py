"""The budget's peaks are those that torch's allocator sees, for the families whose passes were followed through the code."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvprobe.measured import _on_cpu
from kvprobe.memory.budget import Budget, budget
from kvprobe.memory.forward import _FOLLOWED
from tests.memory.families import TINY, settings

TOKENS = 192
FOLLOWED = [name for name, (kind, _) in TINY.items() if kind in _FOLLOWED]

_LARGER = {
    "hidden_size": 4, "intermediate_size": 6, "moe_intermediate_size": 6, "n_embd": 4, "head_dim": 2, "vocab_size": 4,
    "sliding_window": 8,
}  # fmt: skip
"""How many times larger than tiny: large enough for tensors to outweigh what kernels keep aside."""


def larger(name: str) -> dict[str, Any]:
    return {
        each: value * _LARGER.get(each, 1) if value and each in _LARGER else value
        for each, value in settings(name).items()
    }


def measured(fields: dict[str, Any], predicted: Budget, batch: int) -> int:
    """The most bytes that were there at once beside the weights, while a prompt was read."""
    chosen = {name: value for name, value in fields.items() if name != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], **chosen)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=predicted.kernel).eval()
    past = DynamicCache(config=config)
    ids = torch.randint(1, 60, (batch, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        moment = _on_cpu([lambda: model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)], lambda: past)
    return moment.peak


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_peak_of_reading_a_prompt_is_right_within_two_percent(name: str, batch: int):
    fields = larger(name)
    predicted = budget(fields, context=TOKENS, batch=batch, dtype="float32")
    assert predicted.widths.exact
    found = measured(fields, predicted, batch)
    assert predicted.moments["reading"].total == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3", "mistral"])
def test_eager_attention_is_budgeted_too(name: str):
    fields = larger(name)
    predicted = budget(fields, context=TOKENS, dtype="float32", kernel="eager")
    assert predicted.moments["reading"].total == pytest.approx(measured(fields, predicted, 1), rel=0.02)
    assert predicted.peak > budget(fields, context=TOKENS, dtype="float32", kernel="sdpa").peak
