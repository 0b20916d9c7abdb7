"""What a model needs for some conversations: what is fixed, what grows, where it peaks, and how far it goes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from kvprobe.cache.slots import SlotPlan
from kvprobe.errors import UserError
from kvprobe.memory import forward, hf, logical, vllm
from kvprobe.memory.caches import LayerStore
from kvprobe.memory.config import Config
from kvprobe.memory.forward import Kernel, Logits, Phase
from kvprobe.memory.request import Request
from kvprobe.memory.widths import Widths

EngineName = Literal["hf", "vllm", "logical"]
Same = TypeVar("Same", bound="Needs")

FARTHEST = 1 << 34
"""Tokens, or conversations, beyond which a search does not look."""


def require_prompt(context: int, new: int) -> None:
    """Refuse conversations of which all tokens are generated.

    Raises:
        UserError: there is no token left for the prompt.
    """
    if context <= new:
        raise UserError(f"The context is {context} with {new} generated tokens; give a context of at least {new + 1}.")


@dataclass(frozen=True)
class Needs:
    """What a model needs for some conversations, in bytes.

    Attributes:
        config: the text model's.
        assumed: sizes that it leaves out, which are those of transformers' configuration class.
        trained_context: tokens that the model was made for, if its config says so.
        layers: what each layer stores.
        widths: of the tensors of a pass.
        parameters: how many weights there are.
        active: how many of them one token uses, where a router chooses among experts.
        weights: bytes of them, on one rank.
        request: the conversations.
        engine: whose caches are counted.
        blocks: how vLLM is run, where it is the engine.
        kernel: of attention in transformers.
        logits: of the last token of the prompt, or of all of them.
        memory: bytes that there are; None if not stated.
    """

    config: Config
    assumed: Mapping[str, object]
    trained_context: int | None
    layers: tuple[LayerStore, ...]
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
        """Bytes of each layer that the engine holds, without padding."""
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
    def phases(self) -> dict[str, Phase]:
        """What is needed beside the weights while the prompt is read and at the last generated token.

        A policy or a format that acts only every few tokens lets the cache grow in between. If an earlier token needs
        more than both, its phase is included.
        """
        before = [self.generating(step)._last_phase for step in self._fuller_steps()]
        fullest = max(before, key=lambda phase: phase.total, default=None)
        if fullest is not None and fullest.total > max(phase.total for phase in self._ends.values()):
            return {**self._ends, "on the way": fullest}
        return self._ends

    def _fuller_steps(self) -> list[int]:
        if self.engine == "hf" and not self.request.numbers.is_plain:
            return hf.fuller_steps(self.request)
        return self.request.plan.fuller_steps(self.request.prompt, self.request.new, len(self.layers))

    @property
    def _last_phase(self) -> Phase:
        return list(self._ends.values())[-1]

    @cached_property
    def _ends(self) -> dict[str, Phase]:
        """The phases at the end of the prompt and at the last token."""
        if self.engine == "logical":
            return {"held": Phase(self.cache, 0)}
        if self.engine == "vllm":
            tokens = min(self.blocks.batched_tokens, self.request.batch * self.request.prompt)
            step = forward.stepping(self.widths, self.request, tokens)
            # One block of the pool is never handed out.
            return {"reading": replace(step, cache=self.cache + self._reserved.block_bytes)}
        ends = {"reading": forward.reading(self.layers, self.widths, self.request, self.kernel, self.logits)}
        if self.request.new:
            ends["generating"] = forward.growing(self.layers, self.widths, self.request, self.kernel)
        return ends

    @property
    def phase(self) -> str:
        """The name of the phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> int:
        """Bytes in that phase, weights included."""
        return self.weights + self.phases[self.phase].total

    @property
    def usable(self) -> int | None:
        """The part of the memory that the engine takes."""
        if self.memory is None or self.engine != "vllm":
            return self.memory
        return int(self.memory * vllm.UTILISATION)

    @property
    def headroom(self) -> int | None:
        """What is left of the memory at the peak; negative where it does not fit."""
        return None if self.usable is None else self.usable - self.peak

    @cached_property
    def bytes_per_token(self) -> list[int]:
        """Bytes by which each layer's cache grows with a token, per conversation and in the logical view."""
        return [
            0
            if layer.attention is None or layer.attention.crosses
            else self.request.numbers.bytes(layer.attention.numbers)
            for layer in self.layers
        ]

    @cached_property
    def writes_per_token(self) -> list[int]:
        """Bytes that kvprobe's own caches keep of a token in each recurrent layer, where an engine keeps the state
        alone; 0 in others, and where kvprobe does not read such layers."""
        number = self.request.dtype.bytes(1)
        states = [() if layer.state is None else layer.state.parts for layer in self.layers]
        return [sum(part.heads * part.head_bytes(number) for part in parts) for parts in states]

    @cached_property
    def largest_context(self) -> int | None:
        """Tokens of the longest conversation that fits, as all shorter ones do, with as many generated tokens.

        0 if none fits; None if no memory was given or every length that was tried fits. It is found by search, since
        memory is not a linear function of length.
        """

        def fits(context: int) -> bool:
            before = self.request.plan.fuller_contexts(context, self.request.new, len(self.layers))
            return all(self.at(length).fits() for length in (context, *before))

        return self._largest(fits, self.request.new + 1)

    @cached_property
    def largest_batch(self) -> int | None:
        """Conversations of this length that fit at once, likewise."""
        return self._largest(lambda batch: replace(self, request=replace(self.request, batch=batch)).fits(), 1)

    @cached_property
    def largest_new(self) -> int | None:
        """Tokens that can be generated after this prompt, likewise; 0 also where the prompt itself does not fit."""
        return self._largest(lambda new: self.generating(new).fits(), 0)

    def generating(self: Same, new: int) -> Same:
        """The same when so many tokens have been generated after the prompt."""
        return replace(self, request=replace(self.request, new=new))

    @property
    def generated(self) -> list[int]:
        """Bytes of each layer that are held for generated tokens; they are the newest, so they leave a window last, and
        are counted as what a policy evicts last."""
        sizes, request = [], self.request
        for number, (layer, size) in enumerate(zip(self.layers, self.allocated, strict=True)):
            reach = layer.attention.reach if layer.attention is not None else None
            kept = request.plan.kept(request.prompt, request.new, number, len(self.layers))
            held = min(request.context, reach or request.context, kept)
            grows = layer.attention is not None and not layer.attention.crosses
            sizes.append(size * min(request.new, held) // held if grows else 0)
        return sizes

    def at(self: Same, context: int) -> Same:
        """The same for conversations of another length, of which as many tokens are generated.

        Raises:
            UserError: there is no prompt.
        """
        require_prompt(context, self.request.new)
        prompt = context - self.request.new
        return replace(self, request=replace(self.request, prompt=prompt, plan=self.request.plan.at(prompt)))

    def fits(self) -> bool:
        """Whether there is room at the peak."""
        return self.usable is None or self.peak <= self.usable

    def _largest(self, fits: Callable[[int], bool], low: int) -> int | None:
        """The largest number from `low` up for which this holds, as it does for all numbers between."""
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
    def without_policy(self: Same) -> Same:
        """The same where every slot is retained, at full precision."""
        return replace(self, request=replace(self.request, plan=SlotPlan()))

    @property
    def without_format(self: Same) -> Same:
        """The same with the cache in the dtype that the model computes in."""
        return replace(self, request=replace(self.request, numbers=self.request.dtype))
