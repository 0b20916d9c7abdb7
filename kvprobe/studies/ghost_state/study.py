"""The ghost_state study: its declaration."""

from collections.abc import Mapping

from kvprobe.experiments.study import Claim, Study
from kvprobe.inference.model import load
from kvprobe.report.plots.lines import Lines
from kvprobe.stats import Estimate
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.collect import collect
from kvprobe.studies.ghost_state.conclude import conclude
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
from kvprobe.wording import percent, points, signed


def inputs(config: Config) -> Mapping[str, str]:
    """Fingerprints of the other models, which may be folders that are trained on."""
    names = (*(config.others or ()), *(config.toys or ()))
    return {name: load(name, device=config.device, dtype=config.dtype).fingerprint for name in names}


def bits(value: Estimate) -> str:
    """To a hundredth."""
    return "undefined" if value.unknown else f"{value.mean:.2f} ({value.ends[0]:.2f} to {value.ends[1]:.2f})"


def density(value: Estimate) -> str:
    """Bits of a thousand bytes."""
    return f"{1000 * value.mean:.2f} ({1000 * value.ends[0]:.2f} to {1000 * value.ends[1]:.2f})"


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
            x_label="words of talk after the hidden turn",
            y_label="bits known of a hidden digit",
            line="reader",
            panel="memory",
            caption="What the states and the answers know of a hidden digit (3.32 bits were all), by words since then. "
            "Hidden from attention alone, after the talk; seeds together. Bars: 95 % intervals over texts.",
        ),
        Lines(
            file="capacity",
            finding="by_pairs",
            x="pairs",
            x_label="digits hidden at once",
            y_label="bits known of all of them",
            line="reader",
            panel="memory",
            caption="The same by digits that are hidden at once: all their bits.",
        ),
    ),
    claims=(
        Claim(
            "ghost",
            above="answers more questions from a state that has read the turn than from one without it",
            below="answers fewer questions from a state that has read the turn than from one without it",
            unclear="answers no more questions from a state that has read the turn, that was detected",
        ),
        Claim(
            "leak",
            above="its states tell digits of the hidden turn",
            below="its states tell less of the hidden turn than a restart, which cannot be: doubt the run",
            unclear="nothing of the hidden turn was detected in its states",
        ),
        Claim(
            "follows",
            above="its answers go by the state of the stand-in",
            below="its answers avoid what the state of the stand-in holds",
            unclear="its answers do not detectably go by the state of the stand-in",
            against=0.1,
        ),
        Claim(
            "rivals",
            above="its answers go by the states even with the turn in view",
            below="its answers avoid what the states say while the turn is in view, which cannot be: doubt the run",
            unclear="with the turn in view its answers do not detectably go by the states",
        ),
        Claim(
            "time",
            above="how far a state decayed tells digits by itself",
            below="how far a state decayed tells less than nothing, which cannot be: doubt the run",
            unclear="how far a state decayed tells no digit that was detected",
        ),
        Claim(
            "carried_by_writes",
            above="what later words wrote in view of the turn tells its digits",
            below="what later words wrote tells less than a restart, which cannot be: doubt the run",
            unclear="what later words wrote in view of the turn tells no digit that was detected",
        ),
        Claim(
            "carried_by_slots",
            above="K and V of later words tell its digits",
            below="K and V of later words tell less than a restart, which cannot be: doubt the run",
            unclear="K and V of later words tell no digit that was detected",
        ),
        Claim(
            "poison",
            above="a mistake in a block that attention no longer sees moves the next memento towards it",
            below="a mistake in a block that attention no longer sees moves the next memento away from it",
            unclear="no effect of a mistake in a block that attention no longer sees was detected",
        ),
        Claim(
            "cure",
            above="folding the states without the block weakens that",
            below="folding the states without the block makes that worse",
            unclear="no effect of folding the states was detected on that",
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
        "turn": lambda turn: f"memento {turn}",
    },
    written={
        **dict.fromkeys(
            ("answered", "taken", "read", "floor", "follows", "by_layer", "by_head", "mementos", "of_block", "kept"),
            percent,
        ),
        **dict.fromkeys(("ghost", "rivals", "leak", "time", "carried_by_writes", "carried_by_slots"), points),
        **dict.fromkeys(("by_distance", "by_pairs", "held"), bits),
        "per_byte": density,
        **dict.fromkeys(("margin", "shift", "poison", "cure"), signed),
    },
)
