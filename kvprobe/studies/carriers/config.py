"""Settings of the carriers study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require

AVAILABLE_CONTEXTS = 48


@dataclass(frozen=True)
class Config:
    """Settings of the carriers study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        contexts: different conversations; each is asked two questions, and is read with two codes.
        bands: bands that the layers are cut into.
        seed: of codes.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    contexts: int = 12
    bands: int = 6
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require("contexts", self.contexts, 2, AVAILABLE_CONTEXTS)
        require("bands", self.bands, 1, 64)
        require("seed", self.seed, 0)
