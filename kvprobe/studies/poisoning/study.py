"""The poisoning study: its declaration."""

from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.collect import BANDS, collect
from kvprobe.studies.poisoning.conclude import conclude
from kvprobe.wording import percent, plain, points

STYLES = {
    "sound": Style("#0072b2"),
    "slip": Style("#d55e00", "s"),
    "harmless": Style("#009e73", "D"),
}


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
    conclude=conclude,
    figures=(
        over(
            "right_by_arm",
            "right",
            "arm",
            "",
            "right last values",
            "Answers whose last value is right, by what is done about the first six steps.",
            line="draft",
            limits=(-0.03, 1.03),
            size=(8.4, 3.2),
        ),
        over(
            "undone_by_layer",
            "undone_layer",
            "layer",
            "layer of the step whose K and V are those of the sound run",
            "share of the damage undone",
            "The margin of the right value that comes back if the wrong step has the K and V of the right one.",
            rules=(0.0, 1.0),
            curves=True,
        ),
        over(
            "standing_by_delay",
            "standing",
            "delay",
            "steps after the slip",
            "no `wait` so far",
            "The probability that no verdict from the slip on was `wait`, where each before stands as `ok`.",
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
            "The result of a step on a register of its own after others of which some are wrong.",
            limits=(-0.03, 1.03),
            curves=True,
        ),
        over(
            "attention_by_layer",
            "mass",
            "layer",
            "layer",
            "attention to the third step",
            "What the token before the last value attends to of the third step, mean over heads.",
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
            above="says `wait` more often than after a right one",
            below="says `wait` less often than after a right one",
            unclear="does not detectably notice it",
        ),
        Claim(
            "critique",
            above="is right less often",
            below="is right more often",
            unclear="is not detectably less often right",
        ),
        Claim(
            "blind",
            above="is right more often",
            below="is right less often",
            unclear="is not detectably right more often",
        ),
        *map(helps, ("restart", "handed", "alone", "wait")),
        Claim(
            "ghost",
            above="keep a part of it",
            below="work against it",
            unclear="keep nothing detectable of it",
        ),
        Claim(
            "conditioned",
            above="makes errors likelier",
            below="makes errors less likely",
            unclear="does not detectably make errors likelier",
        ),
    ),
    labels={
        "draft": {"slip": "after the slip", "sound": "after a sound draft", "harmless": "after the harmless change"},
        "arm": {
            "continue": "gone on with",
            "wait": "“wait”",
            "review": "own, reviewed",
            "other's": "another's, reviewed",
            "handed": "restart with the text",
            "erratum": "erratum",
            "fresh": "fresh start",
            "alone": "step by step",
        },
        "over": {"sound": "over the sound draft", "harmless": "over the harmless change"},
        "edit": {
            "slip": "the slip, nothing edited",
            "sound": "the sound draft",
            "masked slip": "the slip, third step masked",
            "masked sound": "the sound draft, third step masked",
            "restarted slip": "the slip, third step left out and the rest computed again",
            "restarted sound": "the sound draft, likewise",
            "slip's step": "the sound draft with K and V of the wrong step",
            "sound step": "the slip with K and V of the right step",
            "sound step, K": "… K alone",
            "sound step, V": "… V alone",
            **{f"sound step, {band} layers": f"… the {band} third of the layers alone" for band in BANDS},
            "sound later steps": "the slip with K and V of the later steps after the sound draft",
        },
    },
    written={
        **dict.fromkeys(("poisons", "notices", "critique", "blind", "restart", "handed", "alone", "wait"), points),
        **dict.fromkeys(("right", "handed_on", "restated", "local", "delayed", "right_at_once"), percent),
        **dict.fromkeys(("restated_at_once", "prefers_right", "undone", "undone_layer", "ghost"), percent),
        **dict.fromkeys(("mass", "wait_chance", "standing", "right_after"), percent),
        "lift": points,
        "half_life": lambda value: plain(value, 0),
        "logits": lambda value: plain(value, 1),
        "nats": lambda value: plain(value, 3),
    },
)
