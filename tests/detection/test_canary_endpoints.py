"""The canary over HTTP: llama.cpp itself, by its own protocol and by OpenAI's, and a small endpoint as vLLM answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import Ledger
from kvprobe.detection.canary import EngineAnswer, ScriptSizes, canary, llama_server, openai_endpoint, vllm_endpoint
from kvprobe.detection.canary.target import Forgets, SavesSlots
from kvprobe.engines.plain import open_plain, save_plain
from kvprobe.engines.server import LlamaServer, served
from kvprobe.engines.slot import read_slot, stored, write_slot
from kvprobe.engines.vllm import loadable
from kvprobe.errors import UserError
from kvprobe.faults import Scope, Zeros
from tests.detection.paged_engine import BLOCK, PagedEngine
from tests.engines.test_server import answering, said
from tests.models import llama, tiny_tokenizer
from tests.models.gguf_file import write_gguf
from tests.refusals import refused

SIZES = ScriptSizes(block=BLOCK, chunk=100, fill=600, idle=0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """llama.cpp with a tiny Llama whose weights are large, so that what a slot sees is felt."""
    model = llama(tokenizer=tiny_tokenizer())
    for parameter in model.lanes.plain.parameters():
        if parameter.ndim == 2:
            parameter.data *= 3
    gguf = write_gguf(model, tmp_path_factory.mktemp("gguf") / "m.gguf")
    with served(gguf, cache="f32", context=512, slots=4, threads=1, flash=False) as server:
        yield server


@dataclass(frozen=True)
class Damaged(LlamaServer):
    """A server of which a block of one layer is zeroed in a saved slot before it is restored."""

    def restore(self, slot: int, name: str) -> int:
        like = read_slot(self.path(name))
        zeros = Zeros(scope=Scope(layers=[1], slots=range(BLOCK, 2 * BLOCK)))
        write_slot(self.path(name), stored(like).cache().corrupt(zeros), like)
        return super().restore(slot, name)


def test_llama_cpp_is_sound_and_a_block_zeroed_in_its_slot_file_is_found(server: LlamaServer):
    assert canary(llama_server(server), sizes=SIZES).failed == []
    found = canary(llama_server(Damaged(server.url, folder=server.folder)), sizes=SIZES, seed=1)
    assert found.failed == ["slot file"]


def test_a_server_as_a_target_is_not_touched(server: LlamaServer):
    server.complete(ids := [3, 4, 5, 6, 7], slot=0)
    with pytest.raises(UserError, match="'block' is 4"):
        canary(llama_server(server), sizes=ScriptSizes(block=4))
    assert server.complete(ids, slot=0).reused == 4
    assert server.saves_slots
    assert isinstance(llama_server(server), SavesSlots)
    for status in ("501 Not Implemented", "404 Not Found", "401 Unauthorized", "200 OK"):
        with answering(said({}, status)) as url:
            assert not isinstance(llama_server(LlamaServer(url)), SavesSlots)


def test_llama_cpp_is_sound_by_the_protocol_of_openai_too(server: LlamaServer):
    result = canary(openai_endpoint(server.url), sizes=SIZES, seed=2)
    states = {finding.name: finding.state for finding in result.findings}
    assert states["hit"] == states["prefix"] == states["branch"] == "sound"
    assert result.failed == []


class Handler(BaseHTTPRequestHandler):
    """OpenAI's completions as vLLM gives them, of a small engine; a prompt with a salt is read anew."""

    def __init__(self, engine: PagedEngine, lock: Lock, *args: Any) -> None:
        self.engine, self.lock = engine, lock
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path == "/reset_prefix_cache":
            self._reply(405, {"detail": "Method Not Allowed"})
            return
        self._reply(200, {"data": [{"id": "paged"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path:
            case "/tokenize":
                self._reply(200, {"tokens": self.engine.tokens(asked["prompt"])})
            case "/detokenize":
                self._reply(200, {"prompt": self.engine.text(asked["tokens"])})
            case "/reset_prefix_cache":
                self.engine.pool.clear()
                self.engine.order.clear()
                self._reply(200, None)
            case "/v1/completions" if asked["model"] == "paged" and asked["temperature"] == 0:
                self._reply(200, self._completion(asked))
            case _:
                self._reply(404, {"error": {"message": "not found"}})

    def _completion(self, asked: dict[str, Any]) -> object:
        with self.lock:
            (answer,) = self.engine.ask([tuple(asked["prompt"])], asked["max_tokens"], "cache_salt" not in asked)
        said = {
            "tokens": [f"token_id:{token}" for token in answer.tokens],
            "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for top in answer.tops],
        }
        usage = {"prompt_tokens_details": {"cached_tokens": answer.reused}}
        return {"choices": [{"logprobs": said}], "usage": usage}

    def _reply(self, status: int, value: object) -> None:
        self._send(status, b"" if value is None else json.dumps(value).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class VllmHandler(Handler):
    """vLLM 0.32 with kvprobe's connector, which dumps and loads as its own code says."""

    folder: Path
    caching, connected = "False", True
    loaded = 0

    def do_GET(self) -> None:
        if self.path != "/metrics":
            super().do_GET()
            return
        labels = f'block_size="{BLOCK}",cache_dtype="auto",enable_prefix_caching="{self.caching}",engine="0"'
        info = f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"
        hits = f'vllm:external_prefix_cache_hits_total{{engine="0"}} {float(self.loaded)}\n'
        self._send(200, (info + hits).encode())

    def _completion(self, asked: dict[str, Any]) -> object:
        transfer, prompt = asked.pop("kv_transfer_params", {}), tuple(asked["prompt"])
        transfer = transfer if self.connected else {}
        with self.lock:
            self.engine.pool.clear()
            self.engine.order.clear()
            if (name := transfer.get("load")) is not None:
                cache = open_plain(self.folder / name)
                known = prompt[: loadable(cache, prompt, BLOCK)]
                type(self).loaded += len(known)
                self.engine.saved = (
                    known,
                    [part[0, 0].double().numpy() for layer in cache.layers for part in layer.values()],
                )
                self.engine.restore()
            if (name := transfer.get("dump")) is not None:
                self.engine.save(prompt)
                parts = [torch.tensor(part).float()[None, None] for part in self.engine.saved[1]]
                ledger = Ledger.of(torch.tensor([prompt]))
                save_plain(KVCache.of(parts[::2], parts[1::2], ledger), self.folder / name, block=BLOCK)
        return super()._completion(asked if "load" in transfer else asked | {"cache_salt": "none"})


@contextmanager
def endpoint(engine: PagedEngine, handler: type[Handler] = Handler) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, engine, Lock()))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("bug", "failed"), [("", []), ("keys out of step", ["hit", "prefix"])])
def test_an_endpoint_of_openai_fails_by_what_its_cache_does(bug: str, failed: list[str]):
    with endpoint(PagedEngine(bug)) as url:
        result = canary(openai_endpoint(f"{url}/v1"), sizes=SIZES)
    assert result.target == f"paged at {url}"
    assert result.failed[: len(failed)] == failed
    assert bool(result.failed) == bool(failed)
    assert {finding.name: finding.reused for finding in result.findings}["hit"]


def test_an_endpoint_as_a_target_keeps_its_cache():
    with endpoint(engine := PagedEngine()) as url:
        engine.ask([tuple(range(3, 3 + 2 * BLOCK))], 1, True)
        assert engine.pool
        held = dict(engine.pool)
        assert isinstance(openai_endpoint(url), Forgets)
        assert engine.pool.keys() == held.keys()


def test_what_is_no_answer_of_completions_is_refused_and_counts_are_optional():
    replies = dict[str, Any]()

    class Odd(Handler):
        def _completion(self, asked: dict[str, Any]) -> object:
            reply: Any = super()._completion(asked)
            reply["choices"][0]["logprobs"] |= replies.get("logprobs", {})
            return reply | {"usage": replies.get("usage", reply["usage"])}

    def asked(**changes: Any) -> EngineAnswer:
        replies.clear()
        replies.update(changes)
        (answer,) = target.ask([target.tokens("the mill", first=True)], 1, reuse=False)
        return answer

    with endpoint(PagedEngine(), Odd) as url:
        target = openai_endpoint(url)
        assert asked().reused == 0
        for silent in (None, {}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {"cached_tokens": None}}):
            assert asked(usage=silent).reused is None
        for count in (-1, "0", 0.5, True):
            refused(lambda count=count: asked(usage={"prompt_tokens_details": {"cached_tokens": count}}), "counts")
        for log in (0.7, "-1", None, True):
            refused(lambda log=log: asked(logprobs={"top_logprobs": [{"token_id:5": log}]}), "logarithm")
        for wrong in ({"tokens": ["token_id:x"]}, {"top_logprobs": None}, {"top_logprobs": []}, {"tokens": None}):
            refused(lambda wrong=wrong: asked(logprobs=wrong), "is not what an endpoint with OpenAI's")


@pytest.mark.parametrize(("bug", "failed"), [("", []), ("zeroed layer", ["slot file"])])
def test_vllm_with_the_connector_fails_by_what_it_makes_of_a_loaded_cache(
    bug: str, failed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(VllmHandler, "folder", tmp_path, raising=False)
    monkeypatch.setattr(VllmHandler, "loaded", 0)
    with endpoint(PagedEngine(bug), VllmHandler) as url:
        target = vllm_endpoint(f"{url}/v1")
        assert ScriptSizes.of(target).block == BLOCK
        refused(lambda: canary(target, sizes=replace(SIZES, block=BLOCK + 4)), "give a multiple of")
        result = canary(target, sizes=SIZES)
        monkeypatch.setattr(VllmHandler, "connected", False)
        refused(lambda: canary(target, sizes=SIZES), "says that it took 0; start it with kvprobe's connector")
        monkeypatch.setattr(VllmHandler, "caching", "True")
        refused(lambda: vllm_endpoint(url), "start it with --no-enable-prefix-caching")
    assert result.failed == failed
    reused = {finding.name: finding.reused for finding in result.findings}
    assert reused["slot file"]
    assert not reused["hit"]
    with endpoint(PagedEngine()) as url:
        refused(lambda: vllm_endpoint(url), "reports no vllm:cache_config_info")
