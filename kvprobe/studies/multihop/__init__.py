"""Multihop: how far a hidden turn reaches when every turn is summarised and masked in its turn."""

from dataclasses import dataclass
from typing import Literal

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings
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
    folds: int = 5
    batch: int = 32

    def validate(self) -> None:
        require("folds", self.folds, 3, AVAILABLE_SESSIONS)
        require("sessions", self.sessions, self.folds, AVAILABLE_SESSIONS)
        require("batch", self.batch, 1)
        require_samples(self.samples, self.sessions, "sessions", self.folds)
        if self.families == ("resid_post",):
            raise UserError(
                "Setting 'families' is resid_post alone; expected k_pre, k or v as well, whose light cone is checked."
            )


run = STUDIES["multihop"].run
