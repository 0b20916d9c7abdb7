"""Tiny models whose caches matter to what they say."""

from pathlib import Path
from typing import Any

import pytest

from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from tests.models import llama, tiny_tokenizer
from tests.studies.runs import whole_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's run lies."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, root: Path) -> Run:
    """A whole run of a module's STUDY with its settings SMALL, on the model of the fixture that MODEL names.

    Its controls HOLD, and its figures are drawn but the UNDRAWN.
    """
    module: Any = request.module
    model: Model = request.getfixturevalue(module.MODEL)
    return whole_run(module.STUDY, module.SMALL, model, root, module.HOLD, getattr(module, "UNDRAWN", ()))


@pytest.fixture(scope="session")
def deep() -> Model:
    """Four layers, and weights so large that a value moves the answer."""
    return llama(seed=3, num_hidden_layers=4, tokenizer=tiny_tokenizer(), initializer_range=0.4)


@pytest.fixture(scope="session")
def roomy() -> Model:
    """Room for whole conversations, and weights large enough for caches to matter."""
    return llama(tokenizer=tiny_tokenizer(), max_position_embeddings=2048, initializer_range=0.4)


@pytest.fixture(scope="session")
def wordy(smol: Model) -> Model:
    """A tiny random model with the words of SmolLM2, under which conversations are short."""
    words = smol.tokenizer
    size = len(words)
    return llama(seed=1, tokenizer=words, vocab_size=size, initializer_range=0.4, max_position_embeddings=2048)
