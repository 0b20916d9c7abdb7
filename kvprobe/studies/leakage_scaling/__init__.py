"""How much of a hidden number is left in retained slots, for whom, as a function of what the reader knows?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES

Arm = Literal["turn", "summary", "masked", "late", "later"]
Reader = Literal["pooled", "slot", "attention", "hidden", "transformer", "asked", "neutral", "soft"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the leakage_scaling study.

    Attributes:
        conversations: that readers are trained on; of each number one curve has a point.
        tested: conversations of each kind of hold-out.
        arms: which slots are read.
        readers: who reads them; `soft`, a trained soft prompt, takes longer than all others together.
        prompted: conversations that a soft prompt is trained on, at most.
        slots: how many of a segment's last slots are read by readers of slots.
        layers: at how many layers these are read.
        shared: conversations that Memento's own split has, each with many codes; 0 leaves that split out.
        untrained: whether a model of random weights is read, too.
        batch: conversations that are read side by side.
        seed: of conversations, readers and random weights.
    """

    conversations: tuple[int, ...] = ranged((48, 150, 500, 1500, 5000, 10_000), 40, 50_000)
    tested: int = ranged(600, 16, 10_000)
    arms: tuple[Arm, ...] = ("turn", "summary", "masked", "late", "later")
    readers: tuple[Reader, ...] = ("pooled", "slot", "attention", "hidden", "transformer", "asked", "neutral")
    prompted: int = ranged(1500, 40, 50_000)
    slots: int = ranged(12, 1, 64)
    layers: int = ranged(6, 1, 200)
    shared: int = ranged(48, 0, 1000)
    untrained: bool = True
    batch: int = ranged(256, 1)

    def validate(self) -> None:
        if "pooled" not in self.readers:
            raise UserError("Setting 'readers' lacks 'pooled', which the others are held against; add it.")
        if "turn" not in self.arms or len(self.arms) < 2:
            raise UserError(
                f"Setting 'arms' is {', '.join(self.arms)}; expected 'turn', where the number is in full view, and "
                "another."
            )
        if "soft" in self.readers and self.prompted < min(self.conversations):
            raise UserError(
                f"Setting 'prompted' is {self.prompted}; expected at least the fewest conversations, "
                f"{min(self.conversations)}, since the soft prompt has no point of a curve otherwise."
            )


run = STUDIES["leakage_scaling"].run
