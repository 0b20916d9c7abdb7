"""Tiny models whose caches matter to what they say."""

from pathlib import Path

import pytest
import torch
import transformers

from kvprobe.inference.model import Model
from tests.models import llama, tiny_tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's run lies."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def deep() -> Model:
    """Four layers, and weights so large that a value moves the answer."""
    return llama(seed=3, num_hidden_layers=4, tokenizer=tiny_tokenizer(), initializer_range=0.4)


@pytest.fixture(scope="session")
def roomy() -> Model:
    """Room for whole conversations, and weights large enough for caches to matter."""
    return llama(tokenizer=tiny_tokenizer(), max_position_embeddings=2048, initializer_range=0.4)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Qwen2 and its tokenizer; many tokens end an answer, so that answers are short."""
    folder = tmp_path_factory.mktemp("qwen2")
    shape = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(shape)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(48))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wordy(smol: Model) -> Model:
    """A tiny random model with the words of SmolLM2, under which conversations are short."""
    words = smol.tokenizer
    size = len(words)
    return llama(seed=1, tokenizer=words, vocab_size=size, initializer_range=0.4, max_position_embeddings=2048)
