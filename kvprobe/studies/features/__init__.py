"""Features: what sparse features see of a turn that was masked."""

from dataclasses import dataclass
from typing import Literal

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies import STUDIES

AVAILABLE_CONTEXTS = 48
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
    width: int = 1024
    active: int = 32
    written: int = 384
    length: int = 160
    tokens: int = 500_000
    contexts: int = AVAILABLE_CONTEXTS
    codes: int = 8
    folds: int = 5

    def validate(self) -> None:
        require("width", self.width, 2)
        require("active", self.active, 1, self.width)
        require("written", self.written, 0)
        require("length", self.length, 8)
        require("tokens", self.tokens, 1024)
        require("contexts", self.contexts, 6, AVAILABLE_CONTEXTS)
        require("folds", self.folds, 3, min(20, self.contexts))
        require("codes", self.codes, 2, 1000)

    @property
    def trains(self) -> bool:
        """Whether the dictionaries are trained by this run."""
        return self.dictionaries == (TRAIN,)


run = STUDIES["features"].run
