"""How many slots a policy leaves in each layer and what a rounded slot costs, computed from settings alone.

The policies themselves give these counts (`Policy.slot_count`). A policy that drops named segments of a text
(`MaskSpans`, `PruneToolResults`) has none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd, lcm

from kvprobe.errors import UserError

MOST_STEPS = 4096
"""Steps that are searched for the fullest one, in a chain whose policies act at different paces."""

SCALE_BYTES = 4
"""Bytes of a quantisation group's scale and minimum, in float16."""


def code_bytes(numbers: int, bits: int) -> int:
    """Whole bytes that the codes of these numbers take."""
    return -(-numbers * bits // 8)


@dataclass(frozen=True)
class Rounds:
    """Rounds all but the last `tail` slots, in whole groups of `group`, to `bits` a number (`Quantise`)."""

    bits: int
    group: int = 32
    tail: int = 128
    every: int | None = 1

    def coarse(self, prompt: int, new: int) -> int:
        """Rounded slots after `new` generated tokens."""
        since = new if self.every is None else new % self.every
        return max(0, prompt + new - since - self.tail) // self.group * self.group

    def fuller_contexts(self, context: int, new: int) -> list[int]:
        """The last shorter context at which more bytes may be held: one token before a group was full."""
        since = new if self.every is None else new % self.every
        acted_on = context - since
        return [context - (acted_on - self.tail + 1) % self.group]

    def fuller_steps(self, prompt: int, new: int) -> list[int]:
        """Earlier steps at which more bytes may be held: right before an act that rounds."""
        if self.every is None:
            return []
        if self.every == 1:
            return [new - (prompt + new - self.tail + 1) % self.group]
        last = (new + 1) // self.every
        return [
            act * self.every - 1 for act in range(last, max(0, last - self.group // gcd(self.group, self.every)), -1)
        ]

    def slot_bytes(self, d_key: int, d_value: int) -> int:
        """Bytes of one rounded slot of one head, without what its group of keys shares."""
        groups = d_value // min(self.group, d_value)
        return code_bytes(d_key, self.bits) + code_bytes(d_value, self.bits) + groups * SCALE_BYTES

    def group_bytes(self, d_key: int) -> int:
        """Bytes that a group of keys shares in one head: a scale and a minimum for each channel."""
        return d_key * SCALE_BYTES


@dataclass(frozen=True)
class Evicts:
    """Keeps at most `budget` slots per head, after every `every` generated tokens, or only after the prompt (None).

    Attributes:
        beta: slope of budgets that fall from the first layer to the last (PyramidKV); None where all layers keep
            equally many.
        protected: slots of the budget that are not shared out between layers: a window, or sinks.
        even: whether all heads of a layer keep equally many; else they do on average, up to rounding (Ada-KV).
    """

    budget: int
    every: int | None = 1
    beta: int | None = None
    protected: int = 0
    even: bool = True

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after `new` generated tokens."""
        since = new if self.every is None else new % self.every
        acted_on = prompt + new - since
        budget = self.budget if self.beta is None else self.layer_counts(layers, acted_on)[layer]
        return min(acted_on, budget) + since

    def layer_counts(self, layers: int, length: int) -> list[int]:
        """PyramidKV's slots for each layer of what has `length` slots; see `kvprobe.policies.LayerBudgets`."""
        assert self.beta is not None
        chosen = self.budget - self.protected
        if layers == 1 or length < self.budget or (self.every is None and length < 2 * chosen):
            return [self.budget] * layers
        first = min(2 * chosen - chosen // self.beta, length - self.protected)
        step = (2 * first - 2 * chosen) // (layers - 1)
        return [max(1, self.protected + first - step * layer) for layer in range(layers)]

    def fuller_lengths(self, acted_on: int, least: int, layers: int, pace: int = 1) -> list[int]:
        """The shorter length, `pace` apart, that leaves most in all layers together, if it leaves more than `acted_on`.

        There may be one, because steps between layers are rounded, so the total does not always grow with the length.
        """

        def held(length: int) -> int:
            return sum(min(length, count) for count in self.layer_counts(layers, length))

        if self.beta is None:
            return []
        chosen = self.budget - self.protected
        # Longer lengths leave the same, and the loss by rounding repeats after as many lengths as there are layers.
        longest = self.protected + 2 * chosen - chosen // self.beta
        skipped = max(0, -((longest - acted_on) // pace))
        lengths = range(acted_on - skipped * pace, least - 1, -pace)[:layers]
        fullest = max(lengths, key=held, default=acted_on)
        return [fullest] if held(fullest) > held(acted_on) else []


@dataclass(frozen=True)
class SlotPlan:
    """What a policy does to the number of slots.

    Attributes:
        name: the policy as text.
        evicts: its evictions; the tightest binds.
        rounds: its rounding, if any.
        sized: where budgets are shares of a prompt, the plan for one of so many tokens.
    """

    name: str = "none"
    evicts: tuple[Evicts, ...] = ()
    rounds: Rounds | None = None
    sized: "Callable[[int], SlotPlan] | None" = field(default=None, compare=False)

    def at(self, prompt: int) -> "SlotPlan":
        """The plan for a prompt of so many tokens."""
        return self if self.sized is None else self.sized(prompt)

    def fuller_contexts(self, context: int, new: int, layers: int) -> list[int]:
        """Shorter contexts, with as many generated tokens, at which more bytes may be held.

        Raises:
            UserError: budgets are shares and fall from layer to layer, so that any shorter one may be.
        """
        if self.sized is not None and any(eviction.beta is not None for eviction in self.evicts):
            raise UserError(
                f"The longest conversation that fits is not known under {self.name}, whose steps between layers are "
                "rounded for each length; give its budget in slots, or no memory."
            )
        contexts = [] if self.rounds is None else self.rounds.fuller_contexts(context, new)
        for eviction in self.evicts:
            since = new if eviction.every is None else new % eviction.every
            contexts += [length + since for length in eviction.fuller_lengths(context - since, 1, layers)]
        return [fuller for fuller in contexts if new < fuller < context]

    def fuller_steps(self, prompt: int, new: int, layers: int) -> list[int]:
        """Smaller numbers of generated tokens at which more bytes may be held."""
        steps = [] if self.rounds is None else self.rounds.fuller_steps(prompt, new)
        for eviction in self.evicts:
            if eviction.every is not None:
                acted_on = prompt + new - new % eviction.every
                fuller = eviction.fuller_lengths(acted_on, prompt, layers, eviction.every)
                steps += [length - prompt + eviction.every - 1 for length in fuller]
        paces = sorted({eviction.every for eviction in self.evicts if eviction.every is not None})
        # Most is held right before an act, and the pattern of acts repeats after a common multiple of all paces.
        back = new - (min(lcm(*paces), MOST_STEPS) if len(paces) > 1 else max(paces, default=0))
        for pace in paces:
            steps += range((new + 1) // pace * pace - 1, max(0, back) - 1, -pace)
        return sorted({step for step in steps if 0 <= step < new})

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after `new` generated tokens."""
        return min((eviction.kept(prompt, new, layer, layers) for eviction in self.evicts), default=prompt + new)
