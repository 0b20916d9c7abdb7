"""Settings of the idle-rebuild study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require

AVAILABLE_SESSIONS = 16


@dataclass(frozen=True)
class Config:
    """Settings of the idle-rebuild study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        sessions: different scripted sessions; intervals are over them.
        continuation: tokens of a run's own reply that the other runs are held against.
        seed: of random draws; this study makes none.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    sessions: int = AVAILABLE_SESSIONS
    continuation: int = 32
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require("sessions", self.sessions, 2, AVAILABLE_SESSIONS)
        require("continuation", self.continuation, 1, 512)
        require("seed", self.seed, 0)
