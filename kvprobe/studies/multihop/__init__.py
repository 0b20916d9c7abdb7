"""Every turn is summarised and masked: how many turns later can the first still be read, and by which way?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import require_samples

AVAILABLE_SESSIONS = 30
Readable = Literal["k_pre", "k", "v", "resid_post"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the multihop study.

    Attributes:
        sessions: different sessions of eight turns.
        samples: sessions with a code in all; each session gets samples / sessions codes of its own.
        families: what probes read of a slot; k_pre is K before rotary embedding.
        folds: test folds; probes are trained on the others.
        batch: codes of a session that are read side by side.
        seed: of codes and folds.
    """

    sessions: int = AVAILABLE_SESSIONS
    samples: int = 360
    families: tuple[Readable, ...] = ("k", "v")
    folds: int = ranged(5, 3, AVAILABLE_SESSIONS)
    batch: int = ranged(32, 1)

    def validate(self) -> None:
        require("sessions", self.sessions, self.folds, AVAILABLE_SESSIONS)
        require_samples(self.samples, self.sessions, "sessions", self.folds)
        if self.families == ("resid_post",):
            raise UserError(
                "Setting 'families' is resid_post alone; expected k_pre, k or v as well, whose light cone is checked."
            )


run = STUDIES["multihop"].run
