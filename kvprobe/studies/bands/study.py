"""The band study: its declaration."""

from collections.abc import Mapping
from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.faults.gaussian import MATCHED_LABELS, MATCHED_MEANINGS
from kvprobe.faults.scope import UNIT_LABELS
from kvprobe.report.findings import Key
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.answers import LABELS, WRITTEN, inputs
from kvprobe.studies.bands import NEUTRAL, PRUNED, Config
from kvprobe.studies.bands.collect import collect
from kvprobe.studies.bands.conclude import conclude
from kvprobe.tasks.task import shown_task
from kvprobe.wording import count, formatted, percent, points

PART_LABELS = {"kv": "K and V", "k": "K alone", "v": "V alone"}
BAND_STYLES = {
    "quarter 1": Style("#0072b2"),
    "quarter 2": Style("#56b4e9", "s"),
    "quarter 3": Style("#009e73", "^"),
    "quarter 4": Style("#d55e00", "D"),
    "half 1": Style("#0072b2", "v", "--"),
    "half 2": Style("#d55e00", "P", "--"),
    "all": Style("#000000", "X", ":"),
}
NOISE_STYLES = {
    "layer": Style("#d55e00"),
    "head": Style("#e69f00", "s", "--"),
    "channel": Style("#0072b2", "^"),
    "effect": Style("#009e73", "D", "-."),
}


def struck(keys: Mapping[str, Key]) -> str:
    """The row of panels of a finding."""
    return f"{shown_task(str(keys['task']))}: {damage(keys)}"


def damage(keys: Mapping[str, Key]) -> str:
    part = PART_LABELS[str(keys["parts"])]
    if keys["noise"] in PRUNED:
        return "slots pruned"
    return f"{part} replaced" if keys["noise"] in NEUTRAL else f"noise in {part}"


def by_noise(file: str, finding: str, caption: str, **more: Any) -> Lines:
    """A panel for each noise, a row of panels for each task and part."""
    known: dict[str, Any] = {"panel": "noise", "row": struck, "size": (2.1, 2.4)}
    return Lines(file=file, finding=finding, caption=caption, **known, **more)


def by_measure(of_kl: Any, of_lost: Any, *names: str) -> dict[str, Any]:
    """How the findings on KL, and those on accuracy lost, are written."""
    return {name.format(of): written for name in names for of, written in (("kl", of_kl), ("lost", of_lost))}


STUDY = Study(
    name="bands",
    title="Noise by layer, and at which scale",
    question=(
        "“KV Cache is More Robust Than You Think in Large Language Models” (canarypwn) strikes bands of Qwen2.5-7B's "
        "layers with Gaussian noise at the layer's own scale, K and V together. Answers suffer most in the last "
        "quarter, “where reasoning happens”, and hardly in the third, “a buffer”. Does this model show that order, and "
        "does the order stay when noise has another scale, or strikes K or V alone? The article infers that a buffer's "
        "cache could be pruned: is it so where slots are hidden?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        by_noise(
            "kl_by_band",
            "kl",
            "KL with intervals over items, on a log scale, by the share of slots that is struck or pruned. Whiskers "
            "that leave the figure reach zero. Bands may differ in their number of layers.",
            x="band",
            line="rate",
            x_label="",
            y_label="KL (nats per token)",
            log=True,
        ),
        by_noise(
            "accuracy_by_band",
            "accuracy",
            "Right answers with 95 % intervals: the article's figure 3, once for each way to match the noise. Grey "
            "band and dashed line: clean cache; dotted: chance. Hollow: the article's own, where they were asked for.",
            x="rate",
            line="band",
            x_label="slots struck or pruned (%)",
            y_label="right answers (share)",
            styles=BAND_STYLES,
            band=("sound", "clean cache"),
            level=("chance", "chance"),
            beside=("published", ", published"),
            limits=(-0.03, 1.03),
        ),
        Lines(
            file="kl_by_layer",
            finding="layer_kl",
            caption="KL when one layer is struck, by what the noise is matched to. Shaded: intervals over items.",
            x="layer",
            line="noise",
            panel="task",
            row=damage,
            x_label="layer that is struck",
            y_label="KL (nats per token)",
            styles=NOISE_STYLES,
            log=True,
            curves=True,
            size=(4.5, 2.4),
        ),
    ),
    claims=(
        *(Claim(f"pair_{of}", above="{first}", below="{second}") for of in ("kl", "lost")),
        *(
            Claim(f"{prefix}{name}", above="K costs more", below="V costs more", against=against)
            for prefix in ("", "layer_")
            for name, against in (("keys_more", 0.5), ("keys_lost", 0.0))
        ),
        *(
            Claim(name, above="raises KL", below="lowers KL", unclear="does not detectably change KL", against=1.0)
            for name in ("factor", "alone")
        ),
        Claim("change", above="larger", below="smaller", unclear="not detected", against=1.0),
    ),
    labels={
        "n": "{} items".format,
        **LABELS,
        **dict.fromkeys(("noise", "other"), MATCHED_LABELS | {"zeros": "zeros", "scaffold": "a scaffold"} | PRUNED),
        "parts": PART_LABELS,
        "meaning": MATCHED_MEANINGS | NEUTRAL,
        "unit": UNIT_LABELS,
        "factor": {"mean": "mean", "spread": "spread", "covariance": "correlation"},
        "measure": {"kl": "KL", "lost": "accuracy lost"},
        "key": {"parts": "in", "noise": "noise matched to, or pruning", "rate": "struck"},
    },
    written={
        **WRITTEN,
        **dict.fromkeys(("less_published", "less_published_sound"), points),
        **by_measure(formatted(".4f"), points, "{}", "{}_all", "layer_{}"),
        # Differences of KL may be far smaller than others of their table.
        **by_measure(
            formatted("+.2g"), points, "pair_{}", "zeros_{}", "keys_{}", "pair_{}_at", "keys_{}_at", "layer_keys_{}"
        ),
        **dict.fromkeys(("keys_more", "layer_keys_more"), percent),
        "broken": count,
        "self_agreement": lambda rho: f"{rho.mean:.2f}",
    },
)
