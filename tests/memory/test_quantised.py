"""The budget's quantised caches are those that transformers really holds: storage, byte for byte, step by step."""

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optimum.quanto.library.extensions import get_extension
from transformers import LlamaConfig
from transformers.cache_utils import QuantizedCache

from kvprobe.inference.measured import storage_bytes
from kvprobe.memory import hf
from kvprobe.memory.budget import budget
from kvprobe.memory.caches import AttentionStore, LayerStore, State
from kvprobe.memory.numbers import FORMATS
from kvprobe.memory.request import Request
from kvprobe.memory.written import plan_of
from tests.refusals import refused


@pytest.fixture(scope="module", autouse=True)
def _without_a_compiler() -> Iterator[None]:
    """Quanto unpacks in Python: it would first compile an extension for half a minute, and hold the same bytes."""

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_extension("quanto_cpp"), "_lib", SimpleNamespace(unpack=unpack))
        yield


quanto = st.sampled_from(["int4", "int2"])
floats = st.sampled_from(["float32", "bfloat16"])
shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.sampled_from([8, 16, 32, 64]))
"""Rows, KV heads, and numbers in a key and in a value."""


@cache
def one_layer() -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)


class Conversation:
    """A quantised cache of one layer, read into directly, and what the budget says of it."""

    def __init__(self, numbers: str, dtype: str, shape: tuple[int, int, int], d_value: int | None = None):
        nbits = {"int4": 4, "int2": 2}.get(numbers)
        self.cache = QuantizedCache("quanto", one_layer(), nbits) if nbits else QuantizedCache("fp8", one_layer())
        self.numbers, self.dtype, self.shape = FORMATS[numbers], FORMATS[dtype], shape
        self.d_value = d_value or shape[2]

    def read(self, tokens: int) -> list[int]:
        """Bytes held when so many tokens have been read in one pass."""
        batch, heads, d_key = self.shape
        keys = torch.randn(batch, heads, tokens, d_key, dtype=getattr(torch, self.dtype.name))
        values = torch.randn(batch, heads, tokens, self.d_value, dtype=keys.dtype)
        self.cache.update(keys, values, 0)
        return storage_bytes(self.cache)

    def layers(self, **changes: Any) -> tuple[LayerStore, ...]:
        _, heads, d_key = self.shape
        return (LayerStore(AttentionStore(heads * 2, heads, d_key, self.d_value, **changes)),)

    def request(self, prompt: int, new: int = 0) -> Request:
        return Request(prompt, new, self.shape[0], dtype=self.dtype, numbers=self.numbers)

    def predicted(self, prompt: int, new: int = 0) -> list[int]:
        return hf.held(self.layers(), self.request(prompt, new))


def whole_groups(shape: tuple[int, int, int], prompt: int) -> int:
    """The shortest prompt from this length up of which each row's numbers fill whole groups."""
    while shape[1] * prompt * shape[2] % 64:
        prompt += 1
    return prompt


@given(numbers=quanto, dtype=floats, shape=shapes, prompt=st.integers(1, 40))
@example("int4", "float32", (1, 1, 64), 1)
@example("int2", "bfloat16", (1, 1, 64), 1)
@settings(max_examples=60)
def test_a_prompt_in_quantos_cache_is_held_to_the_byte(
    numbers: str, dtype: str, shape: tuple[int, int, int], prompt: int
):
    prompt = whole_groups(shape, prompt)
    conversation = Conversation(numbers, dtype, shape)
    assert conversation.read(prompt) == conversation.predicted(prompt)


@pytest.mark.parametrize(
    ("numbers", "dtype", "shape", "prompt"),
    [
        ("int4", "float32", (1, 2, 16), 4),
        ("int4", "bfloat16", (3, 1, 8), 8),
        ("int2", "float32", (2, 3, 64), 5),
        ("int2", "bfloat16", (1, 1, 32), 130),
        ("fp8", "float32", (2, 2, 8), 3),
        ("fp8", "bfloat16", (1, 3, 16), 1),
    ],
)
def test_every_generated_token_is_held_to_the_byte(numbers: str, dtype: str, shape: tuple[int, int, int], prompt: int):
    conversation = Conversation(numbers, dtype, shape)
    assert conversation.read(prompt) == conversation.predicted(prompt)
    for new in range(1, 2 * hf.RESIDUAL + 4):
        assert conversation.read(1) == conversation.predicted(prompt, new), new


@given(dtype=floats, shape=shapes, prompt=st.integers(1, 50), new=st.integers(0, 5))
@settings(max_examples=40)
def test_an_fp8_cache_is_held_to_the_byte(dtype: str, shape: tuple[int, int, int], prompt: int, new: int):
    conversation = Conversation("fp8", dtype, shape)
    held = conversation.read(prompt)
    for _ in range(new):
        held = conversation.read(1)
    assert held == conversation.predicted(prompt, new)


@pytest.mark.parametrize("numbers", ["int4", "int2", "fp8"])
@pytest.mark.parametrize("new", [0, 1, 127, 128, 129])
def test_latent_attention_is_held_to_the_byte(numbers: str, new: int):
    conversation = Conversation(numbers, "bfloat16", (2, 1, 32), d_value=16)
    held = conversation.read(12)
    for _ in range(new):
        held = conversation.read(1)
    assert held == hf.held(conversation.layers(latent=True), conversation.request(12, new))


@given(numbers=quanto, shape=shapes, prompt=st.integers(1, 16))
@example("int4", (2, 1, 16), 2)
@example("int2", (2, 2, 16), 1)
@settings(max_examples=60)
def test_prompts_are_refused_exactly_where_quanto_refuses_them(numbers: str, shape: tuple[int, int, int], prompt: int):
    conversation = Conversation(numbers, "float32", shape)
    request = conversation.request(prompt)
    try:
        conversation.read(prompt)
    except ValueError:
        refused(lambda: hf.check(conversation.layers(), request), "whole groups")
    else:
        hf.check(conversation.layers(), request)


def test_a_format_without_groups_refuses_no_length():
    for prompt in range(1, 20):
        conversation = Conversation("fp8", "float32", (1, 1, 8))
        conversation.read(prompt)
        hf.check(conversation.layers(), conversation.request(prompt))


@pytest.mark.parametrize("numbers", ["int4", "int2", "fp8"])
@pytest.mark.parametrize(
    "layer",
    [
        LayerStore(AttentionStore(4, 2, 16, 16, reach=8)),
        LayerStore(AttentionStore(4, 2, 16, 16, reach=8, chunked=True)),
        LayerStore(AttentionStore(4, 2, 16, 16, crosses=True)),
        LayerStore(AttentionStore(4, 1, 16, 8, latent=True, d_index=8)),
        LayerStore(state=State("Mamba", 8, 4, 8)),
        LayerStore(AttentionStore(4, 2, 16, 16), State("Mamba", 8, 4, 8)),
        LayerStore(),
    ],
    ids=str,
)
def test_only_full_attention_is_quantised(numbers: str, layer: LayerStore):
    refused(
        lambda: hf.held((LayerStore(AttentionStore(4, 2, 16, 16)), layer), Request(64, numbers=FORMATS[numbers])),
        "full attention",
    )


@pytest.mark.parametrize(
    ("name", "choices", "said"),
    [
        ("Qwen/Qwen3-8B", {"cache_dtype": "nvfp4"}, "nvfp4"),
        ("Qwen/Qwen3-8B", {"cache_dtype": "float16"}, "float16"),
        ("Qwen/Qwen3-8B", {"cache_dtype": "int4", "policy": "TOVA(8)"}, "TOVA(8)"),
        ("Qwen/Qwen3-8B", {"policy": "Quantise(4)"}, "Quantise(4)"),
        ("google/gemma-2-9b-it", {"cache_dtype": "fp8"}, "sliding"),
    ],
)
def test_caches_that_transformers_lacks_are_refused_in_a_sentence(name: str, choices: dict[str, str], said: str):
    refused(lambda: budget(name, engine="hf", **choices), said)


def test_policies_and_quantised_caches_do_not_mix():
    request = Request(64, numbers=FORMATS["int4"], plan=plan_of("TOVA(8)"))
    refused(lambda: hf.held((LayerStore(AttentionStore(4, 2, 16, 16)),), request), "cannot evict")
