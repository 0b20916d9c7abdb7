"""The compaction study: its declaration."""

from collections.abc import Mapping
from pathlib import Path

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.findings import Finding
from kvprobe.report.plots import ARM_COLOURS
from kvprobe.studies.compaction.arms import ARMS, EFFECTS
from kvprobe.studies.compaction.collect import collect
from kvprobe.studies.compaction.conclude import OUTCOMES, conclude
from kvprobe.studies.compaction.config import Config
from kvprobe.studies.compaction.figures import Dangling, Dots
from kvprobe.studies.compaction.reading import CALIBRATION
from kvprobe.wording import percent, plain, points, signed

OF_ARM = {
    arm.name: {
        "fmt": "o" if arm.delimiters == "dropped" else "s",
        "color": (colour := ARM_COLOURS["masked" if arm.provenance == "retained" else "restart"]),
        "mfc": colour if arm.mode == "gapped" else "white",
    }
    for arm in ARMS
}


UNRELATED = tuple(f"unrelated turns, {what}" for what in ("full context", "masked", "restarted"))


def of_effect(finding: Finding) -> Mapping[str, str]:
    """Filled where zero is outside."""
    return {"fmt": "o", "color": "#0072b2", "mfc": "#0072b2" if finding.value.differs() else "white"}


STUDY = Study(
    name="compaction",
    title="Mask or restart",
    question=(
        "A conversation was summarised and its turns are dropped from the cache. Is it better to mask them and go on "
        "with what was computed while they were in view, or to restart and compute the retained slots again? And how "
        "much of the difference is provenance, how much position, how much the chat delimiters?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    folder=Path(__file__).parent,
    figures=(
        Dots(
            "arms",
            "Six outcomes under the eight arms, with intervals. Orange retained, green recomputed; filled gapped, open "
            "contiguous; dots without the delimiters, squares with them.",
            "outcome",
            "condition",
            tuple(OF_ARM),
            lambda finding: OF_ARM[str(finding.keys["condition"])],
            levels={
                "kl": ("unrelated turns, masked", "outcome", {"outcome": "kl", "condition": CALIBRATION[1]}),
                "margin": ("no knowledge of the code", "", {}),
                "paired": ("chance", "chance", {}),
                "right_summary": ("full context", "outcome", {"outcome": "right_summary", "condition": "full"}),
            },
        ),
        Dots(
            "effects",
            "Main effects and interactions on six outcomes, with intervals that hold together as in the table; filled "
            "where zero is outside.",
            "effect",
            "effect",
            EFFECTS,
            of_effect,
            levels={outcome: ("", "", {}) for outcome in OUTCOMES},
        ),
        Dangling(),
    ),
    claims=tuple(
        Claim(name, above="raises", below="lowers", unclear="not detected") for name in ("gap", "beyond", "effect")
    ),
    labels={
        "outcome": OUTCOMES,
        "condition": {"full": "full context"} | dict(zip(CALIBRATION, UNRELATED, strict=True)),
        "effect": {
            "provenance": "provenance: retained − recomputed",
            "positions": "positions: gapped − contiguous",
            "delimiters": "delimiters: kept − dropped",
        },
    },
    written={
        **dict.fromkeys(("spent", "moved"), percent),
        "went": points,
        "between": lambda kl: plain(kl, 3),
        "between_beyond": signed,
    },
)
