"""The lossy_memento study: its declaration."""

from collections.abc import Mapping
from math import log2

from kvprobe.experiments.study import Claim, Study
from kvprobe.inference.model import load
from kvprobe.report.plots.lines import Lines
from kvprobe.stats import Estimate
from kvprobe.studies.lossy_memento import Config
from kvprobe.studies.lossy_memento.collect import collect
from kvprobe.studies.lossy_memento.conclude import READERS, conclude
from kvprobe.studies.lossy_memento.reading import OMITTED, RESTART, RETAINED, STAND_IN, STATED, SWAPPED
from kvprobe.wording import percent, points, signed


def inputs(config: Config) -> Mapping[str, str]:
    """Fingerprints of the other models, which may be folders that are trained on."""
    return {name: load(name, **config.loading).fingerprint for name in config.beside}


def bits(value: Estimate) -> str:
    """To a hundredth: where all is known, the interval is narrower than anyone cares for."""
    return "undefined" if value.unknown else f"{value.mean:.2f} ({value.ends[0]:.2f} to {value.ends[1]:.2f})"


STUDY = Study(
    name="lossy_memento",
    title="What the text does not say",
    question=(
        "A small transformer reads a block of random digits and writes a memento that omits most of them. The block is "
        "hidden, and later questions ask for what was omitted. What do the slots of the memento hold beyond their "
        "text, how many bits a slot, and does a model that was trained so use it, against one trained with restarts?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    inputs=inputs,
    figures=(
        Lines(
            file="capacity",
            finding="by_seed",
            x="asked",
            x_label="digits omitted and asked for",
            y_label="bits held by the memento",
            line="slots",
            panel="reader",
            where={"provenance": RETAINED},
            caption="Bits that each reader knows of what the memento omits, by digits omitted and slots of the "
            "memento; models that were trained with retained mementos, a point for each seed. Dotted: all bits that "
            "are omitted. Bars: 95 % intervals over blocks.",
            most=(lambda asked: asked * log2(10), "all that is omitted"),
        ),
        Lines(
            file="per_slot",
            finding="per_slot",
            x="asked",
            x_label="digits omitted and asked for",
            y_label="bits per slot",
            line="slots",
            panel="reader",
            where={"provenance": RETAINED},
            caption="The same for each slot of the memento.",
        ),
    ),
    claims=(
        Claim(
            "leak",
            above="hold omitted digits",
            below="hold less of omitted digits than a restart, which cannot be: doubt the run",
            unclear="hold nothing of omitted digits that was detected",
        ),
        Claim(
            "gain",
            above="answers more questions for omitted digits than after a restart",
            below="answers fewer questions for omitted digits than after a restart",
            unclear="answers no more questions for omitted digits than after a restart that was detected",
        ),
        Claim(
            "follows",
            above="its answers go by the slots of the stand-in",
            below="its answers avoid what the stand-in holds",
            unclear="its answers do not detectably go by the slots of the stand-in",
            against=0.1,
        ),
        Claim(
            "left",
            above="more of the block's own digits are given than by chance",
            below="fewer of the block's own digits are given than by chance",
            unclear="the block's own digits are given about as often as by chance",
            against=0.1,
        ),
        Claim(
            "harm",
            above="a restart gives more right answers about stated digits",
            below="a restart costs right answers about stated digits",
            unclear="no cost of a restart was detected for stated digits",
        ),
        Claim(
            "full",
            above="more than nine tenths of it",
            below="less than nine tenths of it",
            unclear="about nine tenths of it",
            against=0.9,
        ),
    ),
    labels={
        "n": "{} blocks".format,
        "arm": {
            RETAINED: "retained",
            RESTART: "computed again",
            STAND_IN: "stand-in",
            **{name: name for name in SWAPPED},
        },
        "kind": {OMITTED: "omitted digits", STATED: "stated digits"},
        "provenance": {"retained": "trained to go on", "recomputed": "trained with restarts"},
        "reader": {reader: reader for reader in READERS},
        "slots": lambda slots: f"{slots} slot" + "s" * (slots != 1),
        "seed": lambda seed: f"seed {seed}",
        "layer": lambda layer: f"layer {layer}",
    },
    written={
        **dict.fromkeys(("answered", "taken", "read", "by_layer", "follows", "left", "full"), percent),
        **dict.fromkeys(("gain", "leak", "harm"), points),
        **dict.fromkeys(("held", "by_seed", "per_slot", "per_digit"), bits),
        "margin": signed,
    },
)
