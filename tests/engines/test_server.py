"""The client of a llama.cpp server, against a server in this process."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from kvprobe.engines.server import LlamaServer, served
from kvprobe.inference.model import Model
from tests.models import llama, tiny_tokenizer
from tests.models.gguf_file import write_gguf
from tests.refusals import refused

IDS = torch.randint(2, 60, (24,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return llama(tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    path = write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    with served(path, cache="f32", context=128, threads=1, slots=2, flash=False) as running:
        yield running


def expected(model: Model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.lanes.plain(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)


def test_log_probabilities_are_those_of_the_model(server: LlamaServer, model: Model):
    answer = server.complete(IDS, n_probs="all", reuse=False)
    (given,) = answer.log_probabilities
    true = expected(model, IDS)
    assert answer.tokens == (int(true.argmax()),)
    assert torch.allclose(torch.tensor([given[token] for token in range(len(given))]), true, rtol=0, atol=1e-5)
    (few,) = server.complete(IDS, n_probs=3).log_probabilities
    assert [*few] == true.topk(3).indices.tolist()


def test_what_is_in_a_slot_is_reused_unless_it_is_asked_not_to_be(server: LlamaServer):
    server.complete(IDS, reuse=False)
    assert server.complete([*IDS, 5]).reused == len(IDS)
    assert server.complete([*IDS, 5], reuse=False).reused == 0
    assert server.complete([*IDS, 5], slot=1).reused == 0


def test_a_slot_that_was_erased_comes_back_from_its_file(server: LlamaServer):
    before = server.complete(IDS, n_probs="all", reuse=False)
    assert server.save(0, "kept") == len(IDS)
    assert server.erase(0) == len(IDS)
    assert server.complete([7, 8, 9]).reused == 0
    assert server.restore(0, "kept") == len(IDS)
    after = server.complete(IDS, n_probs="all")
    assert (before.reused, after.reused) == (0, len(IDS) - 1)
    assert after.log_probabilities[0] == pytest.approx(before.log_probabilities[0], abs=1e-5)


def start(gguf: Path) -> None:
    with served(gguf):
        pass


def test_what_a_server_refuses_and_who_does_not_answer_are_sentences(server: LlamaServer, tmp_path: Path):
    refused(lambda: server.restore(0, "nowhere"), "refuses /slots/0", "restore")
    refused(lambda: server.complete([10**6]), "invalid tokens")
    refused(lambda: LlamaServer("http://127.0.0.1:9").save(0, "x"), "No server answers", "start llama-server")
    refused(lambda: LlamaServer("nothing").save(0, "x"), "unknown url type")
    refused(lambda: LlamaServer().path("x"), "folder", "--slot-save-path")
    refused(lambda: start(tmp_path / "none.gguf"), "no GGUF file")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    refused(lambda: start(tmp_path / "broken.gguf"), "cannot serve broken.gguf")


@pytest.mark.parametrize("said", [b"hello", b"{}", b"[1]", b'{"tokens": 3, "timings": {}}', b"[" * 5000])
def test_what_another_server_answers_is_refused(said: bytes):
    class Another(BaseHTTPRequestHandler):
        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object):
            pass

    with HTTPServer(("127.0.0.1", 0), Another) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        client = LlamaServer(f"http://127.0.0.1:{other.server_port}")
        try:
            for ask in (lambda: client.complete([1]), lambda: client.save(0, "x"), lambda: client.vocabulary):
                refused(ask, "is not what llama-server answers")
        finally:
            other.shutdown()
            thread.join()


def test_without_xllamacpp_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    refused(lambda: start(tmp_path / "m.gguf"), "pip install 'kvprobe[llamacpp]'")
