"""Engines behind a URL as targets of a canary: llama-server, and any with OpenAI's completions."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kvprobe.arguments import checked_arguments
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer, Prompt, Token
from kvprobe.engines.http import JsonServer, RefusedError
from kvprobe.engines.server import LlamaServer

TOPS = 20
"""Log-probabilities of an answer's token; vLLM gives no more by default."""
_PIECES = re.compile(r"\s?\d|\s?[^\W\d]+|\s|\S")
_SAVED = "kvprobe-canary.bin"


@checked_arguments
def llama_server(server: LlamaServer) -> CanaryTarget:
    """A llama-server as a target; with saved slots, if it was started with `--slot-save-path`.

    Whether it was is found by emptying slot 0. A run leaves the file `kvprobe-canary.bin` in that folder.
    """
    try:
        server.erase(0)
    except RefusedError:
        return _Llama(server)
    return _LlamaWithSlots(server)


@checked_arguments
def openai_endpoint(url: str, model: str | None = None, timeout: float = 120.0) -> CanaryTarget:
    """An endpoint with `/v1/completions` and log-probabilities as a target: vLLM, SGLang, llama-server and others.

    A request without reuse carries a `cache_salt` of its own, and for llama-server `cache_prompt`. Where the engine
    offers `/reset_prefix_cache` (vLLM with VLLM_SERVER_DEV_MODE=1), hits of a store outside the engine, such as a
    connector's, are tested, too.

    Args:
        url: without `/v1`.
        model: by its name there; the first that the endpoint lists, by default.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        _Endpoint(url, timeout).ask("/reset_prefix_cache", {})
    except RefusedError:
        return _OpenAI(url, timeout, model)
    return _OpenAIWithStore(url, timeout, model)


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


@dataclass(frozen=True)
class _Endpoint(JsonServer):
    """An endpoint with OpenAI's completions."""

    kind: ClassVar[str] = "an endpoint with OpenAI's completions and log-probabilities"


class _OpenAI:
    """An endpoint as a target; its model is the first that it lists, by default."""

    def __init__(self, url: str, timeout: float, model: str | None) -> None:
        self.server = _Endpoint(url, timeout)
        self.model = model or self.server.read(lambda reply: str(reply["data"][0]["id"]), "/v1/models")
        self.name = f"{self.model} at {url}"

    @cached_property
    def _counts(self) -> bool:
        """Whether the endpoint gives and takes numbers of tokens."""
        try:
            return bool(self._tokenized("a", False))
        except RefusedError:
            return False

    def _tokenized(self, text: str, first: bool) -> Prompt:
        # vLLM reads `prompt` and `add_special_tokens`, llama-server the others.
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": first, "add_special": first}
        return self.server.read(lambda reply: tuple(map(int, reply["tokens"])), "/tokenize", body)

    def tokens(self, text: str, first: bool = False) -> Prompt:
        """Numbers of tokens; where the endpoint has no `/tokenize`, words and digits, which stand for tokens."""
        if not self._counts:
            return tuple(_PIECES.findall(text))
        return self._tokenized(text, first)

    def text(self, prompt: Prompt) -> str:
        if not self._counts:
            return "".join(map(str, prompt))
        body = {"model": self.model, "tokens": prompt}
        return self.server.read(
            lambda reply: str(reply["prompt" if "prompt" in reply else "content"]), "/detokenize", body
        )

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        def answer(prompt: Prompt) -> EngineAnswer:
            asked = {
                "model": self.model,
                "prompt": prompt if self._counts else "".join(map(str, prompt)),
                "max_tokens": new,
                "temperature": 0,
                "logprobs": TOPS,
                "ignore_eos": True,
                "cache_prompt": reuse,
                # Only where the next prompt may be of numbers, too.
                "return_tokens_as_token_ids": self._counts,
            }
            salt = {} if reuse else {"cache_salt": secrets.token_hex(16)}
            return self.server.read(self._answer, "/v1/completions", asked | salt)

        return _at_once(answer, prompts)

    def _answer(self, reply: Any) -> EngineAnswer:
        said = reply["choices"][0]["logprobs"]
        details = reply.get("usage", {}).get("prompt_tokens_details") or {}
        if "content" in said:  # llama-server's, in the form of a chat

            def token(one: Mapping[str, Any]) -> Token:
                return int(one["id"]) if self._counts else str(one["token"])

            steps = [
                (token(step), {token(top): top["logprob"] for top in step["top_logprobs"]}) for step in said["content"]
            ]
        else:
            steps = [
                (_token(one), {_token(name): value for name, value in top.items()})
                for one, top in zip(said["tokens"], said["top_logprobs"], strict=True)
            ]
        tops = [{name: float(value) for name, value in top.items()} for _, top in steps]
        return EngineAnswer(tuple(one for one, _ in steps), tops, details.get("cached_tokens"))


class _OpenAIWithStore(_OpenAI):
    """One that can drop its own cache."""

    def forget(self) -> None:
        self.server.ask("/reset_prefix_cache", {})


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
