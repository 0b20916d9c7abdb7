"""What tests of the page share."""

from collections.abc import Iterator

import pytest

from kvprobe.engines.server import LlamaServer, served
from kvprobe.inference.model import Model
from tests.models.gguf_file import write_gguf


@pytest.fixture(scope="session")
def tiny_server(tiny_llama: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """The tiny Llama in llama.cpp, in float32."""
    path = write_gguf(tiny_llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    with served(path, cache="f32", context=512, threads=1, flash=False) as running:
        yield running
