"""Which sparse features differ after a turn was masked, which tell what it said, and do they matter?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AVAILABLE_CONTEXTS

TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the features study.

    Attributes:
        dictionaries: what to study: dictionaries by name or folder; or `train`, to train them first.
        places: where to train them, each a family and a layer: resid_post.7, v.7, k_pre.7 …
        kind: of the dictionaries that are trained.
        width: latents of each.
        active: latents of a token.
        written: texts that the model writes to train on.
        length: tokens of each of those.
        tokens: to train each dictionary on, counted as often as they are seen.
        contexts: conversations that are studied; no dictionary that is trained here sees them.
        codes: different codes in each of them.
        folds: test folds; probes are trained on the others.
        seed: of texts, dictionaries, codes and folds.
    """

    dictionaries: tuple[str, ...] = (TRAIN,)
    places: tuple[str, ...] = ("resid_post.7", "v.7", "k_pre.7")
    kind: Literal["topk", "jumprelu"] = "topk"
    width: int = ranged(1024, 2)
    active: int = 32
    written: int = ranged(384, 0)
    length: int = ranged(160, 8)
    tokens: int = ranged(500_000, 1024)
    contexts: int = ranged(AVAILABLE_CONTEXTS, 6, AVAILABLE_CONTEXTS)
    codes: int = ranged(8, 2, 1000)
    folds: int = 5

    def validate(self) -> None:
        require("active", self.active, 1, self.width)
        require("folds", self.folds, 3, min(20, self.contexts))

    @property
    def trains(self) -> bool:
        """Whether the dictionaries are trained by this run."""
        return self.dictionaries == (TRAIN,)


run = STUDIES["features"].run
