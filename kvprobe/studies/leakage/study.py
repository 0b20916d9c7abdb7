"""The leakage study: its declaration."""

from collections.abc import Mapping

from kvprobe.experiments.study import Claim, Study
from kvprobe.report import probings
from kvprobe.report.findings import Key
from kvprobe.report.plots import ARM_COLOURS
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.leakage import Config
from kvprobe.studies.leakage.collect import ARMS as SEGMENTS
from kvprobe.studies.leakage.collect import collect
from kvprobe.studies.leakage.conclude import conclude
from kvprobe.wording import percent, points, share, signed

ARMS = {
    "hidden": "T2 itself, after the secret",
    "direct": "direct: summary 2, saw T2",
    "masked": "masked: T3, cannot see T2",
    "restart": "restart: T3 recomputed (floor)",
    "before": "before: summary 1",
    "direct less restart": "direct, less its restart",
    "masked less restart": "masked, less its restart",
}
READINGS = {
    **probings.READINGS,
    "restart": "the restart: these tokens computed without T1 and T2",
    "before": "the slots of summary 1, before the secret was stated",
}
USE = {
    "margin": "margin of the true secret over others (nats)",
    "token_accuracy": "share of its tokens that the model gets right",
    "kl_from_full": "KL from full context, first token (nats)",
}
CACHES = {
    cache: Style(ARM_COLOURS[arm])
    for cache, arm in {"full": "direct", "retained": "masked", "restart": "restart"}.items()
}


def family(keys: Mapping[str, Key]) -> str:
    return probings.FAMILIES[str(keys["family"])]


def by_layer(file: str, read: str, slots: str) -> Lines:
    """Accuracy by layer from one way to read a segment's slots, families down, splits across."""
    return Lines(
        file=file,
        finding="site",
        caption=f"Accuracy per label by layer, {slots}. Bands are 95 % intervals, dots are chance. The splits are "
        "explained below.",
        x="layer",
        line="arm",
        panel="split",
        row=family,
        where={"read": read},
        y_label="accuracy per label",
        styles={arm: Style(ARM_COLOURS[arm], "") for arm in ARMS},
        level=("chance", "chance"),
        curves=True,
        size=(2.9, 2.4),
    )


STUDY = Study(
    name="leakage",
    title="Leakage after masking",
    question=(
        "A conversation holds a secret in one turn (T2): a random number, name or word. The turn is summarised without "
        "it and then masked. How much of it can still be read from the KV cache of the turns that stay, and does the "
        "model use it?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        by_layer("accuracy_by_layer_mean", "mean", "a segment's slots averaged"),
        by_layer("accuracy_by_layer_last", "last", "from a segment's last slot"),
        *(
            Heatmaps(
                file="layer_by_segment" if split == "leave-context-out" else f"layer_by_segment_{split}",
                finding="site",
                caption=f"Where the secret can be read: accuracy by layer and segment, {split} split.",
                rows="layer",
                columns="arm",
                x_label="",
                panel="family",
                label="accuracy per label (pale: chance)",
                where={"split": split, "read": "mean", "arm": SEGMENTS},
                middle="chance",
            )
            for split in ("leave-context-out", "random")
        ),
        Dots(
            "use",
            "What the model makes of the secret with three caches; bars are 95 % intervals, often smaller than the "
            "dot.",
            tuple(
                Panel(finding=name, down="condition", line="condition", styles=CACHES, label=label)
                for name, label in USE.items()
            ),
        ),
    ),
    claims=(
        Claim(
            "leak",
            above="information leaks",
            below="less than the floor, which cannot be information: doubt the run",
            unclear="no leak was detected",
        ),
        Claim(
            "use",
            above="the model uses some of what is left",
            below="the retained cache turns the model away from the secret",
            unclear="no use by the model was detected",
        ),
    ),
    labels={
        "n": "{} conversations".format,
        "arm": ARMS,
        "reading": READINGS,
        "family": probings.FAMILIES,
        "condition": {"full": "everything in view", "retained": "T1 and T2 masked", "restart": "restart (recomputed)"},
        "code": {
            "bits": "from the slots",
            "context_bits": "from the conversation alone",
            "uniform_bits": "uniform code",
        },
        "hidden": {
            "code": "a random 5-digit number",
            "name": "a random person's name",
            "topic": "a random word on one of eight topics",
            "sentiment": "a random word for a good or a bad mood",
        },
        "labels": {"code": "digits", "name": "first names", "topic": "topics", "sentiment": "moods"},
    },
    written={
        **probings.WRITTEN,
        **dict.fromkeys(("by_place", "token_accuracy"), percent),
        **dict.fromkeys(("gained", "use"), signed),
        "leak": points,
        "chance": share,
    },
)
