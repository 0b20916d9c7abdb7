"""The memory study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.memory import Config
from kvprobe.studies.memory.collect import collect
from kvprobe.studies.memory.conclude import conclude
from kvprobe.studies.memory.stack_figure import StackFigure
from kvprobe.units import short
from kvprobe.wording import count

WHAT = {
    "weights": "weights",
    "cache": "cache in the end",
    "reading": "beside the weights, while the prompt is read",
    "generating": "beside the weights, at the last generated token",
    "peak": "peak",
}


def bytes_of(value: Estimate) -> str:
    return short(int(value.mean))


def tokens(value: Estimate) -> str:
    return "any number of" if value.unknown else f"{value.mean:,.0f}"


STUDY = Study(
    name="memory",
    title="Memory",
    question=(
        "A prompt that fitted yesterday runs out of memory today. Can that be computed beforehand, from the model's "
        "config alone? And what does the cache that fills the memory save?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        StackFigure(
            file="stack",
            caption="Memory by the length of a prompt that is read in one pass. Dots: measured.",
            along="context",
            measured=True,
        ),
        StackFigure(file="generating", caption="Memory by generated tokens, after the prompt.", along="new"),
        Lines(
            file="batches",
            finding="at_batch",
            caption="By conversations at once; hollow: the budget. Time: medians, with the range of repeats.",
            x="batch",
            panel="measure",
            x_label="conversations at once",
            y_label="measured",
            beside=("at_batch_budget", "budget"),
            own_scales=True,
            curves=True,
        ),
        Lines(
            file="growth",
            finding="cache",
            caption="Bytes of the cache by generated token: three views, and what transformers really holds (dots).",
            x="new",
            line="view",
            x_label="tokens generated",
            y_label="cache, MB (10⁶ bytes)",
            styles={
                "transformers": Style("#0072b2", ""),
                "vLLM": Style("#cc79a7", ""),
                "logical": Style("#009e73", "", "--"),
                "measured": Style("#000000", ".", ""),
            },
            curves=True,
        ),
        Lines(
            file="times",
            finding="time",
            caption="Time to the next token: medians, with the range of all repeats. Both axes are logarithmic.",
            x="length",
            line="way",
            x_label="tokens before it",
            y_label="milliseconds to the next token",
            styles={"anew": Style("#d55e00"), "cached": Style("#0072b2", "s")},
            log=True,
        ),
    ),
    claims=(
        Claim(
            "slope",
            above="grows with the length",
            below="falls with the length",
            unclear="was not seen to change with the length",
        ),
        Claim(
            "batch_slope",
            above="grows with the number of conversations",
            below="falls with the number of conversations",
            unclear="was not seen to change with the number of conversations",
        ),
    ),
    labels={
        "n": "{} repeats".format,
        "what": WHAT,
        "way": {"cached": "with the cache", "anew": "all read anew"},
        "measure": {"cache": "cache, MB (10⁶ bytes)", "peak": "peak, MB", "step": "a step of all, ms"},
        "along": {"context": "tokens of context", "new": "tokens generated after the prompt"},
        "view": {"measured": "measured, transformers"},
        "length": "{:,}".format,
        "context": "{:,}".format,
    },
    written={
        "bytes": bytes_of,
        "tokens": tokens,
        "error": lambda value: f"{100 * value.mean:+.2f} %",
        **dict.fromkeys(("worst", "worst_batch"), lambda value: f"{100 * abs(value.mean):.2f} %"),
        "MB": lambda value: f"{value.mean:,.2f} MB",
        "ms": lambda value: f"{value.mean:.3g} ms ({value.smallest:.3g} to {value.largest:.3g})",
        "faster": lambda value: f"{value.mean:.1f}",
        **dict.fromkeys(("looks", "equal_looks", "batches", "equal_batches"), count),
    },
)
