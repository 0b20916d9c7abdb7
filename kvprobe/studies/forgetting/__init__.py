"""What does each way to forget a message leave of it, what does it cost, and what does it break?"""

from dataclasses import dataclass
from typing import Literal, get_args

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AVAILABLE_CONTEXTS

Kind = Literal["code", "name", "instruction", "steps"]
"""What must go: a code, a person's name, instructions, or worked steps with wrong values."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the forgetting study.

    Attributes:
        kinds: of what must go: code, name, instruction, steps.
        conversations: of each kind.
        secrets: that are tried in the place of the secret in each conversation.
        asked: of them, with which the model is asked.
        windows: slots that are read again after other text was put in the message's place.
        fitted: numbers of slots that are fitted in the message's place so that later queries read the same (attention
            matching).
        erased: numbers of slots that are trained in the message's place so that the model answers other questions as
            if it had never been (a trained eraser); none by default, as each takes half a minute of a processor.
        steps: of the training of an eraser.
        reply: tokens of the replies to other questions.
        seed: of random draws.
    """

    kinds: tuple[Kind, ...] = KINDS
    conversations: int = ranged(6, 2, AVAILABLE_CONTEXTS)
    secrets: int = ranged(64, 20, 256)
    asked: int = ranged(6, 3, 32)
    windows: tuple[int, ...] = ranged((8, 24), 1, 512)
    fitted: tuple[int, ...] = ()
    erased: tuple[int, ...] = ()
    steps: int = ranged(30, 1, 1000)
    reply: int = ranged(8, 1, 64)

    def validate(self) -> None:
        for name in ("fitted", "erased"):
            for slots in getattr(self, name):
                require(name, slots, 1, 64)


run = STUDIES["forgetting"].run
