"""A model as a person uses it: load, prefill, generate, capture."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import PADDING
from kvprobe.errors import UserError
from kvprobe.faults.fault import Fault
from kvprobe.inference.capture import Captured, capture
from kvprobe.inference.forward import as_seen, extend
from kvprobe.inference.generate import Generation, generate
from kvprobe.inference.sweep import Sweep, Trial, sweep
from kvprobe.inference.under_policy import apply, read, read_in_chunks, watch
from kvprobe.memory.budget import Budget, budget
from kvprobe.models.files import refuse_not_finite
from kvprobe.models.geometry import Geometry
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import Family
from kvprobe.models.loading import load_folder, pick_device, pick_dtype, resolve_folder
from kvprobe.models.unproved import Lane
from kvprobe.policies.policy import Policy, Scene
from kvprobe.text.transcript import Tokens, Transcript

Messages = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Readable = str | Transcript | Tokens | Messages | Sequence[str | Transcript | Tokens | Messages]
"""What a model reads: a text, a conversation (a transcript, or `{"role": …, "content": …}` messages), tokens, or a batch of
them."""


def load(
    source: Any = "smollm2-135m",
    *,
    tokenizer: Any = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> "Model":
    """A model from a name that `kvprobe ls` shows, a hub id, a local folder, a `.gguf` file, or a model in hand.

    Args:
        source: see above; a Hugging Face model object is used as it is, where it is.
        tokenizer: for a model in hand.
        device: `auto` is a GPU if there is one.
        dtype: `auto` is float32 on the CPU and bfloat16 elsewhere.

    Raises:
        UserError: an unknown name, or files that are not a model.
        UserError: something had to be fetched and could not be; the sentence says what to put where.
        UserError: the weights do not fit.
    """
    if isinstance(source, torch.nn.Module):
        if not hasattr(source, "config"):
            raise UserError(f"{type(source).__name__} is no Hugging Face model; give a causal language model.")
        refuse_not_finite(type(source).__name__, source.named_parameters())
        return Model(Lanes(source.eval(), tokenizer), type(source).__name__)
    if not isinstance(source, str | os.PathLike):
        raise UserError(f"A {type(source).__name__} is no model; give a name, a folder, or a Hugging Face model.")
    where = pick_device(device)
    plain, own_tokenizer = load_folder(resolve_folder(source), where, pick_dtype(dtype, where))
    refuse_not_finite(os.fspath(source), plain.named_parameters())
    return Model(Lanes(plain, tokenizer or own_tokenizer), os.fspath(source))


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        lanes: the two lanes and the tokenizer; `lanes.hooked.bridge` is the TransformerBridge.
        name: what it was loaded as.
    """

    lanes: Lanes
    name: str

    @property
    def tokenizer(self) -> Any:
        return self.lanes.tokenizer

    @property
    def geometry(self) -> Geometry:
        return self.lanes.geometry

    @property
    def fingerprint(self) -> str:
        """Hashes of all weights, of the config, and of the tokenizer with its chat template; see `kvprobe.fingerprint`."""
        return self.lanes.fingerprint

    def tokens(self, text: Readable) -> list[Tokens]:
        """One run of tokens per row: of a text (as it is, after the tokenizer's own start token) or conversations."""
        return self._rows(text, answered=False)

    def budget(self, **settings: Any) -> Budget:
        """What this model needs, from its config and as it was loaded; see `kvprobe.memory.budget.budget`."""
        dtype = str(self.lanes.dtype).removeprefix("torch.")
        found = budget(self.lanes.plain.config.to_dict(), dtype=dtype, **settings)
        return replace(found, config=replace(found.config, name=self.name))

    def prefill(
        self,
        text: Readable,
        *,
        policy: Policy | None = None,
        chunk: int | None = None,
        samples: Sequence[int] | None = None,
        lane: Lane | Literal["auto"] = "auto",
    ) -> KVCache:
        """The cache of a conversation, text or batch.

        Args:
            policy: acts once everything was read, or after every `chunk` tokens.
            samples: numbers of the rows' samples, for policies that draw; 0, 1, … by default.
            lane: `auto` is plain, unless the policy needs attention scores.
        """
        tokens = self.tokens(text)
        if policy is None:
            if chunk is not None:
                raise UserError("`chunk` says how often a policy acts; give a policy, or leave it out.")
            return read(self.lanes, None, tokens, None, lane)[0].cache
        numbers = None if samples is None else tuple(samples)
        if chunk is not None:
            return read_in_chunks(self.lanes, tokens, policy, chunk, lane, numbers)[0].cache
        scene, _ = read(self.lanes, None, tokens, policy, lane)
        return apply(self.lanes, policy, replace(scene, samples=numbers), lane=lane).cache

    def watch(self, text: Readable, past: Scene | None = None, *, queries: int = 32) -> Scene:
        """Read on the hooked lane and record what attention each slot draws, for policies that decide by it.

        Args:
            queries: how many of the last queries to remember one by one (SnapKV needs its window, TOVA one).
        """
        return watch(self.lanes, past, self.tokens_after(past and past.cache, text), queries)[0]

    def apply(self, policy: Policy, start: KVCache | Scene) -> KVCache:
        """The cache after a policy acted at a cut, here and now.

        Args:
            start: a cache, or what `watch` gave for policies that need attention scores.
        """
        return apply(self.lanes, policy, Scene(start) if isinstance(start, KVCache) else start).cache

    def extend(
        self, cache: KVCache | None, text: Readable, *, lane: Lane = "plain", logits: int = 1
    ) -> tuple[KVCache, Float[Tensor, "batch kept vocab"]]:
        """Read on after `cache`: a text where the cache ends, tokens at their own positions.

        Returns the longer cache and the logits after the last `logits` tokens of each row.
        """
        return extend(self.lanes, cache, self.tokens_after(cache, text), lane, logits)

    def generate(self, start: KVCache | Readable, ask: str | None = None, **settings: Any) -> Generation:
        """Continue a cache, conversation or text.

        Args:
            start: a cache needs `ask`; a conversation is answered as the assistant; text is continued.
            ask: a user's next message, in the model's chat template.
            settings: see `kvprobe.inference.generate.generate`.
        """
        past = start if isinstance(start, KVCache) else None
        return generate(self.lanes, self.prompts(start, ask), past, **settings)

    def as_seen(self, cache: KVCache) -> KVCache:
        """The cache with each key turned to the position at which it is seen: a re-indexing carried out, once."""
        return as_seen(self.lanes, cache)

    def sweep(
        self,
        start: KVCache | Readable,
        faults: Sequence[Fault | Trial],
        ask: str | None = None,
        *,
        donors: Mapping[str, KVCache | Readable] | None = None,
        **settings: Any,
    ) -> Sweep:
        """Answer a conversation, or a user's next message after a cache of one row, once for each fault, as rows of one
        batch, and once clean.

        Args:
            donors: what faults take slots from, by name: caches of one row, or what to read for them.
            settings: see `kvprobe.inference.sweep.sweep`.
        """
        past = start if isinstance(start, KVCache) else None
        prompts = self.prompts(start, ask)
        if len(prompts) != 1:
            raise UserError(f"A sweep answers one prompt; there are {len(prompts)}. Sweep them one by one.")
        given = {
            name: donor if isinstance(donor, KVCache) else self.prefill(donor) for name, donor in (donors or {}).items()
        }
        trials = [fault if isinstance(fault, Trial) else Trial(fault) for fault in faults]
        return sweep(self.lanes, prompts[0], trials, past=past, donors=given, **settings)

    def capture(
        self,
        text: Readable,
        families: Sequence[Family],
        *,
        layers: Sequence[int] | None = None,
        segments: Sequence[str] | None = None,
        slots: Sequence[int] | None = None,
        past: KVCache | None = None,
        lane: Lane | Literal["auto"] = "auto",
        keep_cache: bool = False,
        logits: int = 1,
    ) -> Captured:
        """What chosen layers compute at chosen slots, from one pass; see `kvprobe.inference.capture.capture`."""
        return capture(
            self.lanes,
            self.tokens_after(past, text),
            families,
            layers=layers,
            segments=segments,
            slots=slots,
            past=past,
            lane=lane,
            keep_cache=keep_cache,
            logits=logits,
        )

    def tokens_after(self, cache: KVCache | None, text: Readable) -> list[Tokens]:
        """The tokens of `text`; a bare text takes the positions that follow the cache, row by row."""
        if cache is None or not isinstance(text, str):
            return self.tokens(text)
        ids = self._tokenizer()(text, add_special_tokens=False)["input_ids"]
        return [Tokens.of(ids, "text", position) for position in cache.ledger.following.tolist()]

    def prompts(self, start: KVCache | Readable, ask: str | None) -> list[Tokens]:
        """What is read before the model answers: a cache's next turn, a conversation with its answer's header, a text."""
        if isinstance(start, KVCache):
            if ask is None:
                raise UserError("A cache holds no logits; give `ask`, the user's next message.")
            closing, turn = self._user_turn(ask)
            return [
                (closing + turn if unfinished else turn).shifted(position)
                for unfinished, position in zip(_unfinished(start), start.ledger.following.tolist(), strict=True)
            ]
        if ask is None:
            return self._rows(start, answered=True)
        _, turn = self._user_turn(ask)
        return [row + turn.shifted(row.following) for row in self.tokens(start)]

    def _rows(self, text: Readable, answered: bool) -> list[Tokens]:
        """One run of tokens per row; where they are `answered`, conversations have the header of the answer."""
        if isinstance(text, Mapping):
            text = [text]
        if isinstance(text, Sequence) and text and all(isinstance(message, Mapping) for message in text):
            text = Transcript.from_messages(cast(Sequence[Mapping[str, Any]], text))
        if isinstance(text, str):
            return [Tokens.of(self._tokenizer()(text)["input_ids"])]
        if isinstance(text, Tokens):
            return [text]
        if isinstance(text, Transcript):
            return [text.tokens(self._tokenizer(), generation_prompt=answered)]
        if not isinstance(text, Sequence) or any(isinstance(piece, Mapping | int | float | bytes) for piece in text):
            raise UserError(
                f"A {type(text).__name__} of this kind cannot be read; give a text, messages, a Transcript, Tokens "
                "(Tokens.of(ids)), or a list of such rows."
            )
        return [row for piece in text for row in self._rows(cast(Readable, piece), answered)]

    def _user_turn(self, text: str) -> tuple[Tokens, Tokens]:
        """What closes an assistant's message in mid-conversation, and what follows it: a user's message and the
        header of the answer to it."""
        exchange = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": [{"text": "-", "name": "answer"}]},
            {"role": "user", "content": text},
        ]
        chat = Transcript.from_messages(exchange, names=["before", "before", "question"])
        tokens = chat.tokens(self._tokenizer(), generation_prompt=True)
        start = tokens.span("before").stop
        return tokens[tokens.part("answer").stop : start], tokens[start:]

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError(f"{self.name} has no tokenizer; give one to `load`, or pass Tokens.")
        return self.tokenizer


def _unfinished(cache: KVCache) -> list[bool]:
    """Whether each row ends in an answer that was generated: its end was predicted but never read."""
    ledger = cache.ledger
    ends = []
    for row in ledger.segments.tolist():
        read = [ledger.names[segment] for segment in row if segment != PADDING]
        ends.append(bool(read) and read[-1] in ("generated", "generation"))
    return ends
