"""The bit-flip study: its declaration."""

import numpy as np

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.findings import Key
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.answers import LABELS, WRITTEN, inputs
from kvprobe.studies.bitflips import Config
from kvprobe.studies.bitflips.by_bit import PointsByBit, SharesByBit
from kvprobe.studies.bitflips.collect import ANY, collect
from kvprobe.studies.bitflips.conclude import conclude
from kvprobe.wording import percent, points, two_digits

STYLES = {
    ANY: Style("black"),
    "sign": Style("#0072b2", "s", "--"),
    "exponent": Style("#d55e00", "^", "-."),
    "mantissa": Style("#009e73", "v", ":"),
}
FIELDS = {ANY: "any bit", "all": "all bits"} | {name: f"{name} bits" for name in ("sign", "exponent", "mantissa")}
COMPARED = {
    **FIELDS,
    "top": "highest exponent bit",
    "rest": "other exponent bits",
    **{"k": "K", "v": "V", "late": "late layers", "early": "early layers"},
}
BECAME = {
    "nothing": "nothing",
    "words": "other words",
    "breaks": "breaks",
    "same": "same answer",
    "different": "another answer",
    "nonfinite": "not finite",
    "changed": "another answer or not finite",
}
STACKS = {
    "breaks": (
        ("loud", "", "#222222", "breaks: not finite"),
        ("breaks", "loud", "#d55e00", "breaks: wrong answer"),
        ("words", "", "#56b4e9", "other words, still right"),
        ("nothing", "", "#e3e3e3", "nothing: same answer"),
    ),
    "changed": (
        ("nonfinite", "", "#222222", "not finite"),
        ("different", "", "#d55e00", "another answer"),
        ("same", "", "#e3e3e3", "same answer"),
    ),
}
"""What the figure of shares stacks, where answers can break and where the model fails at the task."""
GAPS = ("contrast_breaks", "contrast_changed")


def shown_rate(rate: Key) -> str:
    return np.format_float_scientific(float(rate), precision=2, trim="-", exp_digits=1)


def shown_count(value: Estimate) -> str:
    return f"{value.mean:,.0f}" if value.mean >= 100 else f"{value.mean:.2g}"


def by_rate(file: str, finding: str, y_label: str, caption: str, level: tuple[str, str] | None = None) -> Lines:
    """A finding against the error rate, a line for each field."""
    return Lines(
        file=file,
        finding=finding,
        caption=f"{caption} Points of one rate are drawn side by side; 95 % intervals over items.",
        x="rate",
        line="field",
        panel="task",
        x_label="share of numbers with a flipped bit",
        y_label=y_label,
        styles=STYLES,
        band=("sound", "sound cache") if level else None,
        level=level,
        above=("numbers", "expected flips in the whole cache"),
        limits=(-0.03, 1.03),
    )


STUDY = Study(
    name="bitflips",
    title="Flipped bits in K and V",
    question=(
        "A prompt's K and V lie in memory while its answer is written, and one bit of one number flips. What does that "
        "do to the answer, by the bit's place in the number; and how many flips can a cache tolerate?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        SharesByBit(
            file="shares_by_bit",
            caption="What a single flip of each bit does: of answers that were right, or of all answers where the "
            "model fails at the task. The same places are struck at each bit. 95 % intervals over items.",
            finding="bit_share",
            bits="bit_flips",
            stacks=STACKS,
            said={"breaks": "breaks", "changed": "differs"},
        ),
        by_rate(
            "damage_by_rate",
            "accuracy",
            "right answers (share)",
            "Flips all over the cache. A row that is not finite counts as wrong. Grey band: sound cache.",
            ("chance", "chance"),
        ),
        by_rate("changed_by_rate", "changed", "answers that changed (share)", "Flips all over the cache."),
        PointsByBit(
            file="kl_by_bit",
            caption="Flips after which numbers were not finite have no KL; how many these are is written above. A "
            "change too small to matter still moves what is computed by rounding; the KL of the lowest bits shows how "
            "much. 95 % intervals over items.",
            finding="bit_kl",
            bits="bit_flips",
            left_out="bit_nonfinite",
            y_label="KL (nats per token)",
            limits=(5e-11, 100.0),
            label="mean over flips and items, with its interval",
        ),
    ),
    claims=(
        *(Claim(name, "more often than", "less often than", "not detectably more often than") for name in GAPS),
        Claim("from_clean", above="above clean", below="below clean"),
    ),
    labels={
        **LABELS,
        "rate": shown_rate,
        "field": FIELDS,
        **dict.fromkeys(("first", "second"), COMPARED),
        "became": BECAME,
        "group": {"single": "single flips", "rate": "flips at a rate"},
    },
    written={
        **WRITTEN,
        **dict.fromkeys(("bit_share", "field_share", "changed", "nonfinite"), percent),
        **dict.fromkeys((*GAPS, "from_clean"), points),
        **dict.fromkeys(("bit_kl", "field_kl", "kl", "contrast_kl"), two_digits),
        **dict.fromkeys(("expected", "slots", "numbers", "right_items"), shown_count),
        "struck": lambda vectors: f"{vectors.mean:,.1f}",
    },
)
