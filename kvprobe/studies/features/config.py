"""Settings of the features study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.trial_settings import chosen, listed

AVAILABLE_CONTEXTS = 48
KINDS = ("topk", "jumprelu")


@dataclass(frozen=True)
class Config:
    """Settings of the features study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        dictionaries: what to study: dictionaries by name or folder, commas between; or `train`, to train them first.
        places: where to train them, each a family and a layer: resid_post.7, v.7, k_pre.7 …; commas between.
        kind: of the dictionaries that are trained: topk or jumprelu.
        width: latents of each.
        active: latents of a token.
        written: texts that the model writes to train on.
        length: tokens of each of those.
        tokens: to train each dictionary on, counted as often as they are seen.
        contexts: conversations that are studied; no dictionary that is trained here sees them.
        codes: different codes in each of them.
        folds: test folds; probes are trained on the others.
        seed: of texts, dictionaries, codes and folds.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    dictionaries: str = "train"
    places: str = "resid_post.7,v.7,k_pre.7"
    kind: str = "topk"
    width: int = 1024
    active: int = 32
    written: int = 384
    length: int = 160
    tokens: int = 500_000
    contexts: int = AVAILABLE_CONTEXTS
    codes: int = 8
    folds: int = 5
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        listed("dictionaries", self.dictionaries, str)
        listed("places", self.places, str)
        chosen("kind", self.kind, KINDS)
        require("width", self.width, 2)
        require("active", self.active, 1, self.width)
        require("written", self.written, 0)
        require("length", self.length, 8)
        require("tokens", self.tokens, 1024)
        require("contexts", self.contexts, 6, AVAILABLE_CONTEXTS)
        require("folds", self.folds, 3, min(20, self.contexts))
        require("codes", self.codes, 2, 1000)
        require("seed", self.seed, 0)
