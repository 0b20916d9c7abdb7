"""A model that a llama.cpp server runs, and whose weights nothing here loads: what the server reads is a `KVCache`, and
what is left of it after an edit is restored in the server, which goes on from it.

The model's GGUF file says how keys lie and turn and what its tokens are. How they turn is proved: a token that is read
over and over is the same in all layers at all positions, but for the rotation of its keys.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from kvprobe.arguments import AtLeastOne, AtLeastZero, checked_arguments
from kvprobe.brief import Brief, brief
from kvprobe.cache.cache import KVCache, combined
from kvprobe.cache.rotary import Rotary, Rotation
from kvprobe.engines.llamacpp import layout_for, told
from kvprobe.engines.server import LlamaServer
from kvprobe.engines.slot import Slot, SlotLayout, read_slot, stored, write_slot
from kvprobe.errors import UserError
from kvprobe.faults import Fault, FaultContext
from kvprobe.files import expanded
from kvprobe.inference.forward import rotated
from kvprobe.inference.rows import Readable, rows_of, turns_after
from kvprobe.inference.under_policy import recomputed
from kvprobe.models.geometry import reaches_of
from kvprobe.models.gguf_config import config_of
from kvprobe.models.gguf_header import Header, parts_of, read_header
from kvprobe.models.gguf_tokens import end_ids, tokenizer_of
from kvprobe.models.rotaries import rotaries_within
from kvprobe.policies.policy import Policy, Scene, acting
from kvprobe.policies.prune_tools import PruneToolResults
from kvprobe.policies.written import as_policy
from kvprobe.text.tokens import Tokens

_TRANSFORMERS: Any = transformers  # its annotations are incomplete
READ, EDITED, PASSING = "kvprobe-read.bin", "kvprobe-edited.bin", "kvprobe-passing.bin"
"""Files in the server's folder: what it read last, what it is to go on from, and what is deleted once it was seen."""
LIKELIEST = 256
"""Tokens of which log-probabilities are asked for at each step."""
NO_ATTENTION = "llama-server gives no attention, by which this policy decides; give one that needs none."
_REPEATS = 38
_OFF = 0.5
"""How far keys may be from where the first one is rotated to, relative to how far position moves them. SmolLM2's are
off by at most 0.16 with a cache in f16 or q8_0, and in q4_0 by up to 1.3; with other pairs of numbers by 1.7 on."""


@dataclass(frozen=True, repr=False)
class ServedAnswer(Brief):
    """What a server answered, one token at a time: a row, as `kvprobe.inference.generate.Generation` has several.

    Attributes:
        tokens: a stop token included where one ended it.
        logprobs: of each of them.
        stopped: whether one did.
        text: without control tokens.
    """

    tokens: tuple[tuple[int, ...]]
    logprobs: tuple[tuple[float, ...]]
    stopped: tuple[bool]
    text: str


@checked_arguments
@dataclass(frozen=True, repr=False)
class ServedModel(Brief):
    """A model in a llama.cpp server on this machine, with the methods of `Model` for which a slot's file is enough.

    One slot of the server is overwritten, and two files are left in its folder.

    Attributes:
        server: with the folder in which it saves slots.
        gguf: the model's file; by default the one that the server says it has loaded.
        slot: of the server.
    """

    server: LlamaServer
    gguf: Path | None = None
    slot: AtLeastZero = 0

    @classmethod
    def at(cls, url: str, slots: str | Path, gguf: str | Path | None = None) -> "ServedModel":
        """The model of the server at an address.

        Args:
            slots: the folder that it was given as `--slot-save-path`.
            gguf: see `ServedModel`.

        Raises:
            UserError: there is no such folder.
        """
        folder = expanded(slots)
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}; give the one that llama-server has as --slot-save-path.")
        return cls(LlamaServer(url, folder=folder), None if gguf is None else expanded(gguf))

    def _facts(self) -> Iterable[str]:
        yield self.server.url
        yield f"slot {self.slot}"
        yield f"slots in {brief(str(self.server.folder))}"

    @property
    def name(self) -> str:
        return self._header.path.stem

    @cached_property
    def tokenizer(self) -> Any:
        """That of the GGUF file, with the chat template of the server.

        Raises:
            UserError: the file has none.
        """
        tokenizer = tokenizer_of(self._header)
        if tokenizer is None:
            raise UserError(f"{self._header.path.name} has no vocabulary; serve a model that has one.")
        tokenizer.chat_template = self._props.get("chat_template") or tokenizer.chat_template
        return tokenizer

    @cached_property
    def n_layers(self) -> int:
        return int(self._config.num_hidden_layers)

    @property
    def slot_bytes(self) -> list[int]:
        """What a slot takes in each layer of the server."""
        like = self.held_slot
        sizes = [0] * self.n_layers
        for memory, layers in zip(like.attention, self._layout(like).memories, strict=True):
            for number, *rows in zip(layers, memory.keys, *filter(None, (memory.values,)), strict=True):
                sizes[number] = sum(part.nbytes for part in rows) // len(memory.positions)
        return sizes

    @property
    def held_slot(self) -> Slot:
        """What the server read last, as it lies in the file."""
        path = self.server.path(READ)
        return read_slot(path) if path.is_file() else self._saved(READ, [0])

    def tokens(self, text: Readable) -> list[Tokens]:
        """One run of tokens per row; see `Model.tokens`."""
        return rows_of(text, lambda: self.tokenizer, answered=False)

    def prompts(self, cache: KVCache, ask: str | None) -> list[Tokens]:
        """The user's next message after a cache; see `Model.prompts`."""
        return turns_after(cache.ledger, ask, self.tokenizer, None)

    def prefill(self, text: Readable) -> KVCache:
        """The cache of a conversation or text, in float32.

        Raises:
            UserError: several rows, or tokens at other positions than 0, 1, 2 …; see `LlamaServer.complete`.
        """
        runs = self.tokens(text)
        if len(runs) != 1 or runs[0].positions != tuple(range(len(runs[0]))):
            raise UserError(
                "llama-server reads one conversation at a time, at positions 0, 1, 2 … without gaps; give one, and "
                "close gaps first."
            )
        slot = self._saved(READ, runs[0].ids)
        return told(stored(slot, self._layout(slot)).cache(), runs[0])

    def as_seen(self, cache: KVCache) -> KVCache:
        """The cache with each key rotated to its position; see `Model.as_seen`.

        Raises:
            UserError: see `rotaries`.
        """
        if not cache.ledger.rotated:
            return cache
        return rotated(cache, [{"K": rotary} for rotary in self.rotaries])

    @cached_property
    def rotaries(self) -> tuple[Rotary, ...]:
        """How the keys of each layer turn with position, proved on the server.

        Raises:
            UserError: they turn in no way that the GGUF file says, or the server's cache is too coarse to tell.
        """
        with torch.device("meta"):
            model = _TRANSFORMERS.AutoModelForCausalLM.from_config(self._config)
        kinds = {type(module) for module in model.modules() if hasattr(module, "rope_type")}
        candidates = [rotary for kind in kinds for rotary in rotaries_within(kind(self._config))]
        slot = self._saved(PASSING, [self.server.vocabulary // 2] * _REPEATS)
        cache = stored(slot, self._layout(slot)).cache()
        slot.path.unlink()
        turned: list[Rotary] = []
        for number, layer in enumerate(cache.layers):
            live = cache.ledger.live[number % len(cache.ledger.live), 0, 0]  # a window may have left some behind
            keys, at = layer["K"][:, :, live], cache.ledger.positions[:, live]
            first, moved = keys[:, :, :1].expand_as(keys), (keys - keys.mean(2, keepdim=True)).norm()
            rotations = [Rotation.between(rotary, at[:, :1].expand_as(at), at) for rotary in candidates]
            off = [float((rotation.of(first) - keys).norm() / moved) for rotation in rotations]
            best = min(range(len(off)), key=off.__getitem__, default=-1)
            if best < 0 or not off[best] <= _OFF:  # NaN must not pass
                raise UserError(
                    f"Keys of layer {number} of {self.name} do not turn with their position as its file says, or the "
                    "server keeps them too coarsely to tell, so they cannot be re-indexed; evict instead, or start "
                    "llama-server with a cache in f16."
                )
            turned.append(candidates[best])
        return tuple(turned)

    def watch(self, text: Readable, *, queries: int = 0) -> Scene:
        """Refused: a server does not say what its queries attend to."""
        raise UserError(NO_ATTENTION)

    def apply(self, policy: Policy | str, start: KVCache | Scene) -> KVCache:
        """The cache after a policy acted on it once; see `Model.apply`.

        Raises:
            UserError: the policy needs attention, or tokens at positions that the server cannot read.
        """
        policy, scene = as_policy(policy), (Scene(start) if isinstance(start, KVCache) else start).sized
        if policy.observes is not None:
            self.watch("")
        for part in acting(policy, 0):
            if isinstance(part, PruneToolResults) and part.placeholder is not None:
                raise UserError("llama-server reads nothing into the middle of a slot; give no placeholder.")
            before = scene.cache.ledger
            scene = part.act(scene)
            if part.provenance == "recomputed":
                scene = recomputed(lambda rows: self.prefill(rows[0]), before, scene)
        return scene.cache

    def fault_context(self, cache: KVCache, faults: Sequence[Fault], donors: Mapping[str, KVCache]) -> FaultContext:
        """What these faults need to know of a cache; see `Model.fault_context`.

        Raises:
            UserError: one of them is noise that is matched by its effect on attention.
        """
        needs = {need for fault in faults for need in fault.needs}
        if "queries" in needs:
            raise UserError("llama-server gives no queries, by which this noise is matched; choose another fault.")
        lent = {name: self.as_seen(donor) for name, donor in donors.items()}
        return FaultContext(self.as_seen(cache), lent, self.rotaries if "rotaries" in needs else ())

    def generate(self, cache: KVCache, ask: str, *, max_new_tokens: AtLeastOne = 64) -> ServedAnswer:
        """What the server answers from an edited cache, greedily.

        Raises:
            UserError: see `restored`.
        """
        return self.answer(self.restored(cache, self.prompts(cache, ask)[0]), max_new_tokens)

    def answer(self, start: "RestoredSlot", new: int) -> ServedAnswer:
        """The greedy reply to what was restored."""
        ends, said, logprobs = end_ids(self._header), list[int](), list[float]()
        ends = ends if isinstance(ends, list) else [ends]
        while len(said) < new and not (said and said[-1] in ends):
            likeliest = start.likeliest(said)
            said.append(max(likeliest, key=likeliest.__getitem__))
            logprobs.append(likeliest[said[-1]])
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return ServedAnswer((tuple(said),), (tuple(logprobs),), (said[-1] in ends,), text)

    def extend(self, cache: KVCache, text: Tokens) -> tuple[KVCache, Mapping[int, float]]:
        """Read after a cache, which then holds what the server computed; see `Model.extend`.

        Returns the longer cache, and log-probabilities of the likeliest next tokens.

        Raises:
            UserError: see `restored`.
        """
        start = self.restored(cache, text)
        likeliest, slot = start.likeliest(()), self._save(PASSING)
        read = stored(slot, self._layout(slot)).cache()
        slot.path.unlink()
        last = torch.arange(read.slots - len(text), read.slots)[None]
        new = told(read.take(last, torch.zeros_like(last, dtype=torch.bool)), text)
        ledger = cache.ledger.read_on(new.ledger)
        return combined((cache, new), lambda pair: torch.cat(pair, 2), ledger), likeliest

    def restored(self, cache: KVCache, question: Tokens) -> "RestoredSlot":
        """The server with this cache in its slot, to be asked this.

        Raises:
            UserError: llama.cpp cannot hold this cache; see `kvprobe.engines.slot.write_slot`.
        """
        like = self.held_slot
        written = write_slot(self.server.path(EDITED), self.as_seen(cache), like, self._layout(like))
        self.server.restore(self.slot, EDITED)
        return RestoredSlot(self.server, self.slot, len(written.tokens), (*written.tokens, *question.ids))

    def _saved(self, name: str, ids: Sequence[int]) -> Slot:
        """These tokens read into the server's slot, as it saves it."""
        self.server.complete(ids, reuse=False, slot=self.slot)
        return self._save(name)

    def _save(self, name: str) -> Slot:
        """What the server holds, as it saves it."""
        path = self.server.path(name)
        path.unlink(missing_ok=True)
        self.server.save(self.slot, name)
        if not path.is_file():
            raise UserError(
                f"{self.server.url} saved a slot, but not in {path.parent}; give the folder that it has as "
                "--slot-save-path."
            )
        return read_slot(path)

    def _layout(self, slot: Slot) -> SlotLayout:
        config, count = self._config, self.n_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        windows = [reach if isinstance(reach, int) else None for reach in reaches_of(config, count)]
        return layout_for(config.model_type, [heads] * count, windows, d_head, slot)

    @cached_property
    def _props(self) -> Mapping[str, Any]:
        return self.server.read(dict[str, Any], "/props")

    @cached_property
    def _header(self) -> Header:
        path = self.gguf or Path(str(self._props.get("model_path", "")))
        if not path.is_file():
            raise UserError(
                f"The server has loaded {str(path)!r}, which is no file here; give the GGUF file of its model (--gguf)."
            )
        return read_header(parts_of(path))

    @cached_property
    def _config(self) -> Any:
        return config_of(self._header)


class RestoredSlot:
    """A slot that holds an edited cache, until something else is read into it.

    What follows is asked token by token, so that any reply can be followed, and the server's own numbers are known at
    each step.
    """

    def __init__(self, server: LlamaServer, slot: int, held: int, prompt: tuple[int, ...]) -> None:
        self.server, self.slot, self.held, self.prompt = server, slot, held, prompt
        self._steps: dict[tuple[int, ...], Mapping[int, float]] = {}

    def likeliest(self, said: Sequence[int], wanted: int | None = None) -> Mapping[int, float]:
        """Log-probabilities of the likeliest next tokens after these of a reply; of all where `wanted` is not among
        them.

        Raises:
            UserError: the server read tokens of the slot again, so that what was edited in it is lost.
        """
        key = tuple(said)
        if key not in self._steps:
            few = self.server.vocabulary > LIKELIEST
            self._steps[key] = self._asked(key, LIKELIEST if few else "all")
        if wanted is not None and wanted not in self._steps[key]:
            self._steps[key] = self._asked(key, "all")
        return self._steps[key]

    def logprobs(self, reply: Sequence[int]) -> list[Mapping[int, float]]:
        """What `likeliest` gives before each token of a reply, that token among them."""
        return [self.likeliest(reply[:at], token) for at, token in enumerate(reply)]

    def _asked(self, said: tuple[int, ...], count: Any) -> Mapping[int, float]:
        answer = self.server.complete([*self.prompt, *said], n_probs=count, slot=self.slot)
        if answer.reused < self.held:
            raise UserError(
                f"The server used {answer.reused:,} of {self.held:,} tokens of its slot and read the others again, so "
                "what was edited is lost; ask when nobody else uses it, and start llama-server with --swa-full if "
                "layers of the model slide over a window."
            )
        return answer.log_probabilities[0]


def divergence_at_least(first: Mapping[int, float], now: Mapping[int, float]) -> float:
    """KL in nats from one next-token distribution to another, of which the likeliest tokens are known: those that both
    have one by one, and all others as one, so that it is exact where these are unlikely and never too large."""
    both = first.keys() & now.keys()
    rest, rest_now = (max(1 - math.fsum(math.exp(logs[token]) for token in both), _COARSE) for logs in (first, now))
    apart = math.fsum(
        math.exp(first[token]) * (first[token] - now[token]) for token in both if first[token] > -math.inf
    )
    return max(0.0, apart + rest * math.log(rest / rest_now))


_COARSE = 1e-4
"""The error of a server's probabilities, below which a rest is not known."""
