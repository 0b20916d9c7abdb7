"""The poisoning study: its declaration."""

from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.collect import BANDS, collect, inputs
from kvprobe.studies.poisoning.conclude import conclude
from kvprobe.wording import percent, plain, points

NEGLIGIBLE = 0.01
"""Of the damage: a share that is of no account."""
STYLES = {
    "sound": Style("#0072b2"),
    "slip": Style("#d55e00", "s"),
    "harmless": Style("#009e73", "D"),
}


def lost(value: Estimate) -> str:
    """Points that are lost, so that a plus would confuse."""
    return points(value).replace("+", "")


def helps(finding: str) -> Claim:
    return Claim(finding, above="helps", below="harms", unclear="does not detectably help")


def over(file: str, finding: str, x: str, x_label: str, y_label: str, caption: str, **more: Any) -> Lines:
    """A line for each draft, with intervals over problems."""
    caption = f"{caption} 95 % intervals over problems."
    return Lines(file=file, finding=finding, x=x, x_label=x_label, y_label=y_label, caption=caption, styles=STYLES,
                 **more)  # fmt: skip


STUDY = Study(
    name="poisoning",
    title="How an early mistake lives on",
    question=(
        "A step early in an answer states a wrong value. Is it handed on, does the model notice, which part of the "
        "cache carries it, and what takes it back: a review, “wait”, a fresh start, or steps worked one by one?"
    ),
    config=Config,
    collect=collect,
    inputs=inputs,
    conclude=conclude,
    figures=(
        over(
            "right_by_arm",
            "right",
            "arm",
            "",
            "right last values",
            "Answers whose last value is right, by what is done about the draft.",
            line="draft",
            limits=(-0.03, 1.03),
            size=(7.2, 3.2),
        ),
        over(
            "undone_by_layer",
            "undone_layer",
            "layer",
            "layer of the step whose K and V are those of the sound run",
            "share of the damage undone",
            "The margin of the right value that comes back if the wrong step has the K and V of the right one.",
            rules={0.0: "", 1.0: ""},
            curves=True,
        ),
        over(
            "standing_by_delay",
            "standing",
            "delay",
            "steps after the third",
            "no “wait” so far",
            "The probability that no remark from the third step on was “wait”, where each before stands as “ok”.",
            line="draft",
            limits=(-0.03, 1.03),
            curves=True,
        ),
        over(
            "right_after_errors",
            "right_after",
            "wrong",
            "wrong steps of the five before",
            "right results",
            "The likeliest result of a step on a register of its own after others of which some are wrong.",
            limits=(-0.03, 1.03),
            curves=True,
        ),
        over(
            "attention_by_layer",
            "mass",
            "layer",
            "layer",
            "attention to the step",
            "What the token before the last value attends to of the step that may be wrong, mean over heads.",
            line="draft",
            curves=True,
        ),
    ),
    claims=(
        Claim(
            "poisons",
            above="lowers the share of right answers",
            below="raises the share of right answers",
            unclear="does not detectably change the share of right answers",
        ),
        Claim(
            "notices",
            above="says “wait” more often than after a right one",
            below="says “wait” less often than after a right one",
            unclear="does not detectably notice it",
        ),
        Claim(
            "critique",
            above="is right less often",
            below="is right more often",
            unclear="is not detectably less often right",
        ),
        Claim("blind", above="loses more", below="loses less", unclear="loses not detectably more"),
        *map(helps, ("restart", "handed", "alone", "wait")),
        Claim(
            "ghost",
            above="keep a part of it",
            below="work against it",
            unclear="keep nothing detectable of it",
            negligible=NEGLIGIBLE,
        ),
        Claim(
            "conditioned",
            above="makes errors likelier",
            below="makes errors less likely",
            unclear="does not detectably make errors likelier",
        ),
    ),
    labels={
        "n": "{} problems".format,
        "draft": {"slip": "after the slip", "sound": "after a sound draft", "harmless": "after the harmless change"},
        "arm": {
            "continue": "gone on with",
            "at once": "its own remark",
            "wait": "“wait”",
            "ordered": "own, asked to go on",
            "review": "own, reviewed",
            "other's": "another's, reviewed",
            "handed": "restart with the text",
            "erratum": "erratum",
            "fresh": "fresh start",
            "alone": "step by step",
        },
        "over": {"sound": "over the sound draft", "harmless": "over the harmless change"},
        "edit": {
            "sound": "sound draft",
            "slip": "slip",
            "masked slip": "slip, its step masked",
            "masked sound": "sound draft, that step masked",
            "restarted slip": "slip, its step left out, rest computed again",
            "restarted sound": "sound draft, that step left out, likewise",
            "slip's step": "sound draft, that step's K and V of the slip",
            "sound step": "slip, its step's K and V of the sound draft",
            "sound step, K": "… K alone",
            "sound step, V": "… V alone",
            **{f"sound step, {band} layers": f"… the {band} third of the layers alone" for band in BANDS},
            "sound later steps": "slip, later steps' K and V of the sound draft",
        },
    },
    written={
        **dict.fromkeys(("notices", "blind", "restart", "handed", "alone", "wait"), points),
        **dict.fromkeys(("poisons", "critique"), lost),
        **dict.fromkeys(("right", "handed_on", "restated", "local", "delayed", "ends"), percent),
        **dict.fromkeys(("left", "prefers_right", "undone", "undone_layer", "ghost"), percent),
        **dict.fromkeys(("mass", "wait_chance", "standing", "right_after"), percent),
        "lift": points,
        "half_life": lambda value: plain(value, 0),
        "log_probability": lambda value: plain(value, 3),
        "logits": lambda value: plain(value, 1),
        "nats": lambda value: plain(value, 3),
    },
)
