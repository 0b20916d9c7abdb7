"""Tokenizers of real conversations."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from kvprobe.models.loading import resolve_folder


@pytest.fixture(scope="session", params=["its own template", "no template"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """SmolLM2's, with its chat template and, as base models have it, without one."""
    loaded = load_tokenizer()
    if request.param == "no template":
        loaded.chat_template = None
    return loaded


@pytest.fixture(scope="session")
def smol_tokenizer() -> Any:
    return load_tokenizer()


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_folder("smollm2-135m"), local_files_only=True)
