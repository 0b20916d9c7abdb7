"""The engines study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.engines import Config
from kvprobe.studies.engines.collect import HERE, collect
from kvprobe.studies.engines.conclude import conclude
from kvprobe.studies.engines.files import inputs
from kvprobe.wording import formatted, percent, plain

STYLES = {
    HERE: Style("#000000", "D"),
    "exact": Style("#7f7f7f", "x"),
    "f32": Style("#56b4e9", "v"),
    "f16": Style("#0072b2", "s"),
    "q8_0": Style("#d55e00", "^"),
}

STUDY = Study(
    name="engines",
    title="Mask or restart, in llama.cpp and transformers",
    question=(
        "A turn that holds a fact is taken out of a conversation's cache, and the fact is asked for. Does llama.cpp "
        "then say what transformers says, or does an edit do something else in a real engine?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="distances",
            finding="distance",
            caption="KL between two conditions within each engine, with 95 % intervals over conversations. The last "
            "is between two ways to the same cache: rounding alone. All in f32, llama.cpp is where transformers is.",
            x="pair",
            x_label="",
            line="engine",
            drawn=lambda engine: engine != "exact",
            y_label="KL (nats)",
            styles=STYLES,
            log=True,
            size=(7.5, 3.4),
        ),
        Lines(
            file="apart",
            finding="apart",
            caption="KL from transformers to llama.cpp under the same condition, with 95 % intervals over "
            "conversations. In full and restart nothing was edited: they are the floor.",
            x="condition",
            x_label="",
            line="engine",
            y_label="KL(transformers ‖ llama.cpp), nats",
            styles=STYLES,
            log=True,
            size=(7.5, 3.4),
        ),
    ),
    claims=(
        Claim(
            "known",
            above="still leans to the hidden fact",
            below="leans away from the hidden fact",
            unclear="is not shown to lean to the hidden fact or away",
        ),
        Claim(
            "beyond",
            above="further from transformers than text that was not edited",
            below="nearer to transformers than text that was not edited",
            unclear="not shown to be further from transformers than text that was not edited, or nearer",
        ),
        Claim(
            "carried",
            above="more of the fact left than in transformers",
            below="less of the fact left than in transformers",
            unclear="no more or less of the fact left than in transformers, as far as is shown",
        ),
    ),
    labels={
        "n": "{} conversations".format,
        "engine": {
            "exact": "llama.cpp, all in f32",
            "f32": "llama.cpp, cache in f32",
            "f16": "llama.cpp, cache in f16",
            "q8_0": "llama.cpp, cache in q8_0",
        },
        "condition": {"control": "other turn masked", "naive": "re-indexed, not rotated"},
        "pair": {
            "price": "restart → masked",
            "memory": "restart → re-indexed",
            "positions": "re-indexed → masked",
            "bug": "re-indexed → not rotated",
            "hiding": "full → masked",
            "control": "full → other masked",
            "rounding": "re-indexed → shifted",
        },
    },
    written={
        **dict.fromkeys(("answered", "agrees"), percent),
        **dict.fromkeys(("margin", "known"), formatted("+.2f")),
        "carried": formatted("+.3f"),
        **dict.fromkeys(("beyond", "gap"), formatted("+.4f")),
        **dict.fromkeys(("apart", "distance"), lambda number: plain(number, 4)),
        **dict.fromkeys(("largest", "off"), lambda number: f"{number.mean:.1e}"),
    },
)
