"""A running llama.cpp server: completions with log-probabilities, and slots saved, restored and erased.

The server may be any `llama-server` that was started with `--slot-save-path`, or one that `served` starts in this
process with the package xllamacpp (`pip install 'kvprobe[llamacpp]'`).
"""

import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, cast

from kvprobe.arguments import AtLeastOne, AtLeastZero, checked_arguments
from kvprobe.engines.http import JsonServer, RefusedError, count_in, log_probability_in
from kvprobe.errors import UserError
from kvprobe.names import one_line

CacheType = Literal["f32", "f16", "q8_0", "q4_0"]
"""How llama.cpp stores K and V."""
URL = "http://127.0.0.1:8080"
"""Where `llama-server` listens by default."""
_MOST_UNSHOWN = 16
"""Tokens that are asked for before it is given up to learn their log-probabilities."""
_LEAST = -1e38
"""What llama.cpp gives for the logarithm of 0 is below it."""


@dataclass(frozen=True)
class Completion:
    """What a server answered.

    Attributes:
        tokens: that it generated.
        log_probabilities: before each of them, those of the likeliest next tokens by their ids; before any sampling.
        reused: tokens of the prompt that were in the slot and not computed again.
    """

    tokens: tuple[int, ...]
    log_probabilities: tuple[Mapping[int, float], ...]
    reused: int


@checked_arguments
@dataclass(frozen=True)
class LlamaServer(JsonServer):
    """A client of a llama.cpp server.

    Attributes:
        url: of the server.
        timeout: seconds that it may take for a whole answer.
        folder: in which it saves slots, where that is known and on this machine.
    """

    url: str = URL
    timeout: float = 120.0
    folder: Path | None = None
    kind: ClassVar[str] = "llama-server"

    def complete(
        self,
        ids: Sequence[int],
        n_predict: AtLeastOne = 1,
        *,
        n_probs: AtLeastZero | Literal["all"] = 0,
        reuse: bool = True,
        slot: AtLeastZero | None = 0,
        forget: tuple[AtLeastZero, AtLeastOne] | None = None,
    ) -> Completion:
        """Continue these tokens greedily.

        Args:
            n_predict: tokens to generate; the end of the text does not stop it.
            n_probs: of how many of the likeliest tokens to give log-probabilities, which share an error of about 1e-4
                since the server adds up in float32; or "all" of the vocabulary, of which that error is taken.
            reuse: keep the tokens in the slot that the prompt begins with. The last token of a prompt is computed
                anyway.
            slot: of the server; None: the one that holds most of the prompt.
            forget: of a server that shifts: where the tokens begin that a full slot forgets, and how many they are; the
                older half of all by default.

        Raises:
            UserError: the server cannot be reached, refuses, or does something else: it has no such slot, ends early
                since the slot is full, or gives fewer log-probabilities.
        """
        asked: dict[str, object] = {
            "prompt": [*ids],
            "n_predict": n_predict,
            "temperature": 0,
            "n_probs": self.vocabulary if n_probs == "all" else n_probs,
            "cache_prompt": reuse,
            "id_slot": -1 if slot is None else slot,
            "return_tokens": True,
            "ignore_eos": True,
        }
        if forget is not None:
            asked["n_keep"], asked["n_discard"] = forget
        first = answer = self._completion(asked)
        if len(first.tokens) != n_predict:
            raise UserError(
                f"The server gives {len(first.tokens)} of {n_predict} tokens, as it does where a slot is full; ask for "
                "fewer, or start it with more context."
            )
        unshown: list[int] = []
        # The server leaves out what it knows of a token that ends within a character; it is asked for another one.
        while n_probs and n_predict == 1 and not answer.log_probabilities and len(unshown) < _MOST_UNSHOWN:
            unshown += answer.tokens
            again = asked | {"cache_prompt": True, "logit_bias": [[token, False] for token in unshown]}
            answer = self._completion(again)
        if n_probs and len(answer.log_probabilities) != n_predict:
            raise UserError(
                f"The server gives log-probabilities of {len(answer.log_probabilities)} of {n_predict} tokens, since "
                "it leaves out tokens that end within a character; ask for one token at a time."
            )
        known = answer.log_probabilities
        fewest = min(map(len, known), default=0)
        if n_probs and fewest < (wanted := cast(int, asked["n_probs"])) and fewest < self.vocabulary:
            raise UserError(
                f"The server gives log-probabilities of {fewest:,} tokens where those of {wanted:,} of its "
                f"{self.vocabulary:,} were asked for; ask for fewer, or another server."
            )
        if n_probs == "all":
            known = tuple(map(_summing_to_one, known))
        return replace(first, log_probabilities=known)

    def _completion(self, asked: Mapping[str, object]) -> Completion:
        def read(reply: Any) -> tuple[Completion, int]:
            steps = reply.get("completion_probabilities", [])
            likeliest = tuple(
                {count_in(one["id"]): _log(one["logprob"]) for one in step["top_logprobs"]} for step in steps
            )
            reused = count_in(reply["timings"]["cache_n"])
            return Completion(tuple(map(count_in, reply["tokens"])), likeliest, reused), count_in(reply["id_slot"])

        answer, slot = self.read(read, "/completion", asked)
        if asked["id_slot"] not in (-1, slot):  # it counts on from 0 where there are fewer
            raise UserError(
                f"The server has no slot {asked['id_slot']} and took slot {slot}; give one of those that it was "
                "started with (--parallel)."
            )
        return answer

    def save(self, slot: AtLeastZero, name: str) -> int:
        """Write a slot to the file `name` in the server's folder, and return how many tokens it holds.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        return self._slot(slot, "save", name, "n_saved")

    def restore(self, slot: AtLeastZero, name: str) -> int:
        """Read a slot from the file `name` in the server's folder, and return how many tokens it holds.

        Raises:
            UserError: the server cannot be reached, or refuses, as it does for a slot of another model.
        """
        return self._slot(slot, "restore", name, "n_restored")

    def go_on(
        self,
        name: str,
        ids: Sequence[int],
        n_predict: AtLeastOne = 1,
        *,
        n_probs: AtLeastZero | Literal["all"] = 0,
        slot: AtLeastZero = 0,
    ) -> Completion:
        """Restore a slot from the file `name`, and continue these tokens, with which it begins; see `complete`.

        Raises:
            UserError: see `restore` and `complete`; or the server read tokens of the slot again, so that what was
                edited in it is lost.
        """
        restored = self.restore(slot, name)
        answer = self.complete(ids, n_predict, n_probs=n_probs, slot=slot)
        if answer.reused < min(restored, len(ids) - 1):
            raise UserError(
                f"The server used {answer.reused:,} of the {restored:,} tokens of the slot {name!r} and read the "
                "others again, so what was edited in it is lost; give tokens that begin with the slot's, and start "
                "llama-server with --swa-full if layers of the model slide over a window."
            )
        return answer

    @property
    def saves_slots(self) -> bool:
        """Whether it was started with `--slot-save-path`; nothing is done to a slot.

        Raises:
            UserError: the server cannot be reached.
        """
        try:
            self.ask("/slots/0?action=none", {})
        except RefusedError as error:
            return error.status == HTTPStatus.BAD_REQUEST  # without that flag it refuses all actions as not implemented
        return False

    def erase(self, slot: AtLeastZero) -> int:
        """Empty a slot, and return how many tokens it held.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        return self._slot(slot, "erase", None, "n_erased")

    def tokens(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The tokens of a text; `special`: with those that the model wants before every prompt.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        body = {"content": text, "add_special": special}
        return self.read(lambda reply: tuple(map(count_in, reply["tokens"])), "/tokenize", body)

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        return self.read(lambda reply: str(reply["content"]), "/detokenize", {"tokens": [*ids]})

    @cached_property
    def vocabulary(self) -> int:
        """Tokens of the model's vocabulary.

        Raises:
            UserError: the server cannot be reached, or does not say.
        """
        return self.read(lambda reply: count_in(reply["data"][0]["meta"]["n_vocab"]), "/v1/models")

    def path(self, name: str) -> Path:
        """Where the server saves a slot.

        Raises:
            UserError: its folder is not known.
        """
        if self.folder is None:
            raise UserError(
                f"The folder of saved slots of {self.url} is not known; give LlamaServer(folder=…) the one that "
                "llama-server was given as --slot-save-path."
            )
        return self.folder / name

    def _slot(self, slot: int, action: str, name: str | None, count: str) -> int:
        body = {} if name is None else {"filename": name}
        return self.read(lambda reply: count_in(reply[count]), f"/slots/{slot}?action={action}", body)


@contextmanager
@checked_arguments
def served(
    gguf: Path,
    *,
    cache: CacheType = "f16",
    context: AtLeastOne = 2048,
    slots: AtLeastOne = 1,
    threads: AtLeastOne | None = None,
    portion: AtLeastOne = 512,
    flash: bool = True,
    shift: bool = False,
    whole: bool = True,
) -> Generator[LlamaServer]:
    """While this lasts, a llama.cpp server runs in this process on a loopback port, and saves slots in a folder of its
    own, which is removed.

    Args:
        gguf: the model's file.
        cache: how K and V are stored.
        context: tokens that each slot may hold.
        slots: conversations that are held at once.
        threads: that compute; as many as torch may use by default.
        portion: tokens that are read at once.
        flash: whether to compute flash attention; without it V is stored transposed and cannot be quantised.
        shift: whether a full slot forgets tokens and goes on, or stops; see `LlamaServer.complete`.
        whole: whether layers that slide over a window keep all slots, or those in it alone, as servers do by default;
            then what is edited in a slot is lost, which `LlamaServer.go_on` refuses.

    Raises:
        UserError: xllamacpp is not installed, or it cannot load the file.
    """
    import torch  # what asks a server that is running starts without it

    library = require_xllamacpp()
    if not gguf.is_file():
        raise UserError(f"There is no GGUF file at {gguf}; check the path.")
    with TemporaryDirectory(prefix="kvprobe-slots-") as folder:
        params = library.CommonParams()
        params.model.path, params.slot_save_path, params.endpoint_slots = str(gguf), f"{folder}{os.sep}", True
        params.n_ctx, params.n_parallel, params.ctx_shift = context * slots, slots, shift
        params.cache_type_k = params.cache_type_v = getattr(library.ggml_type, f"GGML_TYPE_{cache.upper()}")
        kinds = library.llama_flash_attn_type
        params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if flash else 'DISABLED'}")
        params.n_batch, params.n_ubatch = max(portion, params.n_batch), portion
        params.cpuparams.n_threads = threads or torch.get_num_threads()
        params.kv_unified, params.swa_full, params.cache_ram_mib = False, whole, 0
        params.fit_params, params.warmup, params.verbosity = False, False, -1
        try:
            server = library.Server(params)
        except Exception as error:
            raise UserError(f"llama.cpp cannot serve {gguf.name} ({one_line(error)}); check the file.") from error
        try:
            yield LlamaServer(server.listening_address, folder=Path(folder))
        finally:
            del server


def require_xllamacpp() -> Any:
    """The package xllamacpp.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module("xllamacpp")
    except ImportError as error:
        raise UserError(
            "A llama.cpp server in this process needs xllamacpp, which is not installed; install it with "
            "pip install 'kvprobe[llamacpp]', or give the URL of a running llama-server."
        ) from error


def _summing_to_one(logs: Mapping[int, float]) -> Mapping[int, float]:
    """The log-probabilities of a whole vocabulary, without the error of the server's sum in float32."""
    off = math.log(math.fsum(map(math.exp, logs.values())))
    return {token: value - off for token, value in logs.items()}


def _log(number: object) -> float:
    value = log_probability_in(number)
    if math.isnan(value):
        raise ValueError("NaN where the logarithm of a probability is expected")
    return -math.inf if value < _LEAST else value
