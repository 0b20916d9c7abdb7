"""Settings of the multihop study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.trial_settings import chosen

AVAILABLE_SESSIONS = 30
READABLE = ("k_pre", "k", "v", "resid_post")


@dataclass(frozen=True)
class Config:
    """Settings of the multihop study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        sessions: different sessions of eight turns.
        samples: sessions with a code in all; each session gets samples / sessions codes of its own.
        families: what probes read of a slot: k_pre (K before rotary embedding), k, v, resid_post; commas between.
        folds: test folds; probes are trained on the others.
        batch: codes of a session that are read side by side.
        seed: of codes and folds.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    sessions: int = AVAILABLE_SESSIONS
    samples: int = 360
    families: str = "k,v"
    folds: int = 5
    batch: int = 32
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require("folds", self.folds, 3, AVAILABLE_SESSIONS)
        require("sessions", self.sessions, self.folds, AVAILABLE_SESSIONS)
        require("batch", self.batch, 1)
        require("seed", self.seed, 0)
        require("samples", self.samples, max(2 * self.sessions, 10 * self.folds), 40_000)
        if self.samples % self.sessions:
            below = self.samples - self.samples % self.sessions
            raise UserError(
                f"Setting 'samples' is {self.samples}, not a multiple of the {self.sessions} sessions; "
                f"expected {below} or {below + self.sessions}."
            )
        if not set(chosen("families", self.families, READABLE)) & {"k_pre", "k", "v"}:
            raise UserError(
                f"Setting 'families' is {self.families!r}; at least one of k_pre, k and v is needed, whose light cone is checked."
            )
