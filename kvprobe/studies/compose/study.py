"""The compose study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.compose import Config
from kvprobe.studies.compose.collect import DEVIATING, FIRST, RANDOM, collect
from kvprobe.studies.compose.conclude import conclude
from kvprobe.wording import formatted, percent, plain

STYLES = {FIRST: Style("#0072b2", "o"), DEVIATING: Style("#d55e00", "s"), RANDOM: Style("#7f7f7f", "D")}

STUDY = Study(
    name="compose",
    title="Documents that were read by themselves, joined",
    question=(
        "Two documents are read by themselves and their caches joined, as services with a prompt cache do. What does "
        "the model then know less of than after one prefill, and which few slots should be read again?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="apart",
            finding="apart",
            caption="KL from one prefill of both documents, by how much of the second is read again, with 95 % "
            "intervals over pairs of documents.",
            x="share",
            x_label="slots of the second document read again",
            line="way",
            panel="kind",
            y_label="KL (nats)",
            styles=STYLES,
            size=(3.0, 2.8),
        ),
        Lines(
            file="flips",
            finding="flips",
            caption="Questions to which another option is the likeliest than after one prefill.",
            x="share",
            x_label="slots of the second document read again",
            line="way",
            panel="kind",
            y_label="share",
            styles=STYLES,
            size=(3.0, 2.8),
        ),
    ),
    claims=(
        Claim(
            "lost",
            above="right more often than after one prefill",
            below="right less often than after one prefill",
            unclear="not shown to be right more or less often than after one prefill",
        ),
        Claim(
            "beside_random",
            above="further from one prefill than with as many random slots",
            below="nearer to one prefill than with as many random slots",
            unclear="not shown to be nearer to one prefill than with as many random slots, or further",
        ),
        Claim(
            "judgement",
            above="in more of them than after one prefill",
            below="in fewer of them than after one prefill",
            unclear="in no more of them and no fewer, as far as is shown, than after one prefill",
        ),
    ),
    labels={
        "n": "{} pairs of documents".format,
        "share": "{:g} %".format,
        "way": {FIRST: "the first slots", DEVIATING: "slots by deviation", RANDOM: "random slots"},
    },
    written={
        **dict.fromkeys(("right", "flips", "joint", "alone", "second", "both_orders"), percent),
        **dict.fromkeys(("lost", "judgement"), formatted("+.0%")),
        **dict.fromkeys(("apart", "over_kinds", "truth"), lambda number: plain(number, 3)),
        "beside_random": formatted("+.3f"),
        "exact": lambda number: f"{number.mean:.1e}",
    },
)
