"""Engines behind a URL as targets of a canary: llama-server, and any with OpenAI's completions."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvprobe.arguments import checked_arguments
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer, Prompt, Token
from kvprobe.engines.server import LlamaServer
from kvprobe.errors import UserError
from kvprobe.names import one_line

TOPS = 20
"""Log-probabilities of an answer's token; vLLM gives no more by default."""
_MOST_BYTES = 2**24
"""Of a reply."""
_PIECES = re.compile(r"\s?\d|\s?[^\W\d]+|\s|\S")
_SAVED = "kvprobe-canary.bin"


@checked_arguments
def llama_server(server: LlamaServer) -> CanaryTarget:
    """A llama-server as a target; with saved slots, if it was started with `--slot-save-path`."""
    try:
        server.erase(0)
    except UserError as error:
        if "No server answers" in str(error):
            raise
        return _Llama(server)
    return _LlamaWithSlots(server)


@checked_arguments
def openai_endpoint(url: str, model: str | None = None, timeout: float = 120.0) -> CanaryTarget:
    """An endpoint with `/v1/completions` and log-probabilities as a target: vLLM, SGLang and others.

    A request without reuse carries a `cache_salt` of its own. Where the engine offers `/reset_prefix_cache` (vLLM with
    VLLM_SERVER_DEV_MODE=1), hits of a store outside the engine, such as a connector's, are tested, too.

    Args:
        url: without `/v1`.
        model: by its name there; the first that the endpoint lists, by default.
    """
    target = _OpenAI(url.rstrip("/").removesuffix("/v1"), model or "", timeout)
    try:
        target.post("/reset_prefix_cache", {})
    except _RefusedError:
        return target
    return _OpenAIWithStore(target.url, target.model, timeout)


class _Llama:
    """A llama-server; it chooses the slot of a request itself."""

    def __init__(self, server: LlamaServer) -> None:
        self.server, self.name = server, f"llama-server at {server.url}"

    def tokens(self, text: str, first: bool = False) -> Prompt:
        return self.server.tokens(text, special=first)

    def text(self, prompt: Prompt) -> str:
        return self.server.text(_numbers(prompt))

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        def answer(prompt: Prompt) -> EngineAnswer:
            done = self.server.complete(_numbers(prompt), new, n_probs=TOPS, reuse=reuse, slot=None)
            tops: list[dict[Token, float]] = [{**top} for top in done.log_probabilities]
            return EngineAnswer(done.tokens, tops, done.reused)

        return _at_once(answer, prompts)


class _LlamaWithSlots(_Llama):
    """A llama-server that saves slots."""

    def save(self, prompt: Prompt) -> None:
        self.server.complete(_numbers(prompt), slot=0)
        self.server.save(0, _SAVED)

    def restore(self) -> None:
        self.server.restore(0, _SAVED)


class _RefusedError(UserError):
    """An endpoint answers, and refuses."""


@dataclass
class _OpenAI:
    """An endpoint with OpenAI's completions."""

    url: str
    model: str
    timeout: float

    def __post_init__(self) -> None:
        self.model = self.model or self._read(lambda reply: str(reply["data"][0]["id"]), self.post("/v1/models"))
        self.name = f"{self.model} at {self.url}"

    @cached_property
    def _counts(self) -> bool:
        """Whether the endpoint gives and takes numbers of tokens."""
        try:
            self.post("/tokenize", {"model": self.model, "prompt": "a", "add_special_tokens": False})
        except _RefusedError:
            return False
        return True

    def tokens(self, text: str, first: bool = False) -> Prompt:
        """Numbers of tokens; where the endpoint has no `/tokenize`, words and digits, which stand for tokens."""
        if not self._counts:
            return tuple(_PIECES.findall(text))
        reply = self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": first})
        return self._read(lambda reply: tuple(map(int, reply["tokens"])), reply)

    def text(self, prompt: Prompt) -> str:
        if not self._counts:
            return "".join(map(str, prompt))
        reply = self.post("/detokenize", {"model": self.model, "tokens": prompt})
        return self._read(lambda reply: str(reply["prompt"]), reply)

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        def answer(prompt: Prompt) -> EngineAnswer:
            asked = {
                "model": self.model,
                "prompt": prompt if self._counts else "".join(map(str, prompt)),
                "max_tokens": new,
                "temperature": 0,
                "logprobs": TOPS,
                "ignore_eos": True,
                "return_tokens_as_token_ids": True,
            }
            reply = self.post("/v1/completions", asked if reuse else asked | {"cache_salt": secrets.token_hex(16)})
            return self._read(_answer, reply)

        return _at_once(answer, prompts)

    def post(self, place: str, body: Mapping[str, object] | None = None) -> Any:
        """What the endpoint answers; it is asked for a place without a body by GET."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url + place, data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=self.timeout) as reply:
                text = reply.read(_MOST_BYTES)
            return json.loads(text) if text else {}
        except HTTPError as error:
            said = one_line(ValueError(error.read(2**12).decode(errors="replace")))
            raise _RefusedError(f"The endpoint at {self.url} refuses {place} ({error.code}: {said}).") from error
        except (URLError, OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{self.url}{place} gives no usable answer ({one_line(error)}); give the URL of a running endpoint."
            ) from error

    def _read(self, what: Callable[[Any], Any], reply: Any) -> Any:
        try:
            return what(reply)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"What {self.url} answers is not what an endpoint with OpenAI's completions and log-probabilities "
                f"answers ({one_line(error)}); give the URL of another."
            ) from error


class _OpenAIWithStore(_OpenAI):
    """One that can drop its own cache."""

    def forget(self) -> None:
        self.post("/reset_prefix_cache", {})


def _answer(reply: Any) -> EngineAnswer:
    choice = reply["choices"][0]["logprobs"]
    details = reply.get("usage", {}).get("prompt_tokens_details") or {}
    tops = tuple({_token(name): float(value) for name, value in top.items()} for top in choice["top_logprobs"])
    return EngineAnswer(tuple(map(_token, choice["tokens"])), tops, details.get("cached_tokens"))


def _token(name: str) -> Token:
    """The number in what vLLM writes as "token_id:17", or the text."""
    number = name.removeprefix("token_id:")
    return int(number) if number != name else name


def _numbers(prompt: Prompt) -> list[int]:
    return [int(token) for token in prompt]


def _at_once(answer: Callable[[Prompt], EngineAnswer], prompts: Sequence[Prompt]) -> list[EngineAnswer]:
    """Answers to all prompts, which are asked at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(answer, prompts))
