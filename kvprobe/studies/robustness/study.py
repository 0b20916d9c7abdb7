"""The robustness study: its declaration."""

from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.answers import LABELS, WRITTEN
from kvprobe.studies.robustness import Config
from kvprobe.studies.robustness.collect import UNITS, collect, inputs
from kvprobe.studies.robustness.conclude import conclude
from kvprobe.wording import percent, points, span, two_digits

FAULTS = {name: fault.label for name, fault in CATALOGUE.items()}
RED, BLUE, GREEN, PINK = "#d55e00", "#0072b2", "#009e73", "#cc79a7"
ORANGE, SKY, GREY = "#e69f00", "#56b4e9", "#7f7f7f"
FAULT_STYLES = {
    "gaussian": Style(RED),
    "gaussian-head": Style(RED, "s", "--"),
    "gaussian-channel": Style(RED, "^", ":"),
    "gaussian-effect": Style(RED, "D", "-."),
    "zeros": Style(BLUE),
    "zero-keys": Style(BLUE, "D", "-."),
    "zero-values": Style(BLUE, "s", "--"),
    "distractor": Style(GREEN),
    "distractor-keys": Style(GREEN, "D", "-."),
    "distractor-values": Style(GREEN, "v", ":"),
    "distractor-matched": Style(GREEN, "s", "--"),
    "permuted": Style(GREY, "x"),
    "permuted-keys": Style(PINK),
    "pointers-swapped": Style(GREY, "+", "--"),
    "pointers-repeated": Style(ORANGE),
    "foreign-block": Style(SKY, "s"),
    "stale-block": Style(SKY, "D", "--"),
    "overlapping": Style("#000000", "v"),
    "shifted": Style(PINK, "D", "--"),
    "fp8-scale": Style(GREEN, "^"),
    "fp8-saturated": Style(GREEN, "P", "--"),
    "rounded-2-bit": Style(BLUE, "<"),
    "rounded-4-bit": Style(BLUE, ">", "--"),
}
"""A style for each entry of `kvprobe.faults.catalogue.CATALOGUE`."""


def cost(value: Estimate) -> str:
    """Accuracy lost."""
    return f"{100 * value.mean:.1f} points ({span(value, lambda share: f'{100 * share:.1f}')})"


def by_rate(file: str, finding: str, caption: str, y_label: str, **more: Any) -> Lines:
    """A finding against the rate: a panel per task and family of faults, a line per fault that is no control."""
    return Lines(
        file=file,
        finding=finding,
        caption=caption,
        x="rate",
        line="fault",
        panel="task",
        x_label="struck (% of the slots)",
        y_label=y_label,
        styles=FAULT_STYLES,
        row=lambda keys: CATALOGUE[str(keys["fault"])].family,
        drawn=lambda fault: not CATALOGUE[str(fault)].control,
        **more,
    )


STUDY = Study(
    name="robustness",
    title="Damage to the cache",
    question=(
        "A share of the slots of a model's KV cache holds something else than what the model wrote there: noise, "
        "zeros, another conversation, a neighbouring block. How much of the cache can be damaged, and how, before "
        "answers go wrong?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        by_rate(
            "accuracy_by_rate",
            "accuracy",
            "Right answers with 95 % intervals. Grey band and dashed line: sound cache; dotted: chance. Hollow: "
            "published, where there is such a table. Points of one rate are drawn side by side. Controls, which change "
            "nothing, are not drawn.",
            "right answers (share)",
            band=("sound", "sound cache"),
            level=("chance", "chance"),
            beside=("published", ", published"),
            limits=(-0.03, 1.03),
        ),
        by_rate(
            "kl_by_rate",
            "kl",
            "KL with intervals over items, on log scales. Controls are not drawn.",
            "KL from the sound cache (nats per token)",
            log=True,
        ),
    ),
    claims=(
        Claim(
            "harm",
            above="{fault}, which costs {value}",
            below="{fault}, which gains accuracy (its loss is {value})",
            unclear="{fault}, for which a loss was not detected ({value})",
        ),
        Claim("harm_over_next", above="yes", below="no"),
        Claim("harm_kl_over_next", above="yes", below="no"),
        Claim("contrast", above="{first} costs more", below="{second} costs more"),
        Claim("contrast_kl", above="{first} moves more", below="{second} moves more"),
        Claim("reading_lost", above="loses more", below="loses less"),
    ),
    labels={
        "n": "{} items".format,
        **LABELS,
        **dict.fromkeys(("fault", "first", "second"), FAULTS),
        "drawn": UNITS,
    },
    written={
        **WRITTEN,
        **dict.fromkeys(("sound_also", "accuracy_also", "reading"), percent),
        **dict.fromkeys(("lost", "harm_over_next", "contrast", "reading_lost"), points),
        "harm": cost,
        **dict.fromkeys(("kl", "harm_kl", "harm_kl_over_next", "contrast_kl", "reading_kl"), two_digits),
    },
)
