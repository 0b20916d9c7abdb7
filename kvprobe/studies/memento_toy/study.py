"""The memento_toy study: its declaration."""

from collections.abc import Mapping

from kvprobe.experiments.study import Claim, Study
from kvprobe.inference.model import load
from kvprobe.report.plots import ARM_COLOURS
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.changing import DONOR, OTHER_DIGITS, OTHER_SUM, OWN
from kvprobe.studies.memento_toy.closing import BEYOND, EVERYTHING, OPEN, RANDOM, STAND_IN
from kvprobe.studies.memento_toy.collect import MAIN, UNTRAINED, collect
from kvprobe.studies.memento_toy.conclude import conclude
from kvprobe.studies.memento_toy.probes import LINEAR, MLP, RESTART, RETAINED
from kvprobe.wording import percent, plain, points, share, signed

ARMS = {RETAINED: Style(ARM_COLOURS["masked"]), RESTART: Style(ARM_COLOURS["restart"], "s")}


def lines(finding: str, x: str, x_label: str, caption: str, *, of_all: bool = False) -> Lines:
    """Digits read, by arm and probe, of the main model or of all."""
    return Lines(
        file=finding,
        finding=finding,
        x=x,
        x_label=x_label,
        caption=caption,
        line="arm",
        panel="probe",
        where={} if of_all else {"model": MAIN},
        styles=ARMS,
        y_label="digits read (share)",
        level=("visible_text", "all text in view"),
        curves=True,
        size=(3.2, 3.0),
    )


def inputs(config: Config) -> Mapping[str, str]:
    """Fingerprints of the other models, which may be folders that are trained on."""
    others = [*(config.seeds or ()), *(config.checkpoints or ())]
    return {name: load(name, device=config.device, dtype=config.dtype).fingerprint for name in others}


STUDY = Study(
    name="memento_toy",
    title="The toy of Memento",
    question=(
        "A small transformer reads blocks of five random digits. After each it writes a memento, and the block is "
        "hidden. Probes read hidden digits in the K and V of later mementos. How much of that is in the text anyway, "
        "does the model use the rest, and can it be closed?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    inputs=inputs,
    figures=(
        lines(
            "by_distance",
            "distance",
            "blocks after the digits' own",
            "Digits read in K and V of the last layer of later mementos, retained and computed again without hidden "
            "blocks. Dotted: the best that can be done from all text in view. Before 0, the digits have not been "
            "read; at 0, they are in view. Shaded: 95 % intervals over traces.",
        ),
        lines(
            "by_layer",
            "layer",
            "layer",
            "Digits read in the first memento that is written while they are hidden, by layer. Dotted: the best that "
            "can be done from all text in view. Shaded: 95 % intervals over traces.",
        ),
        lines(
            "by_training",
            "accuracy",
            "mementos that are right (share)",
            "Digits read in the last layer of the first memento that is written while they are hidden, over the "
            "training, as more mementos become right. Dotted: the best that can be done from all text in view. Shaded: "
            "95 % intervals over traces.",
            of_all=True,
        ),
    ),
    claims=(
        Claim(
            "leak",
            above="hold digits that the text does not",
            below="hold less than recomputed ones, which cannot be: doubt the run",
            unclear="hold nothing of the hidden digits that was detected",
        ),
        Claim(
            "beyond_text",
            above="more than any reader of the text in view could know",
            below="less than a perfect reader of the text in view would know",
            unclear="about what a perfect reader of the text in view would know",
        ),
        Claim(
            "kept",
            above="a restart costs right mementos",
            below="a restart gives more right mementos",
            unclear="no cost of a restart was detected",
        ),
        Claim(
            "used",
            above="makes more mementos right, which cannot be: doubt the run",
            below="makes fewer mementos right, so the digits themselves are used",
            unclear="changes the share of right mementos by nothing that was detected",
        ),
        Claim(
            "follows",
            above="the model goes by the hidden block more than by the text",
            below="the model goes by the text more than by the hidden block",
            unclear="the model goes by neither more than by the other",
            against=0.5,
        ),
        Claim(
            "left_over",
            above="probes still read some of it",
            below="probes read less than after a restart",
            unclear="probes read nothing more than after a restart that was detected",
        ),
        Claim(
            "harm",
            above="more mementos are right",
            below="fewer mementos are right",
            unclear="no harm was detected",
        ),
    ),
    labels={
        "arm": {RETAINED: "retained", RESTART: "computed again (floor)"},
        "model": {MAIN: "this model", UNTRAINED: "random weights"},
        "probe": {LINEAR: "linear probe", MLP: "probe with a hidden layer"},
        "layer": lambda layer: f"layer {layer}",
        "condition": {
            OWN: "as it was",
            OTHER_DIGITS: "other digits that fit the text",
            OTHER_SUM: "digits of another sum than the text states",
            DONOR: "the same, with the text that fits them",
        },
        "state": {
            OPEN: "nothing",
            STAND_IN: "all, by a stand-in of the same text",
            BEYOND: "linearly, what the digits say beyond their sum",
            EVERYTHING: "linearly, all that the digits say",
            RANDOM: "random subspaces of the same ranks",
            RESTART: "nothing; mementos computed again",
        },
    },
    written={
        **dict.fromkeys(
            ("by_layer", "by_distance", "by_part", "by_training", "right", "by_memento", "after", "left", "still"),
            percent,
        ),
        **dict.fromkeys(("leak", "beyond_text", "kept", "used", "left_over", "harm", "seeds_leak"), points),
        **dict.fromkeys(("way", "follows", "seeds"), percent),
        **dict.fromkeys(("margin", "lost"), signed),
        **dict.fromkeys(("text", "own_text", "visible_text"), share),
        "nats": plain,
    },
)
