"""What a cache policy is: which slots stay × their positions afterwards × whether they are computed again.

A policy is a frozen dataclass. It acts on a `Scene` after a forward pass, so that the next pass sees the result: once
after the prompt, then after every `every` generated tokens. `A | B` is a policy of which A acts first, then B.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.arguments import AtLeastOne, check_fields
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache, PositionMode
from kvprobe.cache.entries import entries
from kvprobe.cache.parts import attends, heads_apart
from kvprobe.cache.slots import Evicts, Rounds
from kvprobe.errors import UserError
from kvprobe.names import short_repr
from kvprobe.policies.attention import Attention
from kvprobe.policies.share import PromptShare, as_budget

Provenance = Literal["retained", "recomputed"]
Live = Bool[Tensor, "layers batch kv_heads slots"]


@dataclass(frozen=True, repr=False)
class Scene(Brief):
    """What a policy reads and changes.

    Attributes:
        cache: the cache after the last pass.
        attention: the attention that its slots have received, if it was recorded.
        samples: number of each row's sample, for policies that draw at random, so that a row's draw does not depend on
            the rows beside it. By default the row's own number.
        ended: rows that are complete; policies leave them as they are, so that they end as they would alone.
        prompts: live slots of each row before any policy acted, of which budgets may be shares; None before that.

    Raises:
        UserError: there is not one sample number for each row.
    """

    cache: KVCache
    attention: Attention | None = None
    samples: tuple[int, ...] | None = None
    ended: tuple[int, ...] = ()
    prompts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and len(self.samples) != self.cache.batch:
            raise UserError(
                f"There are {self.cache.batch} rows but {len(self.samples)} sample numbers; give one for each row."
            )

    @property
    def live(self) -> Live:
        """Liveness of each slot in every layer that attends, and in each of its KV heads; these count as one where
        layers differ in them, or keep states."""
        live = self._live_everywhere
        return live if len(self.attending) == len(live) else live[self.attending]

    @property
    def attending(self) -> list[int]:
        """The layers of the cache that attend."""
        return [number for number, layer in enumerate(self.cache.layers) if attends(layer)]

    @property
    def _live_everywhere(self) -> Live:
        return self.cache.ledger.live.expand(self.cache.n_layers, -1, heads_apart(self.cache.shape), -1)

    @property
    def complete(self) -> Bool[Tensor, "batch"]:
        """Which rows have ended."""
        rows = [row in self.ended for row in range(self.cache.batch)]
        return torch.tensor(rows, device=self.cache.ledger.tokens.device)

    @property
    def sized(self) -> "Scene":
        """The scene with its prompts counted now, unless they were before."""
        if self.prompts is not None:
            return self
        return replace(self, prompts=entries(self.cache.ledger.live_somewhere.sum(1), int))

    def keeping(self, live: Live) -> "Scene":
        """The scene with this liveness in the layers that attend; what none of them holds any more, the others lose
        too."""
        if len(self.attending) < self.cache.n_layers:
            lost = self.live.any(0) & ~live.any(0)
            live = (self._live_everywhere & ~lost).index_copy(0, torch.tensor(self.attending, device=lost.device), live)
        live = live[:1] if bool((live == live[:1]).all()) else live
        live = live[:, :, :1] if bool((live == live[:, :, :1]).all()) else live
        return self.with_cache(replace(self.cache, ledger=replace(self.cache.ledger, live=live)))

    def row(self, row: int) -> "Scene":
        """The scene of one row."""
        index = torch.tensor([row], device=self.cache.ledger.tokens.device)
        attention = self.attention and Attention(self.attention.total[:, index], self.attention.recent[:, index])
        samples = (row,) if self.samples is None else self.samples[row : row + 1]
        return Scene(self.cache.rows([row]), attention, samples)

    def with_cache(self, cache: KVCache) -> "Scene":
        """The scene with an edited cache of the same slots.

        Raises:
            UserError: it has another number of slots, so that the record of attention does not fit.
        """
        if self.attention is not None and cache.slots != self.cache.slots:
            raise UserError(
                f"The cache went from {self.cache.slots} to {cache.slots} slots by hand, which the record of "
                "attention does not follow; mask slots instead, or evict them by a policy."
            )
        return replace(self, cache=cache)

    def take(self, slots: Int[Tensor, "batch kept"], padding: Bool[Tensor, "batch kept"]) -> "Scene":
        """The scene of these slots, row by row and in this order."""
        attention = self.attention and self.attention.take(slots, padding)
        return replace(self, cache=self.cache.take(slots, padding), attention=attention)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A rule for holding less cache.

    Attributes:
        mode: position mode of the slots that stay.
        provenance: whether they are retained, or computed again from their tokens alone.
        every: generated tokens between two acts; None to act after the prompt only.
    """

    mode: PositionMode = "gapped"
    provenance: Provenance = "retained"
    every: AtLeastOne | None = 1

    in_slots: ClassVar[str] = ""
    """The setting that is a number of slots, or a share of the prompt's."""

    def __post_init__(self) -> None:
        check_fields(self)
        if name := self.in_slots:
            object.__setattr__(self, name, as_budget(type(self).__name__, name, getattr(self, name)))
        repeated = [part for part in self.parts if part.every is not None]
        drawing = [part for part in repeated if part.draws_by_position]
        closing = [part for part in repeated if part.mode != "gapped"]
        if drawing and closing:
            raise UserError(
                f"{drawing[0]} would draw old numbers again for new slots, since positions are closed up between its "
                "acts; give every=None, so that it acts after the prompt only, or mode='gapped' for all policies."
            )

    @property
    def draws_by_position(self) -> bool:
        """Whether random numbers are drawn for the positions of slots, which must then differ."""
        return False

    @property
    def observes(self) -> int | None:
        """Number of last queries whose attention the policy needs one by one, beside the totals; None if it needs no
        attention at all."""
        return None

    @property
    def observes_again(self) -> int | None:
        """The same once it has acted on the prompt; None where only policies that act once need attention."""
        again = any(part.every is not None and part.observes is not None for part in self.parts)
        return self.observes if again else None

    @property
    def parts(self) -> tuple["Policy", ...]:
        """The policies that act in turn."""
        return (self,)

    @property
    def slot_count(self) -> Evicts | Rounds:
        """What the policy does to the number of slots, by its settings alone.

        Raises:
            UserError: that depends on the text, or the policy saves no memory.
        """
        raise UserError(
            f"{type(self).__name__} has no budget in slots: how many it drops depends on the text; give the length of "
            "the shorter text as the context."
        )

    def at(self, prompt: int) -> "Policy":
        """The policy for a prompt of so many slots: a share of it becomes a number."""
        share = getattr(self, self.in_slots, None)
        return replace(self, **{self.in_slots: share.of(prompt)}) if isinstance(share, PromptShare) else self

    @property
    def slots(self) -> int:
        """The budget or window as a number of slots.

        Raises:
            UserError: it is a share of a prompt, see `at`.
        """
        value = getattr(self, self.in_slots)
        if isinstance(value, PromptShare):
            raise UserError(f"{self} has a share of the prompt as its {self.in_slots}; `at` makes a number of it.")
        return value

    @abstractmethod
    def keep(self, scene: Scene) -> Live:
        """The slots that stay, of those that are live. Budgets are numbers here, see `at`."""

    def act(self, scene: Scene) -> Scene:
        """The scene after the policy has acted. Slots that no layer or head keeps leave memory; the others follow the
        position mode. Computing slots again needs a model: see `kvprobe.inference.under_policy.apply`.

        Raises:
            UserError: the policy needs attention that was not recorded, or leaves a layer or head without a slot.
        """
        if self.observes is not None:
            self._refuse_unwatched(scene.attention, self.observes)
        scene = scene.sized
        live = scene.live & (self._kept(scene) | scene.complete[:, None, None])
        self._refuse_empty(live, scene)
        return settle(scene, live, self.mode)

    def _kept(self, scene: Scene) -> Live:
        """What each row's policy keeps: shares are of the row's own prompt, whatever rows are beside it."""
        by_row = [self.at(prompt) for prompt in scene.sized.prompts or ()]
        if all(policy == by_row[0] for policy in by_row):
            return by_row[0].keep(scene)
        return torch.cat([policy.keep(scene.row(row)) for row, policy in enumerate(by_row)], 1)

    def __str__(self) -> str:
        return short_repr(self)

    def __or__(self, other: "Policy") -> "Chain":
        return Chain(self.parts + other.parts)

    def _refuse_unwatched(self, attention: Attention | None, queries: int) -> None:
        if attention is None:
            raise UserError(
                f"{type(self).__name__} needs attention scores, but this cache was read without them; "
                f"read it with Model.watch, or give the policy to Model.prefill or Model.generate."
            )
        watched = attention.recent.shape[3]
        if watched < queries:
            raise UserError(
                f"{type(self).__name__} needs the attention of the last {queries} queries, but this cache was watched "
                f"with queries={watched}; ask Model.watch for as many as the policy needs."
            )

    def _refuse_empty(self, live: Live, before: Scene) -> None:
        empty = ~live.any(3) & before.live.any(3)
        if bool(empty.any()):
            layer, row, head = map(int, empty.nonzero()[0])
            raise UserError(
                f"{self} would leave layer {before.attending[layer]}, KV head {head} of row {row} without a single "
                "slot; keep more."
            )


@dataclass(frozen=True)
class Chain(Policy):
    """Policies that act one after the other, each at its own pace: `SinkWindow(4, 256) | Quantise(4)`."""

    members: tuple[Policy, ...]

    @property
    def observes(self) -> int | None:
        return max((member.observes for member in self.members if member.observes is not None), default=None)

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.members

    def at(self, prompt: int) -> "Chain":
        return Chain(tuple(member.at(prompt) for member in self.members))

    def keep(self, scene: Scene) -> Live:
        raise TypeError("A chain keeps no slots itself; its parts do.")

    def act(self, scene: Scene) -> Scene:
        scene = scene.sized
        for member in self.members:
            scene = member.act(scene)
        return scene

    def __str__(self) -> str:
        return " | ".join(map(str, self.members))


def settle(scene: Scene, live: Live, mode: PositionMode) -> Scene:
    """The scene with this liveness: slots that no layer or head keeps leave memory, the others follow the mode."""
    scene = scene.keeping(live)
    ledger = scene.cache.ledger
    if not bool(ledger.live_somewhere.all()):
        scene = scene.take(*ledger.order(ledger.live_somewhere))
    return scene.with_cache(scene.cache.reindex(mode)) if mode != "gapped" else scene


def acting(policy: Policy, step: int) -> Iterator[Policy]:
    """The parts of a policy that act after `step` generated tokens."""
    for part in policy.parts:
        if step == 0 or (part.every is not None and step % part.every == 0):
            yield part
