"""The memento_toy study: its declaration."""

from collections.abc import Mapping
from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.inference.model import load
from kvprobe.report.plots import ARM_COLOURS
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.closing import BEYOND, EVERYTHING, OPEN, RANDOM, STAND_IN
from kvprobe.studies.memento_toy.collect import MAIN, UNTRAINED, collect
from kvprobe.studies.memento_toy.conclude import conclude
from kvprobe.studies.memento_toy.digits import RESTART, RETAINED
from kvprobe.studies.memento_toy.exchange import DONOR, OWN
from kvprobe.studies.memento_toy.probes import LINEAR, MLP
from kvprobe.tasks.mementos import BASE
from kvprobe.wording import formatted, percent, plain, points, share, signed

ARMS = {RETAINED: Style(ARM_COLOURS["masked"]), RESTART: Style(ARM_COLOURS["restart"], "s")}


LOOK: dict[str, Any] = {
    "line": "arm",
    "styles": ARMS,
    "y_label": f"digits read (share; chance {1 / BASE:g})",
    "level": ("visible_text", "all text in view"),
    "rules": {1 / BASE: "chance"},
    "curves": True,
    "size": (3.2, 3.0),
}


def inputs(config: Config) -> Mapping[str, str]:
    """Fingerprints of the other models, which may be folders that are trained on."""
    others = [*(config.seeds or ()), *(config.checkpoints or ())]
    return {name: load(name, **config.loading).fingerprint for name in others}


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
        Lines(
            file="by_distance",
            finding="by_distance",
            beside=("paper_by_distance", ", in the paper (50,000 samples)"),
            x="distance",
            x_label="blocks after the digits' own",
            panel="probe",
            caption="Hidden digits read in K and V of the last layer of later mementos, retained and computed again "
            "without hidden blocks. Dotted: the best that can be done from all text in view; dashed: chance. Shaded: "
            "95 % intervals over traces. Hollow: the paper's toy, whose probe is not described.",
            where={"model": MAIN},
            **LOOK,
        ),
        Lines(
            file="by_layer",
            finding="by_layer",
            beside=("paper_by_layer", ", in the paper (50,000 samples)"),
            x="layer",
            panel="probe",
            caption="Hidden digits read in the first memento that is written while they are hidden, by layer. Dotted: "
            "the best that can be done from all text in view. Shaded: 95 % intervals over traces. Hollow: the paper's "
            "toy.",
            where={"model": MAIN},
            **LOOK,
        ),
        Lines(
            file="by_training",
            finding="by_training",
            beside=("paper_by_training", ", in the paper (17 to 19 %, from 77 to 95 % on)"),
            x="accuracy",
            x_label="mementos that are right (share)",
            caption="Hidden digits read by a linear probe in the last layer of the first memento that is written while "
            "they are hidden, over the training of one seed, from random weights on, as more mementos become right. "
            "Dotted: the best that can be done from all text in view. Shaded: 95 % intervals over traces. Hollow: the "
            "ends of what the paper states.",
            **LOOK,
        ),
    ),
    claims=(
        Claim(
            "leak",
            above="hold hidden digits beyond what is in the text",
            below="hold less of hidden digits than the text does, which cannot be: doubt the run",
            unclear="hold nothing of hidden digits that was detected, beyond what is in the text",
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
            above="changes more than one memento in a hundred",
            below="changes less than one memento in a hundred",
            unclear="changes about one memento in a hundred",
            against=0.01,
        ),
        Claim(
            "follows",
            above="the model goes by the hidden block more than by the text",
            below="the model goes by the text more than by the hidden block",
            unclear="the model goes by neither more than by the other",
            against=0.5,
        ),
        Claim(
            "left_hidden",
            above="some of it can be read",
            below="less can be read than is in the text, which cannot be: doubt the run",
            unclear="nothing that was detected can be read",
        ),
        Claim(
            "harm",
            above="more mementos are right",
            below="fewer mementos are right",
            unclear="no change in right mementos was detected",
        ),
    ),
    labels={
        "n": "{} traces".format,
        "arm": {RETAINED: "retained", RESTART: "computed again (floor)"},
        "model": {MAIN: "this model", UNTRAINED: "random weights"},
        "probe": {LINEAR: "linear probe", MLP: "probe with a hidden layer"},
        "layer": lambda layer: f"layer {layer}",
        "condition": {
            OWN: "as it was",
            "digits": "other digits that fit the text",
            "sum": "digits of another sum than the text states",
            DONOR: "the same, with the text that fits them",
        },
        "state": {
            OPEN: "nothing",
            STAND_IN: "all, by a stand-in of the same text",
            BEYOND: "linearly, what the digits say beyond their sum",
            EVERYTHING: "linearly, all that the digits say",
            RANDOM: "linearly, as many random directions as beyond their sum",
            RESTART: "nothing; mementos computed again",
        },
    },
    written={
        **dict.fromkeys(
            ("by_layer", "by_distance", "shown", "direct", "by_part", "by_training", "by_memento"), percent
        ),
        **dict.fromkeys(("right", "after", "turned", "used", "left", "still", "way", "follows", "seeds"), percent),
        **dict.fromkeys(("leak", "beyond_text", "kept", "left_hidden", "harm"), points),
        **dict.fromkeys(("hidden_by_layer", "hidden_by_distance", "seeds_hidden"), points),
        **dict.fromkeys(("text", "own_text", "visible_text"), share),
        "margin": signed,
        "kl": formatted(".4f"),
        "rank": plain,
    },
)
