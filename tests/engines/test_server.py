"""The client of a llama.cpp server, against a server in this process."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kvprobe.engines import http
from kvprobe.engines.server import Completion, LlamaServer, served
from kvprobe.inference.model import Model
from kvprobe.threads import one_thread
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
    refused(lambda: LlamaServer("https://127.0.0.1:9").save(0, "x"), "No server answers", "refused")
    refused(lambda: LlamaServer().path("x"), "folder", "--slot-save-path")
    refused(lambda: start(tmp_path / "none.gguf"), "no GGUF file")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    refused(lambda: start(tmp_path / "broken.gguf"), "cannot serve broken.gguf")


@contextmanager
def answering(*pieces: bytes, again: int = 1) -> Iterator[str]:
    """The address of a server that answers anything with these bytes, the last of them as often as is asked for."""

    class Another(StreamRequestHandler):
        def handle(self):
            length = 0
            while (line := self.rfile.readline()).strip():
                length = int(line.split()[1]) if line.lower().startswith(b"content-length:") else length
            self.rfile.read(length)
            with suppress(OSError):  # the client has gone
                for piece in (*pieces[:-1], *[pieces[-1]] * again):
                    self.wfile.write(piece)

    with ThreadingTCPServer(("127.0.0.1", 0), Another) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{other.server_address[1]}"
        finally:
            other.shutdown()
            thread.join()


def said(content: object, status: str = "200 OK", more: str = "") -> bytes:
    """An answer in JSON, or as it is."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


ANSWERS = {
    "text": said(b"hello"),
    "nothing": said({}),
    "a list": said([1]),
    "other types": said({"tokens": 3, "timings": {}, "n_saved": "3", "data": [{"meta": {"n_vocab": 64.5}}]}),
    "deep": said(b"[" * 5000),
    "another protocol": b"SSH-2.0-OpenSSH_9.9\r\n",
    "cut": said({"tokens": [1]}).replace(b"Length: 1", b"Length: 9"),
    "cut in a piece": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{}",
    "pieces of no length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n{}",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_another_server_answers_is_refused(answer: bytes):
    with answering(answer) as url:
        client = LlamaServer(url)
        for ask in (lambda: client.complete([1]), lambda: client.save(0, "x"), lambda: client.vocabulary):
            refused(ask, "is not what llama-server answers")


def test_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    with answering(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 2**16, again=10**6) as url:
        monkeypatch.setattr(http, "MOST_BYTES", 2**20)
        refused(lambda: LlamaServer(url).tokens("a"), "longer than 1,048,576 bytes")


ENDLESS = {
    "status": (b"HTTP/1.1 100 Continue\r\n\r\n",),
    "content": (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 2**16),
    "content in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "end of chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
}


@pytest.mark.parametrize("pieces", ENDLESS.values(), ids=ENDLESS)
def test_a_whole_answer_has_the_time_out_of_one_piece(pieces: Sequence[bytes], monkeypatch: pytest.MonkeyPatch):
    seconds = count()
    monkeypatch.setattr(http, "MOST_BYTES", 2**30)
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with answering(*pieces, again=10**6) as url:
        refused(lambda: LlamaServer(url, timeout=9.0).tokens("a"), "No server answers", "timed out")


def test_a_redirect_is_refused_and_not_followed():
    with answering(said({"tokens": [1]})) as right:
        for status in ("302 Found", "303 See Other", "307 Temporary Redirect"):
            with answering(said(b"", status, f"Location: {right}/tokenize\r\n")) as url:
                refused(lambda url=url: LlamaServer(url).tokens("a"), f"redirects to '{right}/tokenize'")
    with answering(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}") as url:
        refused(lambda: LlamaServer(url).tokens("a"), "status 500")


@pytest.mark.parametrize(
    "url",
    ["", "nothing", "127.0.0.1:8080", "file:///etc/hostname", "data:,{}", "http://[::1", "http://a b", "http://a:b"],
)
def test_what_is_no_url_of_a_server_is_refused(url: str):
    refused(lambda: LlamaServer(url).tokens("a"), "is no URL of llama-server; give one such as http://127.0.0.1:8080")


def test_a_time_out_is_a_number_of_seconds():
    refused(lambda: LlamaServer(timeout=float("inf")), "finite")
    for seconds in (0.0, -1.0, 1e30):
        refused(lambda seconds=seconds: LlamaServer(timeout=seconds), "timeout", "0.001 to 1000000")


@pytest.mark.parametrize("tokens", ["123", [1.5], [True], ["7"], [-1], [2**40], [None], None], ids=str)
def test_tokens_that_are_no_whole_numbers_are_refused(tokens: object):
    with answering(said({"tokens": tokens, "id_slot": 0, "timings": {"cache_n": 0}})) as url:
        refused(lambda: LlamaServer(url).tokens("a"), "is not what llama-server answers")
        refused(lambda: LlamaServer(url).complete([1]), "is not what llama-server answers")


def completion(*tops: object, tokens: Sequence[int] = (7,), slot: int = 0) -> bytes:
    """A completion of tokens with these likeliest ones, their numbers from 0 on."""
    steps = [{"top_logprobs": [{"id": number, "logprob": log} for number, log in enumerate(tops)]} for _ in tokens]
    answer = {"tokens": [*tokens], "completion_probabilities": steps, "timings": {"cache_n": 0}, "id_slot": slot}
    return said(answer | {"data": [{"meta": {"n_vocab": 3}}]})


def test_log_probabilities_that_are_none_or_too_few_are_refused():
    def asked(answer: bytes, n_probs: Any) -> Completion:
        with answering(answer) as url:
            return LlamaServer(url).complete([1], n_probs=n_probs)

    for wrong in (None, "-1", True, 0.4, float("nan"), float("inf")):
        refused(lambda wrong=wrong: asked(completion(-1.0, wrong), 2), "is not what llama-server answers")
    refused(lambda: asked(completion(-1.0, -2.0), "all"), "2 tokens where those of 3 of its 3")
    refused(lambda: asked(completion(), 1), "of 0 tokens where those of 1 of its 3")
    (few,) = asked(completion(-0.1, -3.0, -3.4e38), 20).log_probabilities
    assert few == {0: -0.1, 1: -3.0, 2: float("-inf")}


def test_a_slot_that_is_not_there_or_full_is_refused(server: LlamaServer):
    refused(lambda: server.complete(IDS, slot=9), "no slot 9 and took slot 1")
    size = server.read(lambda reply: reply["default_generation_settings"]["n_ctx"], "/props")
    refused(lambda: server.complete([3] * (size - 4), 20), "4 of 20 tokens", "slot is full")


def test_a_server_computes_on_as_many_threads_as_torch_or_as_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    library, path = MagicMock(), tmp_path / "model.gguf"
    params = library.CommonParams.return_value
    params.n_batch, library.Server.return_value.listening_address = 1, "http://127.0.0.1:1"
    monkeypatch.setattr("kvprobe.engines.server.require_xllamacpp", lambda: library)
    path.touch()
    with one_thread():
        torch.set_num_threads(3)
        for asked, used in ((None, 3), (5, 5)):
            with served(path, threads=asked):
                assert params.cpuparams.n_threads == used


def test_without_xllamacpp_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    refused(lambda: start(tmp_path / "m.gguf"), "pip install 'kvprobe[llamacpp]'")
