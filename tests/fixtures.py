"""What tests of many folders share, on the cores that torch may use."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from jaxtyping import config
from transformers import AutoTokenizer

from kvprobe.inference.model import Model, load
from kvprobe.models.loading import resolve_folder
from tests.checking import start_test
from tests.models import ARCHITECTURES, tiny_tokenizer

THREADS = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(THREADS)
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of processes that tests start
# The same examples in each run: a failure can be repeated, and a pass means the same everywhere.
hypothesis.settings.register_profile("kvprobe", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("kvprobe")


@pytest.fixture(scope="session")
def smol() -> Model:
    """SmolLM2-135M, the way a user gets it."""
    return load("smollm2-135m")


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


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, Model]:
    """All tiny models by architecture, with the tiny tokenizer."""
    return {name: build(tokenizer=tiny_tokenizer()) for name, build in ARCHITECTURES.items()}


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest, tiny_models: dict[str, Model]) -> Model:
    """Each tiny model in turn."""
    return tiny_models[request.param]


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: dict[str, Model]) -> Model:
    return tiny_models["llama"]


@pytest.fixture(scope="session")
def tiny_gemma(tiny_models: dict[str, Model]) -> Model:
    return tiny_models["gemma3"]


@pytest.fixture
def namespace(smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of a page or notebook shares, in a folder of its own; the model is loaded once for all of them."""
    monkeypatch.setattr(
        "kvprobe.inference.model.load", lambda source, **how: smol if source == "smollm2-135m" else load(source, **how)
    )
    monkeypatch.chdir(tmp_path)
    return {}


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No checking of annotations, so that the library's own refusal is seen, as a user sees it."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Before the test's fixtures are made."""
    start_test()


def pytest_collection_finish():
    """Modules and tests outlive all else: the garbage collector need not walk them again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
