"""Where does a fine-tune write its behaviour into the cache, and is it the cache or the weights that read it?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.tasks.behaviours import BEHAVIOURS, Behaviour


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the finetuned study.

    Attributes:
        behaviours: of the fine-tunes.
        prompts: conversations for each, none of which it was trained on.
        layers: in a band that is patched at once.
        adapters: the folder of the adapters, as `kvprobe train adapter` writes them; by default those that ship.
        seed: of the conversations, and of the control whose changes are shuffled.
    """

    behaviours: tuple[Behaviour, ...] = BEHAVIOURS
    prompts: int = ranged(12, 2, 200)
    layers: int = ranged(3, 1, 100)
    adapters: str = ""


run = STUDIES["finetuned"].run
