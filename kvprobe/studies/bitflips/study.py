"""The bit-flip study: its declaration."""

import numpy as np

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.findings import Key
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.answers import LABELS, WRITTEN, inputs
from kvprobe.studies.bitflips import Config
from kvprobe.studies.bitflips.by_bit import KLByBit, SharesByBit
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
        SharesByBit(),
        by_rate(
            "damage_by_rate",
            "accuracy",
            "right answers (share)",
            "Flips all over the cache. A row that is not finite counts as wrong. Grey band: sound cache.",
            ("chance", "chance"),
        ),
        by_rate("changed_by_rate", "changed", "answers that changed (share)", "Flips all over the cache."),
        KLByBit(),
    ),
    claims=(
        *(Claim(name, "more often than", "less often than", "not detectably more often than") for name in GAPS),
        Claim("from_clean", above="above clean", below="below clean"),
    ),
    labels={
        "n": "{} items".format,
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
