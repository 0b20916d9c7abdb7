"""The leakage_scaling study: its declaration."""

from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.leakage_scaling import Config
from kvprobe.studies.leakage_scaling.collect import CODES, GRAMMAR, SHARED, UNTRAINED, collect
from kvprobe.studies.leakage_scaling.conclude import KNOWN_WORDING, STRICT, conclude
from kvprobe.studies.leakage_scaling.reading import RESTART, RETAINED
from kvprobe.wording import formatted, percent, points

READERS = {
    "pooled": Style("#0072b2"),
    "slot": Style("#56b4e9", "s"),
    "hidden": Style("#009e73", "D"),
    "attention": Style("#e69f00", "^"),
    "transformer": Style("#d55e00", "v"),
    "asked": Style("#000000", "P"),
    "neutral": Style("#7f7f7f", "X"),
    "soft": Style("#cc79a7", "*"),
}
HELD_OUT_LABELS: dict[Any, str] = {
    "nothing": "new codes alone",
    "wording": "new wording",
    "subject": "new subjects",
    "both": "new wording and subjects",
    CODES: "new codes in known contexts",
}
STATES: dict[Any, str] = {RETAINED: "retained", RESTART: "computed again (restart)"}
ARM_STYLES = {
    "turn": Style("#000000", "P"),
    "summary": Style("#0072b2"),
    "late": Style("#d55e00", "v"),
    "masked": Style("#009e73", "D"),
    "later": Style("#7f7f7f", "s"),
}
WORLDS = {GRAMMAR: Style("#0072b2"), UNTRAINED: Style("#7f7f7f", "s"), SHARED: Style("#d55e00", "^")}
LOOK: dict[str, Any] = {
    "x": "conversations",
    "x_label": "conversations that the reader knows",
    "line": "reader",
    "panel": "arm",
    "styles": READERS,
    "size": (2.5, 3.0),
}

BEYOND_RESTART: dict[str, Any] = {
    "down": "arm",
    "line": "arm",
    "styles": ARM_STYLES,
    "level": ("as computed again (restart)", "", {}),
}

STUDY = Study(
    name="leakage_scaling",
    title="Leak by amount of data",
    question=(
        "A turn states a random number of five digits and is hidden. How much of the number is left in the slots that "
        "stay, for whom, as a function of how many conversations the reader has learned from?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="by_conversations",
            finding="read",
            caption="Digits read, by the number of conversations that a reader learned from: where codes and subjects "
            "are new, and where the wording is new, too. Grey: what all readers together read of recomputed slots "
            "(restart); thin line: chance. Bars: 95 % intervals over what was held out and, where there are two, "
            "over training sets.",
            where={"world": GRAMMAR, "state": RETAINED, "held_out": (KNOWN_WORDING, STRICT)},
            row=lambda keys: HELD_OUT_LABELS[keys["held_out"]],
            band=("floor", "restart"),
            rules={0.1: "chance"},
            y_label="digits read (share)",
            **LOOK,
        ),
        Lines(
            file="for_ridge",
            finding="read",
            caption="Digits read by ridge probes on averages, by the number of conversations that they learned from, "
            "with new codes and subjects, and with new wording, too; below, from the same slots computed again without "
            "the number (restart). Thin line: chance. Bars: 95 % intervals.",
            where={"world": GRAMMAR, "reader": "pooled", "held_out": (KNOWN_WORDING, STRICT)},
            row=lambda keys: STATES[keys["state"]],
            rules={0.1: "chance"},
            limits=(0.0, 1.03),
            y_label="digits read (share)",
            **{**LOOK, "line": "arm", "panel": "held_out", "styles": ARM_STYLES, "size": (3.6, 2.4)},
        ),
        Lines(
            file="by_world",
            finding="read",
            caption="The same where the subject is new, beside a model of random weights, and beside Memento's split, "
            "whose contexts are shared by training and test.",
            where={"reader": "pooled", "held_out": (KNOWN_WORDING, CODES)},
            row=lambda keys: STATES[keys["state"]],
            rules={0.1: "chance"},
            limits=(0.0, 1.03),
            y_label="digits read (share)",
            **{**LOOK, "line": "world", "styles": WORLDS, "size": (2.5, 2.4)},
        ),
        Lines(
            file="bits_by_conversations",
            finding="bits",
            caption="The same in bits of each digit, of 3.32. A reader that misleads is below zero.",
            where={"world": GRAMMAR, "state": RETAINED, "held_out": STRICT},
            rules={0.0: ""},
            y_label="bits per digit",
            **LOOK,
        ),
        Lines(
            file="by_held_out",
            finding="read",
            caption="What is new to the reader: ridge on averages of retained slots. 95 % intervals.",
            where={"world": GRAMMAR, "state": RETAINED, "reader": "pooled"},
            rules={0.1: "chance"},
            y_label="digits read (share)",
            **{**LOOK, "line": "held_out", "styles": {}},
        ),
        Dots(
            "used",
            "What retaining the slots gives the model when it is asked for the number, and ridge probes on averages "
            "that learned from the most conversations, beyond the same slots computed again without it. Bars: "
            "intervals that hold together.",
            (
                Panel(label="the right code likelier (nats)", **BEYOND_RESTART, finding="used"),
                Panel(
                    label="digits read (share more)",
                    **BEYOND_RESTART,
                    finding="leak",
                    where={"reader": "pooled", "held_out": KNOWN_WORDING},
                ),
            ),
        ),
    ),
    claims=(
        Claim(
            "leak",
            above="hold some of the hidden number",
            below="are read worse than recomputed slots",
            unclear="hold nothing of the hidden number that this reader detects",
        ),
        Claim(
            "used",
            above="makes the right code likelier",
            below="makes the right code less likely",
            unclear="makes the right code neither detectably likelier nor less likely",
        ),
    ),
    labels={
        "n": "{} groups (subjects, or wordings where these are new)".format,
        "arm": {
            "turn": "the turn itself",
            "summary": "the retained summary",
            "masked": "a turn that never saw it",
            "late": "a turn that saw it, hidden later",
            "later": "two turns on",
        },
        "reader": {
            "pooled": "ridge, averages",
            "slot": "ridge, one slot",
            "hidden": "one hidden layer",
            "attention": "attention over slots and layers",
            "transformer": "transformer of two layers",
            "asked": "the model, asked",
            "neutral": "the model, slots in a neutral prompt",
            "soft": "the model, after a soft prompt",
        },
        "state": STATES,
        "held_out": HELD_OUT_LABELS,
        "world": {GRAMMAR: "conversations of the grammar", SHARED: "Memento's split", UNTRAINED: "random weights"},
        "digit": lambda digit: f"digit {digit}",
    },
    written={
        **dict.fromkeys(("read", "by_digit", "floor", "chance"), percent),
        "leak": points,
        **dict.fromkeys(("bits", "excess", "limit"), formatted(".3f")),
        "used": formatted("+.2f"),
        "said": formatted(".2f"),
    },
)
