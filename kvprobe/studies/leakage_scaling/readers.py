"""Readers of a hidden code: those of `kvprobe.probing.readers`, and the model itself."""

from typing import cast

from kvprobe.probing.readers import Evidence, Known, Rung
from kvprobe.probing.readers import read as read_by
from kvprobe.studies.leakage_scaling import Reader

CLASSES = 10
READ_FROM: dict[Reader, str] = {
    "pooled": "pooled",
    "hidden": "pooled",
    "slot": "slots",
    "attention": "slots",
    "transformer": "slots",
    "asked": "asked",
    "neutral": "neutral",
    "soft": "caches",
}
"""By reader, the features that it reads; whole caches are not kept."""


def read(reader: Reader, known: Known) -> Evidence:
    """What a reader makes of it."""
    return _answered(known) if reader in ("asked", "neutral") else read_by(cast(Rung, reader), known)


def _answered(known: Known) -> Evidence:
    """What the model itself says when asked, less what it says about all conversations that the reader knows."""
    said = known.features.float().transpose(0, 1)
    beyond = said - said[:, ~known.tested].mean(1, keepdim=True)
    return Evidence(beyond[:, known.inner], beyond[:, known.tested])
