"""Engines behind a URL as targets of a canary: llama-server, vLLM, and any with OpenAI's completions."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus
from typing import Any, ClassVar

from kvprobe.arguments import checked_arguments
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer, Prompt, Token
from kvprobe.engines.http import JsonServer, RefusedError, count_in, log_probability_in
from kvprobe.engines.server import LlamaServer
from kvprobe.errors import UserError

TOPS = 20
"""Log-probabilities of an answer's token; vLLM gives no more by default."""
_PIECES = re.compile(r"\s?\d|\s?[^\W\d]+|\s|\S")
_SAVED, _DUMP = "kvprobe-canary.bin", "kvprobe-canary.json"
_SETTINGS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_SETTING = re.compile(r'(\w+)="([^"]*)"')
_SIZE = re.compile(r"[1-9]\d{0,8}", re.ASCII)
_LOADED = re.compile(r"^vllm:external_prefix_cache_hits_total\{.*\} (\d+(?:\.\d+)?(?:e\+?\d+)?)$", re.MULTILINE)
"""Tokens that came from a connector, a line for each engine."""


@checked_arguments
def llama_server(server: LlamaServer) -> CanaryTarget:
    """A llama-server as a target; with saved slots, if it was started with `--slot-save-path`.

    A run leaves the file `kvprobe-canary.bin` in that folder.
    """
    return _LlamaWithSlots(server) if server.saves_slots else _Llama(server)


@checked_arguments
def openai_endpoint(url: str, model: str | None = None, timeout: float = 120.0) -> CanaryTarget:
    """An endpoint with `/v1/completions` and log-probabilities as a target: vLLM, SGLang, llama-server and others.

    A request without reuse carries a `cache_salt` of its own, and for llama-server `cache_prompt`. Where the engine
    offers `/reset_prefix_cache` (vLLM with VLLM_SERVER_DEV_MODE=1), hits of a store outside the engine, such as a
    connector's, are tested, too: a run drops the engine's own cache then. Making the target drops nothing.

    Args:
        url: without `/v1`.
        model: by its name there; the first that the endpoint lists, by default.
    """
    url = url.rstrip("/").removesuffix("/v1")
    resets = _takes_posts(_Endpoint(url, timeout), "/reset_prefix_cache")
    return (_OpenAIWithStore if resets else _OpenAI)(url, timeout, model)


@checked_arguments
def vllm_endpoint(url: str, model: str | None = None, timeout: float = 120.0) -> CanaryTarget:
    """A vLLM server that was started with kvprobe's connector and without prefix caching, as a target.

    One request dumps the cache of a prompt, and each further one puts the dump in place of its first blocks, so that
    the property `slot file` holds what vLLM makes of blocks that it was given against what it computes. Any other
    vLLM server, with a connector or without, is a target of `openai_endpoint`. A run leaves the dump
    `kvprobe-canary.json` in the connector's folder.

    Args:
        url: without `/v1`.
        model: by its name there; the first that the endpoint lists, by default.

    Raises:
        UserError: it is no vLLM, reports no settings, or has prefix caching, with which the connector loads nothing.
    """
    return _Vllm(url.rstrip("/").removesuffix("/v1"), timeout, model)


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
        return self.server.read(lambda reply: tuple(map(count_in, reply["tokens"])), "/tokenize", body)

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
        return _at_once(lambda prompt: self._complete(prompt, new, reuse), prompts)

    def _complete(
        self, prompt: Prompt, new: int, reuse: bool, transfer: Mapping[str, str] | None = None
    ) -> EngineAnswer:
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
        wanted = {} if transfer is None else {"kv_transfer_params": transfer}
        return self.server.read(self._answer, "/v1/completions", asked | salt | wanted)

    def _answer(self, reply: Any) -> EngineAnswer:
        said = reply["choices"][0]["logprobs"]
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        reused = details.get("cached_tokens")
        if "content" in said:  # llama-server's, in the form of a chat

            def token(one: Mapping[str, Any]) -> Token:
                return count_in(one["id"]) if self._counts else str(one["token"])

            steps = [
                (token(step), {token(top): top["logprob"] for top in step["top_logprobs"]}) for step in said["content"]
            ]
        else:
            steps = [
                (_token(one), {_token(name): value for name, value in top.items()})
                for one, top in zip(said["tokens"], said["top_logprobs"], strict=True)
            ]
        tops = [{name: log_probability_in(value) for name, value in top.items()} for _, top in steps]
        return EngineAnswer(tuple(one for one, _ in steps), tops, None if reused is None else count_in(reused))


class _OpenAIWithStore(_OpenAI):
    """One that can drop its own cache."""

    def forget(self) -> None:
        self.server.ask("/reset_prefix_cache", {})


class _Vllm(_OpenAI):
    """One whose connector dumps and loads caches.

    Attributes:
        block: tokens of a block of its cache.
    """

    def __init__(self, url: str, timeout: float, model: str | None) -> None:
        super().__init__(url, timeout, model)
        try:
            found = _SETTINGS.search(self.server.text_at("/metrics"))
        except RefusedError:
            found = None
        settings = dict(_SETTING.findall(found[1])) if found else {}
        if not {"block_size", "enable_prefix_caching"} <= set(settings) or not _SIZE.fullmatch(settings["block_size"]):
            raise UserError(
                f"{url} reports no vllm:cache_config_info at /metrics, so how its cache is set up is not known; give a "
                "vLLM server with kvprobe's connector and statistics, or --api openai for any other."
            )
        if settings["enable_prefix_caching"] != "False":
            raise UserError(
                f"The vLLM at {url} has prefix caching, with which kvprobe's connector loads nothing; start it with "
                "--no-enable-prefix-caching, or test that cache with --api openai."
            )
        self.block = int(settings["block_size"])
        self._saved, self._to_load = tuple[Token, ...](), False

    def save(self, prompt: Prompt) -> None:
        self._saved = prompt[: len(prompt) // self.block * self.block]
        self._complete(self._saved, 1, True, {"dump": _DUMP})

    def restore(self) -> None:
        self._to_load = True

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        if not (reuse and self._to_load):
            return super().ask(prompts, new, reuse)
        self._to_load = False
        return [self._gone_on(prompt, new) for prompt in prompts]

    def _gone_on(self, prompt: Prompt, new: int) -> EngineAnswer:
        """An answer from the dump where it is of the prompt's first blocks; of other tokens it would end the engine."""
        size = len(self._saved)
        if prompt[:size] != self._saved or len(prompt) == size:
            return self._complete(prompt, new, True)
        before = self._loaded()
        answer = self._complete(prompt, new, True, {"load": _DUMP})
        after = self._loaded()
        loaded = answer.reused if before is None or after is None else int(after - before)
        if loaded is not None and loaded != size:
            raise UserError(
                f"{self.name} was to put a dump of {size} tokens in place and says that it took {loaded}; start it "
                "with kvprobe's connector and no other user, or test it with --api openai."
            )
        return replace(answer, reused=loaded)

    def _loaded(self) -> float | None:
        """Tokens that came from connectors since the server started; None where it does not count them."""
        counts = _LOADED.findall(self.server.text_at("/metrics"))
        return sum(map(float, counts)) if counts else None


def _takes_posts(server: JsonServer, place: str) -> bool:
    """Whether something is there that acts when it is asked by POST; it is asked by GET, which does nothing."""
    try:
        server.text_at(place)
    except RefusedError as error:
        return error.status == HTTPStatus.METHOD_NOT_ALLOWED
    return False


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
