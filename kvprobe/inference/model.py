"""The model that users work with: load, prefill, generate, capture, sweep."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase

from kvprobe.arguments import AtLeastOne, AtLeastZero, Within, checked_arguments
from kvprobe.brief import Brief, plain_dtype
from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.parts import described
from kvprobe.errors import UserError
from kvprobe.faults import Fault, FaultContext
from kvprobe.inference.capture import Captured, capture
from kvprobe.inference.forward import as_seen, extend, prefill
from kvprobe.inference.generate import Generation, OnStep, generate
from kvprobe.inference.hf import Grid, from_hf, to_hf
from kvprobe.inference.readable import readable_runs, require_type
from kvprobe.inference.room import budget_of, check_loading
from kvprobe.inference.rows import Readable, needs_question, rows_of, runs_after, turns_after, user_turn, with_question
from kvprobe.inference.sweep import ROWS, Question, Sweep, Trial, prepare, sweep
from kvprobe.inference.under_policy import apply, lane_for, read_for, read_in_chunks, sample_numbers, watch
from kvprobe.memory.forward import Kernel, Logits
from kvprobe.memory.needs import EngineName
from kvprobe.memory.vllm import BLOCK
from kvprobe.models.catalogue import Quantization
from kvprobe.models.geometry import Geometry, felt
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import Family
from kvprobe.models.loading import adapted, opened
from kvprobe.models.noted import noted
from kvprobe.models.placing import Placing, numbers_of
from kvprobe.models.unproved import Lane
from kvprobe.policies.policy import Policy, Scene
from kvprobe.policies.written import as_policy
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

if TYPE_CHECKING:
    from kvprobe.memory.budget import Budget


@checked_arguments
def load(
    source: Any = "smollm2-135m",
    *,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    quantization: Quantization | None = None,
    chunk: AtLeastOne | None = None,
    check_memory: bool = True,
) -> "Model":
    """A model from a name that `kvprobe ls` shows, a hub id, a local folder, a `.gguf` file, or a loaded model.

    Args:
        source: see above; a folder may hold a LoRA adapter, whose base is on this machine. A Hugging Face model object
            keeps its device and dtype, as in a PeftModel or nnsight's LanguageModel; a kvprobe model is kept as it is.
        adapter: a LoRA adapter to be added to it; see `Model.adapted`.
        tokenizer: for a loaded model, or instead of the source's own.
        device: `auto` is a GPU if there is one, and the whole model is on it.
        dtype: `auto` is float32 on the CPU and bfloat16 elsewhere.
        device_map: instead, what is on which device, as in transformers; `auto` fills GPUs, then memory, then the disk.
        max_memory: how much of each may be filled: `{0: "20GiB", "cpu": "8GiB"}`; the map is then `auto`.
        offload_folder: for weights on disk that the model's own files have in another form.
        quantization: what the weights are rounded to as they are loaded; see `kvprobe.models.catalogue.Quantization`.
        chunk: tokens of a prompt that are read at once where nothing else is asked for; all by default.
        check_memory: refuse a model that takes more than is free; see `kvprobe.inference.room`.

    Raises:
        UserError: an unknown name, no model, a failed download, too little memory, or a package that is missing.
    """
    placing, loaded = Placing(device_map, max_memory, offload_folder, quantization), isinstance(source, Model)
    changed = loaded and (tokenizer, device, dtype, chunk) != (None, "auto", "auto", None)
    if changed or (isinstance(source, Model | torch.nn.Module) and placing != Placing()):
        raise UserError("This model is loaded already; load it again from its name to change how.")
    if isinstance(source, Model):
        return source if adapter is None else source.adapted(adapter)
    plain, own, name = opened(source, device, dtype, placing, check_loading if check_memory else None)
    model = noted(source, Model(Lanes(plain, tokenizer or own, chunk), name, placing))
    return model if adapter is None else model.adapted(adapter)


@checked_arguments
@dataclass(frozen=True, repr=False)
class Model(Brief):
    """A loaded model.

    Attributes:
        lanes: the two lanes and the tokenizer; `lanes.hooked.bridge` is the TransformerBridge.
        name: the name that it was loaded by, and what its weights were rounded to.
        placing: where its weights were put.
    """

    lanes: Lanes
    name: str = ""
    placing: Placing = field(default=Placing(), compare=False)

    def __post_init__(self) -> None:
        require_type("What a Model is made of", self.lanes, Lanes, "the model of transformers to kv.load instead")

    def _facts(self) -> Iterable[str]:
        shape = self.geometry
        yield from (repr(self.name), type(self.lanes.plain).__name__)
        yield f"{shape.n_layers} layers of {shape.n_heads} heads over {described(shape.layers)}"
        yield from felt(shape.readers)
        yield self.computes

    @property
    def tokenizer(self) -> Any:
        return self.lanes.tokenizer

    @property
    def geometry(self) -> Geometry:
        return self.lanes.geometry

    @property
    def dtype(self) -> str:
        """In which it computes and its caches are held, such as `float32`."""
        return plain_dtype(self.lanes.dtype)

    @property
    def computes(self) -> str:
        """Where, in which numbers, and with weights kept in which: "cpu, float32, weights in int8 by quanto"."""
        kept = numbers_of(self.lanes.plain.config)
        return f"{self.lanes.device}, {self.dtype}{f', weights in {kept}' if kept else ''}"

    @property
    def round_off(self) -> float:
        """How far numbers that must be equal may differ, relative to their size: a hundred steps of the dtype."""
        return 100 * torch.finfo(self.lanes.dtype).eps

    @property
    def fingerprint(self) -> str:
        """Hashes of the weights, the config, and the tokenizer with its chat template; see `kvprobe.fingerprint`."""
        return self.lanes.fingerprint

    def adapted(self, adapter: str | os.PathLike[str]) -> "Model":
        """This model with a LoRA adapter added: another model, which shares all weights that the adapter leaves alone.

        Args:
            adapter: a name that `kvprobe ls` shows, a folder or a hub id; the base that it names is not looked at.
        """
        lanes = Lanes(adapted(self.lanes.plain, adapter), self.tokenizer, self.lanes.chunk).proved_as(self.lanes)
        return Model(lanes, f"{self.name} with {os.fspath(adapter)}", self.placing)

    def tokens(self, text: Readable) -> list[Tokens]:
        """One run of tokens per row, of texts (each after the tokenizer's own start token) or conversations."""
        return rows_of(text, self._tokenizer, answered=False)

    def budget(
        self,
        *,
        context: int = 8192,
        new: int = 0,
        batch: int = 1,
        source: int = 0,
        cache_dtype: str | None = None,
        engine: EngineName = "hf",
        policy: Policy | str | None = None,
        memory: str | int | None = None,
        weights: str | int | None = None,
        kernel: Kernel | None = None,
        logits: Logits = "last",
        ranks: int = 1,
        block: int = BLOCK,
        batched_tokens: int = 8192,
    ) -> "Budget":
        """The memory that this model needs, in the dtype that it was loaded in; see `kvprobe.memory.budget.budget`.

        Of weights on disk, those of one module are counted.
        """
        choices: dict[str, Any] = {name: value for name, value in locals().items() if name != "self"}
        return budget_of(self.lanes.plain, self.name, self.lanes.dtype, choices)

    def prefill(
        self,
        text: Readable,
        *,
        policy: Policy | str | None = None,
        chunk: AtLeastOne | None = None,
        samples: Sequence[int] | None = None,
        lane: Lane | Literal["auto"] = "auto",
    ) -> KVCache:
        """The cache of a conversation, text or batch.

        Args:
            policy: or its text, such as "SnapKV(50%)"; acts after everything was read, or after every `chunk` tokens.
            chunk: tokens of each row that are read at once: a long prompt then takes memory for little but its cache.
            samples: numbers of the rows' samples, for policies that draw; 0, 1, … by default.
            lane: `auto` is plain, unless the policy needs attention scores that only the hooked lane shows.
        """
        tokens = self.tokens(text)
        if policy is None:
            return prefill(self.lanes, tokens, lane_for(self.lanes, lane), chunk)
        policy, numbers = as_policy(policy), sample_numbers(samples)
        if chunk is not None:
            return read_in_chunks(self.lanes, tokens, policy, chunk, lane, numbers)[0].cache
        scene, _ = read_for(self.lanes, policy.observes, None, tokens, lane)
        return apply(self.lanes, policy, replace(scene, samples=numbers), lane=lane).cache

    def watch(self, text: Readable, past: Scene | None = None, *, queries: AtLeastZero = 32) -> Scene:
        """Read and record the attention that each slot gets, for policies that decide by it.

        Args:
            past: what `watch` returned before.
            queries: how many of the last queries to record one by one (SnapKV needs its window, TOVA one).
        """
        return watch(self.lanes, past, self.tokens_after(past and past.cache, text), queries)[0]

    def apply(self, policy: Policy | str, start: KVCache | Scene) -> KVCache:
        """The cache after a policy acted on it once.

        Args:
            start: a cache, or what `watch` returned, for policies that need attention scores.
        """
        return apply(self.lanes, as_policy(policy), Scene(start) if isinstance(start, KVCache) else start).cache

    def extend(
        self,
        cache: KVCache | None,
        text: Readable,
        *,
        lane: Lane = "plain",
        logits: int = 1,
        chunk: AtLeastOne | None = None,
    ) -> tuple[KVCache, Float[Tensor, "batch last vocab"]]:
        """Read after `cache`: texts at the positions that follow it, tokens at their own positions.

        One text is read after every row, and a list gives each row its own. A cache of one row is shared by all.

        Returns the longer cache and the logits after the last `logits` tokens of each row.
        """
        return extend(self.lanes, cache, self.tokens_after(cache, text), lane, logits, chunk)

    def generate(
        self,
        start: KVCache | Readable,
        ask: str | None = None,
        *,
        max_new_tokens: AtLeastOne = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Collection[int] | None = None,
        generators: Sequence[torch.Generator] | None = None,
        policy: Policy | str | None = None,
        samples: Sequence[int] | None = None,
        on_step: OnStep | None = None,
        lane: Lane | Literal["auto"] = "auto",
    ) -> Generation:
        """Continue a cache, conversation or text; see `kvprobe.inference.generate.generate` for the other arguments.

        Args:
            start: a cache needs `ask`; a conversation is answered as the assistant; text is continued.
            ask: a user's next message, in the model's chat template.
        """
        return generate(
            self.lanes,
            self.prompts(start, ask),
            start if isinstance(start, KVCache) else None,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=stop,
            generators=generators,
            policy=policy,
            samples=samples,
            on_step=on_step,
            lane=lane,
        )

    def from_hf(
        self, past: Cache, text: Readable, attention_mask: Grid = None, *, position_ids: Grid = None
    ) -> KVCache:
        """A `DynamicCache` of transformers, of which `text` was read, as kvprobe's; see `kvprobe.inference.hf`."""
        return from_hf(self.lanes, past, self.tokens(text), attention_mask, position_ids)

    def to_hf(self, cache: KVCache) -> DynamicCache:
        """A cache without masked slots or gaps as transformers' `DynamicCache`; see `kvprobe.inference.hf`."""
        return to_hf(self.lanes, cache)

    def as_seen(self, cache: KVCache) -> KVCache:
        """The cache, which must be this model's, with each key rotated to its position: re-indexing, done for good."""
        return as_seen(self.lanes, cache)

    def fault_context(self, cache: KVCache, faults: Sequence[Fault], donors: Mapping[str, KVCache]) -> FaultContext:
        """What these faults need to know of a cache of one row; see `kvprobe.inference.trials.struck`."""
        return prepare(self.lanes, cache, faults, donors)

    def sweep(
        self,
        start: KVCache | Readable,
        faults: Sequence[Fault | Trial],
        ask: str | None = None,
        *,
        donors: Mapping[str, KVCache | Readable] | None = None,
        seed: AtLeastZero = 0,
        sample: AtLeastZero = 0,
        max_new_tokens: AtLeastOne = 64,
        stop: Collection[int] | None = None,
        follow: bool = True,
        rows: Annotated[int, Within(2)] = ROWS,
        lane: Lane = "plain",
        done: Callable[[int], object] = lambda count: None,
    ) -> Sweep:
        """Answer once for each fault and once clean, as rows of one batch; see `kvprobe.inference.sweep.sweep` for the
        other arguments.

        Args:
            start: a conversation or text, or a cache of one row, which needs `ask`.
            ask: a user's next message, in the model's chat template.
            donors: what faults take slots from, by name: caches of one row, or what to read for them.
            sample: number of the prompt, which separates its random draws from those of other prompts.
        """
        past, prompts = start if isinstance(start, KVCache) else None, self.prompts(start, ask)
        if len(prompts) != 1:
            raise UserError(f"A sweep answers one prompt, but there are {len(prompts)}; sweep them one by one.")
        trials = [fault if isinstance(fault, Trial) else Trial(fault) for fault in faults]
        caches = {
            name: donor if isinstance(donor, KVCache) else self.prefill(donor) for name, donor in (donors or {}).items()
        }
        return sweep(
            self.lanes,
            [Question(prompts[0], trials, past, caches, sample)],
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=stop,
            follow=follow,
            rows=rows,
            lane=lane,
            done=done,
        )[0]

    def capture(
        self,
        text: Readable,
        families: Sequence[Family | str] | Mapping[Family, Sequence[int]],
        *,
        layers: Sequence[int] | None = None,
        segments: str | Sequence[str] | None = None,
        slots: Sequence[int] | None = None,
        past: KVCache | None = None,
        lane: Lane | Literal["auto"] = "auto",
        keep_cache: bool = False,
        logits: int = 1,
    ) -> Captured:
        """What chosen layers compute at chosen slots, in one pass; see `kvprobe.inference.capture.capture`."""
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

    def tokens_after(self, cache: KVCache | None, text: Readable, name: str = "text") -> list[Tokens]:
        """The tokens of argument `name`; bare texts or ids, one or one a row, take the positions after the cache."""
        runs = None if cache is None else runs_after(text, entries(cache.ledger.following, int), self._tokenizer)
        return readable_runs(self.lanes, self.tokens(text) if runs is None else runs, name)

    def prompts(
        self, start: KVCache | Readable, ask: str | None, arguments: Mapping[str, object] | None = None
    ) -> list[Tokens]:
        """What is read before the model answers: a next turn, a conversation with the answer's header, a text.

        Args:
            arguments: of the chat template, which a cache does not know; those of a conversation are its own.
        """
        if isinstance(start, KVCache):
            return turns_after(start.ledger, ask, self._tokenizer(), arguments)
        if ask is None:
            return rows_of(start, self._tokenizer, answered=True)
        if isinstance(start, Transcript) and needs_question(start, self._tokenizer()):
            before, question = with_question(start, ask, self._tokenizer(), together=True)
            return [before + question]
        _, turn = user_turn(ask, self._tokenizer(), start.arguments if isinstance(start, Transcript) else None)
        return [row + turn.shifted(row.following) for row in self.tokens(start)]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self.name} has no tokenizer; give one to `load`, or pass Tokens.")
        if not isinstance(self.tokenizer, Tokenizer):
            raise UserError(f"The tokenizer is a {type(self.tokenizer).__name__}; give `load` one of transformers.")
        return self.tokenizer
