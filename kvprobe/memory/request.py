"""What is asked of a budget: how many conversations, how long, in which numbers, under which policy."""

from dataclasses import dataclass, field, replace

from kvprobe.cache.slots import SlotPlan
from kvprobe.memory.numbers import FORMATS, Numbers


@dataclass(frozen=True)
class Request:
    """Conversations of one length that a model holds at once.

    Attributes:
        prompt: tokens of each that are read in one pass.
        new: tokens of each that were generated after it, one by one.
        batch: conversations.
        source: tokens of the other input that cross-attention looks at.
        dtype: of weights, activations and, unless `numbers` says otherwise, of the cache.
        numbers: what the cache is stored in.
        plan: what a policy does to the number of slots.
    """

    prompt: int
    new: int = 0
    batch: int = 1
    source: int = 0
    dtype: Numbers = FORMATS["bfloat16"]
    numbers: Numbers = FORMATS["bfloat16"]
    plan: SlotPlan = field(default_factory=SlotPlan)

    @property
    def context(self) -> int:
        """Tokens that each conversation has in the end."""
        return self.prompt + self.new

    @property
    def after_prompt(self) -> "Request":
        """The same when the prompt has been read and no policy has acted yet."""
        return replace(self, new=0, plan=SlotPlan())
