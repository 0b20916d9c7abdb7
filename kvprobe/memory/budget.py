"""A model's memory, from its config alone: what is fixed, what grows, where it peaks, and how far it goes."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from kvprobe.cache.slots import Plan
from kvprobe.errors import UserError
from kvprobe.memory import forward, hf, logical, vllm
from kvprobe.memory.caches import Layer, layers_of, text_model
from kvprobe.memory.config import Config
from kvprobe.memory.formats import dtype_of, weight_bytes
from kvprobe.memory.forward import Kernel, Logits, Transient, Widths, widths_of
from kvprobe.memory.numbers import numbers_named, plain_named
from kvprobe.memory.request import Request
from kvprobe.memory.sources import config_of
from kvprobe.memory.table import lines
from kvprobe.memory.units import bytes_in
from kvprobe.memory.weights import active
from kvprobe.memory.weights import weights as weights_of
from kvprobe.memory.written import plan_of
from kvprobe.names import unknown

EngineName = Literal["hf", "vllm", "logical"]

FARTHEST = 1 << 34
"""Tokens, or conversations, beyond which a search does not look."""


@dataclass(frozen=True)
class Budget:
    """What a model needs for some conversations.

    Attributes:
        config: the text model's.
        layers: what each layer keeps.
        widths: of the tensors of a pass.
        parameters: how many weights there are.
        active: how many of them one token meets, where a router chooses among experts.
        weights: bytes of them, on one rank.
        request: the conversations.
        engine: whose caches are counted.
        blocks: how vLLM is run, where it is the engine.
        kernel: of attention in transformers.
        logits: of the last token of the prompt, or of all of them.
        memory: bytes that there are; None if that was not said.
    """

    config: Config
    layers: tuple[Layer, ...]
    widths: Widths
    parameters: int
    active: int
    weights: int
    request: Request
    engine: EngineName
    blocks: vllm.Engine
    kernel: Kernel
    logits: Logits
    memory: int | None = None

    @cached_property
    def logical(self) -> list[int]:
        """Bytes of each layer that a later query may read."""
        return logical.held(self.layers, self.request)

    @cached_property
    def allocated(self) -> list[int]:
        """Bytes of each layer that the engine holds, less what it pads."""
        if self.engine == "logical":
            return self.logical
        if self.engine == "hf":
            return hf.held(self.layers, self.request)
        return [self.request.batch * pages for pages in self._reserved.pages]

    @cached_property
    def cache(self) -> int:
        """Bytes that the engine holds for the cache, padding included."""
        if self.engine == "vllm":
            return self.request.batch * self._reserved.bytes
        return sum(self.allocated)

    @cached_property
    def moments(self) -> dict[str, Transient]:
        """What there is beside the weights while the prompt is read, when the last token has been generated, and, where a policy or
        a format lets the cache grow between two acts, at the fullest token before it."""
        found = self._ends
        before = [self.generating(step) for step in self._fuller_steps()]
        fullest = max((budget._ends[budget._end] for budget in before), key=lambda moment: moment.total, default=None)
        if fullest is not None and fullest.total > max(moment.total for moment in found.values()):
            return {**found, "on the way": fullest}
        return found

    def _fuller_steps(self) -> list[int]:
        if self.engine == "hf" and not self.request.numbers.is_plain:
            return hf.fuller_steps(self.request)
        return self.request.plan.fuller_steps(self.request.prompt, self.request.new, len(self.layers))

    @property
    def _end(self) -> str:
        """The last of its moments."""
        return list(self._ends)[-1]

    @cached_property
    def _ends(self) -> dict[str, Transient]:
        if self.engine == "logical":
            return {"held": Transient(self.cache, 0)}
        if self.engine == "vllm":
            tokens = min(self.blocks.batched_tokens, self.request.batch * self.request.prompt)
            step = forward.stepping(self.widths, self.request, tokens)
            # One block of the pool is never handed out.
            return {"reading": replace(step, cache=self.cache + self._reserved.block_bytes)}
        found = {"reading": forward.reading(self.layers, self.widths, self.request, self.kernel, self.logits)}
        if self.request.new:
            found["generating"] = forward.growing(self.layers, self.widths, self.request, self.kernel)
        return found

    @property
    def moment(self) -> str:
        """When most is needed."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> int:
        """Bytes at that moment, weights included."""
        return self.weights + self.moments[self.moment].total

    @property
    def usable(self) -> int | None:
        """Of the memory, what the engine takes."""
        if self.memory is None or self.engine != "vllm":
            return self.memory
        return int(self.memory * vllm.UTILISATION)

    @property
    def headroom(self) -> int | None:
        """What is left of the memory at the peak; negative where it does not fit."""
        return None if self.usable is None else self.usable - self.peak

    @cached_property
    def bytes_per_token(self) -> list[int]:
        """By which each layer's cache grows with a token that it keeps, per conversation and in the logical view."""
        return [
            0
            if layer.attention is None or layer.attention.crosses
            else self.request.numbers.bytes(layer.attention.numbers)
            for layer in self.layers
        ]

    @property
    def trained_context(self) -> int | None:
        """Tokens that the model was made for, if its config says so."""
        return self.config.optional_size("max_position_embeddings", "n_positions", "seq_length")

    @cached_property
    def largest_context(self) -> int | None:
        """Tokens of the longest conversation that fits, as all shorter ones do, at this batch and as many generated tokens; 0 if
        none does, None if no memory was given or all that were tried fit. Found by trying, since nothing here is a straight
        line."""

        def fits(context: int) -> bool:
            before = self.request.plan.fuller_contexts(context, self.request.new, len(self.layers))
            return all(self.at(each).fits() for each in (context, *before))

        return self._largest(fits, self.request.new + 1)

    @cached_property
    def largest_batch(self) -> int | None:
        """Conversations of this length that fit at once, likewise."""
        return self._largest(lambda batch: replace(self, request=replace(self.request, batch=batch)).fits(), 1)

    @cached_property
    def largest_new(self) -> int | None:
        """Tokens that can be generated after this prompt, likewise; 0 also where the prompt itself does not fit."""
        return self._largest(lambda new: self.generating(new).fits(), 0)

    def generating(self, new: int) -> "Budget":
        """The same when so many tokens have been generated after the prompt."""
        return replace(self, request=replace(self.request, new=new))

    @property
    def generated(self) -> list[int]:
        """Bytes of each layer that are held for generated tokens: the newest, so that they slide out last."""
        found = []
        for layer, size in zip(self.layers, self.allocated, strict=True):
            reach = layer.attention.reach if layer.attention is not None else None
            held = min(self.request.context, reach or self.request.context)
            grows = layer.attention is not None and not layer.attention.crosses
            found.append(size * min(self.request.new, held) // held if grows else 0)
        return found

    def at(self, context: int) -> "Budget":
        """The same for conversations of another length, of which as many tokens are generated."""
        if context <= self.request.new:
            raise UserError(
                f"The context is {context} with {self.request.new} generated tokens; a prompt has at least one."
            )
        return replace(self, request=replace(self.request, prompt=context - self.request.new))

    def fits(self) -> bool:
        """Whether there is room at the peak."""
        return self.usable is None or self.peak <= self.usable

    def _largest(self, fits: Callable[[int], bool], low: int) -> int | None:
        """The largest number for which this holds, as it does for all below it."""
        if self.usable is None:
            return None
        if not fits(low):
            return 0
        high = 2 * max(low, 1)
        while fits(high):
            low, high = high, 2 * high
            if high > FARTHEST:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    @cached_property
    def _reserved(self) -> vllm.Reserved:
        return vllm.reserved(self.layers, self.request, self.blocks)

    @property
    def without_policy(self) -> "Budget":
        """The same where every slot stays, at full precision."""
        return replace(self, request=replace(self.request, plan=Plan()))

    @property
    def without_format(self) -> "Budget":
        """The same with the cache in the numbers that the model computes with."""
        return replace(self, request=replace(self.request, numbers=self.request.dtype))

    def __str__(self) -> str:
        return "\n".join(lines(self))


def budget(
    model: str | os.PathLike[str] | Mapping[str, Any],
    *,
    context: int = 8192,
    new: int = 0,
    batch: int = 1,
    source: int = 0,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    engine: EngineName = "hf",
    policy: Any = None,
    memory: str | int | None = None,
    weights: str | int | None = None,
    kernel: Kernel | None = None,
    logits: Logits = "last",
    ranks: int = 1,
    block: int = vllm.BLOCK,
    batched_tokens: int = 8192,
) -> Budget:
    """The memory of a model, from its config alone.

    Args:
        model: a name from `kvprobe ls`, an id on the shelf of configs that ship, a hub id, a folder, a `config.json`, or its fields.
        context: tokens of each conversation.
        new: how many of them are generated, one by one; the others are read in one pass.
        batch: conversations at once.
        source: tokens of the other input that cross-attention looks at.
        dtype: of weights and activations; by default the config's.
        cache_dtype: of the cache; by default the same.
        engine: `hf` for the caches of transformers, `vllm` for its blocks, `logical` for what a query may read.
        policy: one of `kv.policies`, or written out: `"SinkWindow(4, 1020)"`.
        memory: what there is, in bytes or as `"24GiB"`.
        weights: what the weights take, if the config does not tell.
        kernel: of attention in transformers, `sdpa` or `eager`; by default what it takes for this family.
        logits: of the prompt's `last` token, as generation takes them, or of `all`.
        ranks: GPUs that share the model in vLLM; the budget is that of one.
        block: tokens of a vLLM block.
        batched_tokens: that a vLLM step reads at most.

    Raises:
        UserError: the model is unknown or of an unknown family, its config lacks a size or has an impossible one, or the
            engine has no such cache.
    """
    for name, value, low in (("context", context, 1), ("new", new, 0), ("batch", batch, 1), ("source", source, 0)):
        _require(name, value, low)
    for name, value in (("ranks", ranks), ("block", block), ("batched_tokens", batched_tokens)):
        _require(name, value, 1)
    for name, chosen, known in (
        ("engine", engine, EngineName),
        ("kernel", kernel or "sdpa", Kernel),
        ("choice of logits", logits, Logits),
    ):
        if chosen not in get_args(known):
            raise UserError(unknown(name, str(chosen), get_args(known)))
    if new >= context:
        raise UserError(f"The context is {context} with {new} generated tokens; a prompt has at least one.")
    if ranks > 1 and engine != "vllm":
        raise UserError(f"Only vLLM shares a model among ranks here; use engine='vllm', or ranks=1 for {engine}.")
    config = text_model(config_of(model))
    layers = layers_of(config)
    numbers = dtype_of(config) if dtype is None else plain_named(dtype)
    counted = weights_of(config)
    found = Budget(
        config=config,
        layers=layers,
        widths=widths_of(config, layers),
        parameters=counted.total,
        active=active(config),
        weights=-(
            -(weight_bytes(counted, config, numbers) if weights is None else bytes_in(weights, "size of the weights"))
            // ranks
        ),
        request=Request(
            prompt=context - new,
            new=new,
            batch=batch,
            source=source,
            dtype=numbers,
            numbers=numbers if cache_dtype is None else numbers_named(cache_dtype),
            plan=Plan() if policy is None else plan_of(policy),
        ),
        engine=engine,
        blocks=vllm.Engine(block=block, ranks=ranks, batched_tokens=batched_tokens),
        kernel=kernel or forward.usual_kernel(config),
        logits=logits,
        memory=None if memory is None else bytes_in(memory, "memory"),
    )
    if engine == "hf":
        hf.check(layers, found.request)
    _ = found.cache, found.trained_context  # what is wrong with them is said now
    return found


def _require(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= FARTHEST:
        raise UserError(
            f"The {name.replace('_', ' ')} is {value!r}; it must be a whole number, {low:,} to {FARTHEST:,}."
        )
