"""How many tokens of a conversation each layer still holds under a policy, told without a model.

A policy's budget says how many slots stay, whatever it is that stays: counts follow from the policy's own settings. A
policy that drops what a text calls by name (`MaskSpans`, `PruneToolResults`) has no budget without the text.
"""

from dataclasses import dataclass
from itertools import pairwise
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
        slope: of budgets that fall from the first layer to the last at the same mean (PyramidKV).
        even: whether all heads of a layer keep as many; else they do on average (Ada-KV).
    """

    budget: int
    every: int | None = 1
    slope: float = 0.0
    even: bool = True

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after so many generated tokens."""
        since = new if self.every is None else new % self.every
        acted_on = prompt + new - since
        budget = layer_counts(layers, self.budget, acted_on, self.slope)[layer] if self.slope else self.budget
        if budget < 1:
            raise ValueError(
                f"A budget of {self.budget} with slope={self.slope} leaves layer {layer} without a slot; raise it."
            )
        return min(acted_on, budget) + since


def layer_counts(layers: int, budget: int, most: int, slope: float) -> list[int]:
    """Slots for each layer, falling linearly from (1 + slope) to (1 − slope) times the budget; they add up to `layers` times
    the budget. Where there are only `most` slots, the slope is less."""
    slope = max(0.0, min(slope, most / budget - 1))
    step = 2 * slope / (layers - 1) if layers > 1 else 0.0
    ends = [0]
    total = 0.0
    for layer in range(layers):
        total += (1 + slope - step * layer) * budget if layers > 1 else budget
        ends.append(round(total))
    return [end - start for start, end in pairwise(ends)]


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

    def fuller_contexts(self, context: int, new: int) -> list[int]:
        """Shorter contexts, with as many generated tokens, at which more may be held than at this one."""
        found = [] if self.rounds is None else self.rounds.fuller_contexts(context, new)
        return [each for each in found if new < each < context]

    def fuller_steps(self, prompt: int, new: int) -> list[int]:
        """Smaller numbers of generated tokens at which more may be held than at this one."""
        found = [] if self.rounds is None else self.rounds.fuller_steps(prompt, new)
        paces = sorted({each.every for each in self.evicts if each.every is not None})
        # Most is held right before an act, and what acts leave repeats when all paces have.
        back = new - (min(lcm(*paces), MOST_STEPS) if len(paces) > 1 else max(paces, default=0))
        for pace in paces:
            found += range((new + 1) // pace * pace - 1, max(0, back) - 1, -pace)
        return sorted({each for each in found if 0 <= each < new})

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after so many generated tokens."""
        return min((each.kept(prompt, new, layer, layers) for each in self.evicts), default=prompt + new)
