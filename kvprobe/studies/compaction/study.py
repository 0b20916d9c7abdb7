"""The compaction study: its declaration."""

from collections.abc import Mapping
from itertools import product

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots import ARM_COLOURS
from kvprobe.report.plots.dots import Dots, Level, Panel
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, EFFECTS, MODES
from kvprobe.studies.compaction.collect import collect
from kvprobe.studies.compaction.conclude import NATS, OUTCOMES, conclude
from kvprobe.studies.compaction.reading import CALIBRATION, LOOKED_AT
from kvprobe.wording import formatted, percent, points, signed

COLOURS = {"retained": ARM_COLOURS["masked"], "recomputed": ARM_COLOURS["restart"]}
MARKERS = dict(zip(product(MODES, ("dropped", "kept")), "osD^", strict=True))
OF_ARM = {arm.name: Style(COLOURS[arm.provenance], MARKERS[arm.mode, arm.delimiters]) for arm in ARMS}
OF_EFFECT = dict.fromkeys(EFFECTS, Style("#0072b2"))
PLACES = dict(zip(LOOKED_AT, map(Style, ("#7f7f7f", "#cc79a7", "#000000", "#e69f00", "#0072b2"), "osD^v"), strict=True))
UNRELATED = tuple(f"unrelated turns, {what}" for what in ("full context", "masked", "restarted"))
LEVELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "kl": ("unrelated turns, masked", "outcome", {"outcome": "kl", "condition": CALIBRATION[1]}),
    "agreement": ("unrelated turns, masked", "outcome", {"outcome": "agreement", "condition": CALIBRATION[1]}),
    "right_summary": ("full context", "outcome", {"outcome": "right_summary", "condition": "full"}),
    "margin": ("no knowledge of the code", "", {}),
    "paired": ("chance", "chance", {}),
    "prefix_hidden": ("unrelated turns, masked", "outcome", {"outcome": "prefix_hidden", "condition": CALIBRATION[1]}),
}
"""The outcomes that are drawn, and what each arm is to be compared with."""


APART = {outcome: Style("black") for outcome in OUTCOMES if outcome not in NATS}
"""Shares, whose differences have one scale."""
DIFFERENCES = {
    "gap": "retained less recomputed",
    "beyond": "the same beyond unrelated turns",
}


def dots(finding: str, key: str, styles: Mapping[str, Style], outcome: str, level: Level) -> Panel:
    """All arms, or all effects, on one outcome."""
    where, label = {"outcome": outcome}, OUTCOMES[outcome]
    scale = "" if outcome in NATS else f"{finding}: share"
    return Panel(finding=finding, down=key, line=key, styles=styles, label=label, where=where, level=level, scale=scale)


def paired(finding: str, label: str, styles: Mapping[str, Style]) -> Panel:
    """Differences within conversations, by outcome."""
    return Panel(
        finding=finding,
        down="outcome",
        line="outcome",
        styles=styles,
        label=label,
        level=("no difference", "", {}),
        scale="" if styles.keys() & NATS else "difference: share",
    )


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
    figures=(
        Dots(
            "arms",
            "Six outcomes under the eight arms, each with its own interval: orange retained, green recomputed; dots "
            "and squares gapped, diamonds and triangles contiguous. Below, what decides between them: differences "
            "within conversations, retained less recomputed (both gapped, delimiters dropped). Their intervals hold "
            "together as in the table.",
            (
                *(dots("outcome", "condition", OF_ARM, outcome, level) for outcome, level in LEVELS.items()),
                *(paired(name, f"{label} (share)", APART) for name, label in DIFFERENCES.items()),
                paired("gap", f"{DIFFERENCES['gap']} (nats)", dict.fromkeys(NATS, Style("black"))),
            ),
        ),
        Dots(
            "effects",
            "Main effects and interactions on six outcomes, with intervals that hold together as in the table.",
            tuple(dots("effect", "effect", OF_EFFECT, outcome, ("", "", {})) for outcome in LEVELS),
        ),
        Lines(
            file="dangling",
            finding="went_by_layer",
            caption="How much more attention T3 spends on each place when the hidden turns are masked, by layer; "
            "shaded: 95 % intervals over conversations.",
            x="layer",
            line="place",
            y_label="change in the share of attention",
            styles=PLACES,
            curves=True,
        ),
    ),
    claims=tuple(Claim(name, above="raises", below="lowers") for name in ("gap", "beyond", "effect")),
    labels={
        "n": "{} conversations".format,
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
        "between": formatted(".3f"),
        "between_beyond": signed,
    },
)
