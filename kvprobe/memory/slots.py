"""How many tokens of a conversation each layer still holds under a policy, told without a model.

A policy's budget says how many slots stay, whatever it is that stays: counts follow from the policy's own settings. A
policy that drops what a text calls by name (`MaskSpans`, `PruneToolResults`) has no budget without the text.
"""

from dataclasses import dataclass
from math import gcd, lcm

MOST_STEPS = 4096
"""Of a chain whose policies act at different paces, how many steps are looked at for the one that holds most."""

SCALE_BYTES = 4
"""Of a quantisation group: a scale and a minimum in float16."""


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
        """Slots that are rounded after so many generated tokens."""
        since = new if self.every is None else new % self.every
        return max(0, prompt + new - since - self.tail) // self.group * self.group

    def fuller_contexts(self, context: int, new: int) -> list[int]:
        """The last shorter context at which more may be held: one token before a group was full."""
        since = new if self.every is None else new % self.every
        acted_on = context - since
        return [context - (acted_on - self.tail + 1) % self.group]

    def fuller_steps(self, prompt: int, new: int) -> list[int]:
        """Earlier steps at which more may be held: right before an act that rounds."""
        if self.every is None:
            return []
        if self.every == 1:
            return [new - (prompt + new - self.tail + 1) % self.group]
        last = (new + 1) // self.every
        return [
            act * self.every - 1 for act in range(last, max(0, last - self.group // gcd(self.group, self.every)), -1)
        ]

    def slot_bytes(self, d_key: int, d_value: int) -> int:
        """Of one rounded slot of one head, less what its group of keys shares."""
        groups = d_value // min(self.group, d_value)
        return code_bytes(d_key, self.bits) + code_bytes(d_value, self.bits) + groups * SCALE_BYTES

    def group_bytes(self, d_key: int) -> int:
        """Of the scales that one group of keys shares in one head: a pair for each channel."""
        return d_key * SCALE_BYTES


@dataclass(frozen=True)
class Evicts:
    """Keeps at most `budget` slots a head, acting every so many generated tokens; None for once, after the prompt.

    Attributes:
        beta: of budgets that fall from the first layer to the last (PyramidKV); None where all layers keep as many.
        protected: how many of the budget's slots are not shared out between layers: a window, or sinks.
        even: whether all heads of a layer keep as many; else they do on average, up to rounding (Ada-KV).
    """

    budget: int
    every: int | None = 1
    beta: int | None = None
    protected: int = 0
    even: bool = True

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after so many generated tokens."""
        since = new if self.every is None else new % self.every
        acted_on = prompt + new - since
        budget = self.budget if self.beta is None else self.layer_counts(layers, acted_on)[layer]
        return min(acted_on, budget) + since

    def layer_counts(self, layers: int, length: int) -> list[int]:
        """Slots for each layer of what has `length` slots."""
        assert self.beta is not None
        return layer_counts(layers, self.budget, self.protected, self.beta, length, self.every is None)

    def fuller_lengths(self, acted_on: int, least: int, layers: int, pace: int = 1) -> list[int]:
        """Of shorter lengths to act on, `pace` apart, the one that leaves most in all layers together, if that is more than
        `acted_on` leaves: steps between layers are rounded, so what the layers add up to does not always grow."""

        def held(length: int) -> int:
            return sum(min(length, count) for count in self.layer_counts(layers, length))

        if self.beta is None:
            return []
        chosen = self.budget - self.protected
        # Longer ones leave the same, and what is lost by rounding repeats after as many lengths as there are layers.
        longest = self.protected + 2 * chosen - chosen // self.beta
        skipped = max(0, -((longest - acted_on) // pace))
        lengths = range(acted_on - skipped * pace, least - 1, -pace)[:layers]
        fullest = max(lengths, key=held, default=acted_on)
        return [fullest] if held(fullest) > held(acted_on) else []


def layer_counts(layers: int, budget: int, protected: int, beta: int, length: int, once: bool) -> list[int]:
    """PyramidKV's slots for each layer of what has `length` slots; see `kvprobe.policies.LayerBudgets`."""
    chosen = budget - protected
    if layers == 1 or length < budget or (once and length < 2 * chosen):
        return [budget] * layers
    first = min(2 * chosen - chosen // beta, length - protected)
    step = (2 * first - 2 * chosen) // (layers - 1)
    return [max(1, protected + first - step * layer) for layer in range(layers)]


@dataclass(frozen=True)
class Plan:
    """What a policy does to the number of slots.

    Attributes:
        name: as one would write it.
        evicts: each eviction; the tightest binds.
        rounds: the rounding, if there is one.
    """

    name: str = "none"
    evicts: tuple[Evicts, ...] = ()
    rounds: Rounds | None = None

    def fuller_contexts(self, context: int, new: int, layers: int) -> list[int]:
        """Shorter contexts, with as many generated tokens, at which more may be held than at this one."""
        found = [] if self.rounds is None else self.rounds.fuller_contexts(context, new)
        for each in self.evicts:
            since = new if each.every is None else new % each.every
            found += [length + since for length in each.fuller_lengths(context - since, 1, layers)]
        return [each for each in found if new < each < context]

    def fuller_steps(self, prompt: int, new: int, layers: int) -> list[int]:
        """Smaller numbers of generated tokens at which more may be held than at this one."""
        found = [] if self.rounds is None else self.rounds.fuller_steps(prompt, new)
        for each in self.evicts:
            if each.every is not None:
                acted_on = prompt + new - new % each.every
                fuller = each.fuller_lengths(acted_on, prompt, layers, each.every)
                found += [length - prompt + each.every - 1 for length in fuller]
        paces = sorted({each.every for each in self.evicts if each.every is not None})
        # Most is held right before an act, and what acts leave repeats when all paces have.
        back = new - (min(lcm(*paces), MOST_STEPS) if len(paces) > 1 else max(paces, default=0))
        for pace in paces:
            found += range((new + 1) // pace * pace - 1, max(0, back) - 1, -pace)
        return sorted({each for each in found if 0 <= each < new})

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after so many generated tokens."""
        return min((each.kept(prompt, new, layer, layers) for each in self.evicts), default=prompt + new)
