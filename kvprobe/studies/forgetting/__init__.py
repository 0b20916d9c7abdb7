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
            matching); none by default, as it takes half a second of a processor for each secret.
        reply: tokens of the replies to other questions.
        seed: of random draws.
    """

    kinds: tuple[Kind, ...] = KINDS
    conversations: int = ranged(6, 2, AVAILABLE_CONTEXTS)
    secrets: int = ranged(64, 20, 256)
    asked: int = ranged(6, 3, 32)
    windows: tuple[int, ...] = ranged((8, 24), 1, 512)
    fitted: tuple[int, ...] = ()
    reply: int = ranged(8, 1, 64)

    def validate(self) -> None:
        for slots in self.fitted:
            require("fitted", slots, 1, 64)


run = STUDIES["forgetting"].run
