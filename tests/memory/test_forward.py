"""The budget's peaks are those of torch's allocator, for the families whose passes follow the code of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvprobe.inference.measured import _on_cpu
from kvprobe.memory.budget import Budget, budget
from kvprobe.memory.widths import FOLLOWED
from tests.memory.families import TINY, settings

SCRATCH = 300_000
"""Bytes of the kernels' own buffers for any model: negligible for a real model, and large for a tiny one."""

EXACT = [name for name, (kind, _) in TINY.items() if kind in FOLLOWED]

_LARGER = {
    "hidden_size": 4, "intermediate_size": 6, "moe_intermediate_size": 6, "n_embd": 4, "head_dim": 2, "vocab_size": 4,
    "sliding_window": 8, "max_position_embeddings": 4, "n_positions": 4,
}  # fmt: skip
"""How many times larger than tiny: large enough for tensors to outweigh the kernels' buffers."""


def larger(name: str) -> dict[str, Any]:
    return {
        field: value * _LARGER.get(field, 1) if value and field in _LARGER else value
        for field, value in settings(name).items()
    }


def measured(fields: dict[str, Any], predicted: Budget) -> tuple[int, int]:
    """The most bytes that were there at once beside the weights, while a prompt was read and at the last token."""
    chosen = {name: value for name, value in fields.items() if name != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], **chosen)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=predicted.kernel).eval()
    past = DynamicCache(config=config)
    request = predicted.request
    ids = torch.randint(1, 60, (request.batch, request.context), generator=torch.Generator().manual_seed(0))

    def read(first: int, last: int) -> Callable[[], None]:
        return lambda: model(ids[:, first:last], past_key_values=past, use_cache=True, logits_to_keep=1) and None

    prompt = request.prompt
    with torch.inference_mode():
        reading = _on_cpu([read(0, prompt)], lambda: past)
        generating = _on_cpu([read(prompt, prompt + 1), read(prompt + 1, prompt + 2)], lambda: past)
    return reading.peak, generating.peak


@pytest.mark.parametrize(("tokens", "batch"), [(192, 1), (64, 3), (700, 1)])
@pytest.mark.parametrize("name", EXACT)
def test_peaks_of_reading_and_generating_are_right_within_a_few_percent(name: str, tokens: int, batch: int):
    fields = larger(name)
    predicted = budget(fields, context=tokens, new=2, batch=batch, dtype="float32")
    assert predicted.widths.exact
    reading, generating = measured(fields, predicted)
    assert predicted.phases["reading"].total == pytest.approx(reading, rel=0.03, abs=SCRATCH)
    assert predicted.phases["generating"].total == pytest.approx(generating, rel=0.03, abs=SCRATCH)


@pytest.mark.parametrize("name", ["llama", "llama, one KV head", "gemma3_text", "qwen3", "mistral"])
def test_eager_attention_is_budgeted_too(name: str):
    fields = larger(name)
    predicted = budget(fields, context=400, new=2, dtype="float32", kernel="eager")
    reading, generating = measured(fields, predicted)
    assert predicted.phases["reading"].total == pytest.approx(reading, rel=0.03, abs=SCRATCH)
    assert predicted.phases["generating"].total == pytest.approx(generating, rel=0.03, abs=SCRATCH)
    fused = budget(fields, context=400, new=2, dtype="float32", kernel="sdpa")
    assert predicted.phases["reading"].total > fused.phases["reading"].total
