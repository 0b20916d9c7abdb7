"""The ghost_state study: its declaration."""

from collections.abc import Mapping

from kvprobe.experiments.study import Claim, Study
from kvprobe.inference.model import load
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.collect import UNTRAINED, collect
from kvprobe.studies.ghost_state.conclude import ANSWERING, SEEING, conclude
from kvprobe.studies.ghost_state.reading import (
    AT_ONCE,
    BOTH,
    ERASED,
    FOLDED,
    IN_VIEW,
    LATER,
    OF_STAND_IN,
    RESTART,
    RIVALS,
    TIMELESS,
)
from kvprobe.studies.layer_readers import LINEAR
from kvprobe.wording import percent, points, signed


def inputs(config: Config) -> Mapping[str, str]:
    """Fingerprints of the other models, which may be folders that are trained on."""
    return {name: load(name, **config.loading).fingerprint for name in config.beside}


def bits(value: Estimate) -> str:
    """To a hundredth."""
    return "undefined" if value.unknown else f"{value.mean:.2f} ({value.ends[0]:.2f} to {value.ends[1]:.2f})"


STYLES = {
    SEEING: Style("#7f7f7f", "v"),
    ANSWERING: Style("#d55e00"),
    LINEAR: Style("#0072b2", "s"),
    UNTRAINED: Style("#56b4e9", "D", "--"),
}

STUDY = Study(
    name="ghost_state",
    title="What a state still knows of a hidden turn",
    question=(
        "Most new models keep a recurrent state in three of four layers. An engine that erases a turn deletes its "
        "slots in the others; the state has read the turn and stays as it is. What can be read of it in the state, and "
        "does the model use it? What is left if the state is folded anew without the turn?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    inputs=inputs,
    figures=(
        Lines(
            file="reach",
            finding="by_distance",
            x="distance",
            x_label="unrelated words after the hidden turn",
            y_label="digits of the hidden turn",
            line="reader",
            panel="kind",
            styles=STYLES,
            limits=(0.0, 1.04),
            caption="Hidden digits that are answered, and that linear probes read in the states, by words since "
            "then. The turn is hidden from attention alone, after the words; models of one kind together. Bars: "
            "95 % intervals over texts.",
        ),
        Lines(
            file="capacity",
            finding="by_pairs",
            x="pairs",
            x_label="digits hidden at once",
            y_label="digits of the hidden turn",
            line="reader",
            panel="kind",
            styles=STYLES,
            limits=(0.0, 1.04),
            caption="The same by digits that are hidden at once.",
        ),
    ),
    claims=(
        Claim(
            "ghost",
            above="answers more questions because its states have read the turn",
            below="answers fewer questions because its states have read the turn",
            unclear="no effect of what its states have read on its answers was detected",
        ),
        Claim(
            "leak",
            above="digits of the hidden turn can be read from its states",
            below="less can be read from its states than after a restart, which cannot be: doubt the run",
            unclear="nothing of the hidden turn was detected in its states",
        ),
        Claim(
            "learned",
            above="more than from those of an untrained model",
            below="less than from those of an untrained model",
            unclear="no more was detected than in those of an untrained model",
        ),
        Claim(
            "follows",
            above="its answers go by the states of the stand-in",
            below="its answers avoid what the states of the stand-in hold",
            unclear="its answers do not detectably go by the states of the stand-in",
            against=0.1,
        ),
        Claim(
            "rivals",
            above="its answers go by the states even with the turn in view",
            below="its answers avoid what the states say while the turn is in view",
            unclear="with the turn in view its answers do not detectably go by the states",
        ),
        Claim(
            "time",
            above="digits can be read from how far a state decayed",
            below="less than nothing can be read from how far a state decayed, which cannot be: doubt the run",
            unclear="nothing was detected in how far a state decayed",
        ),
        Claim(
            "carried_by_writes",
            above="digits can be read from what later words wrote in view of the turn",
            below="less can be read from what later words wrote than after a restart, which cannot be: doubt the run",
            unclear="nothing was detected in what later words wrote in view of the turn",
        ),
        Claim(
            "carried_by_slots",
            above="digits can be read from V of later words",
            below="less can be read from V of later words than after a restart, which cannot be: doubt the run",
            unclear="nothing was detected in V of later words",
        ),
        Claim(
            "poison",
            above="a mistake in a block that attention no longer sees moves the next memento towards it",
            below="a mistake in a block that attention no longer sees moves the next memento away from it",
            unclear="no effect of a mistake in a block that attention no longer sees was detected",
        ),
        Claim(
            "cure",
            above="folding the states without the block weakens the effect of the mistake",
            below="folding the states without the block strengthens the effect of the mistake",
            unclear="no change of the effect of the mistake by folding was detected",
        ),
    ),
    labels={
        "n": "{} texts".format,
        "arm": {
            IN_VIEW: IN_VIEW,
            ERASED: "hidden from attention alone (an engine's erase)",
            FOLDED: "hidden from states alone",
            BOTH: "hidden from both, decay kept",
            TIMELESS: "hidden from both, decay dropped",
            RESTART: RESTART,
            OF_STAND_IN: "hidden from attention, states of a stand-in",
            RIVALS: "in view, states of a stand-in",
        },
        "when": {AT_ONCE: "at once", LATER: "after the talk"},
        "distance": lambda words: f"{words} words",
        "pairs": lambda pairs: f"{pairs} digits",
        "layer": lambda layer: f"layer {layer}",
        "head": lambda head: f"head {head}",
        "bytes": "{:,} bytes".format,
        "turn": lambda turn: f"memento {turn}",
    },
    written={
        **dict.fromkeys(
            (
                "answered",
                "taken",
                "read",
                "floor",
                "follows",
                "by_layer",
                "by_head",
                "mementos",
                "of_block",
                "kept",
                "by_distance",
                "by_pairs",
            ),
            percent,
        ),
        **dict.fromkeys(
            ("ghost", "rivals", "leak", "learned", "time", "carried_by_writes", "carried_by_slots"), points
        ),
        "held": bits,
        **dict.fromkeys(("margin", "shift", "poison", "cure"), signed),
    },
)
