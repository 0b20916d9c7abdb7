"""The features study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.features import Config
from kvprobe.studies.features.collect import PARTS, collect
from kvprobe.studies.features.conclude import conclude
from kvprobe.studies.features.prepare import inputs
from kvprobe.studies.features.scatter import Scatter
from kvprobe.wording import count, formatted, percent, points

SLOTS = {
    "hidden": "T2 itself, after the code",
    "summary2": "summary 2, which saw T2",
    "T3": "T3, which cannot see T2",
    "restart T3": "T3 recomputed (floor)",
}
SPLITS = {"paired": "centred on other codes", "leave-context-out": "new conversations", "random": "same conversations"}
CURVES = tuple(
    Lines(
        file=f"curves_{split}",
        finding="accuracy",
        caption=f"Accuracy per digit by the number of latents or dimensions, {said} ({split}); the last point of a "
        "line is of all. 95 % intervals.",
        x="k",
        line="reader",
        panel="arm",
        row=lambda keys: str(keys["place"]),
        where={"split": split},
        x_label="latents or dimensions",
        y_label="accuracy per digit",
        level=("chance", "chance"),
        size=(4.0, 2.5),
        styles={"latents": Style("#d55e00"), "raw": Style("#0072b2", "s"), "turned": Style("#8c8c8c", "^")},
    )
    for split, said in SPLITS.items()
)


STUDY = Study(
    name="features",
    title="Sparse features after masking",
    question=(
        "A turn that holds a random number is summarised without it and then masked. In terms of sparse features: "
        "which latents differ between the cache that saw the turn and one recomputed without it, on the same text; do "
        "single latents show the number better than single dimensions do; and do the latents that differ matter to the "
        "answer?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    inputs=inputs,
    figures=(
        Lines(
            file="exchange",
            finding="carried",
            caption="How much of the distance between the retained and the recomputed run's predictions goes away when "
            "T3's latents are taken from the recomputed run, by which are taken. 95 % intervals over conversations.",
            x="set",
            line="segment",
            panel="place",
            x_label="",
            y_label="share of KL that goes away",
            styles={"T3": Style("#0072b2")},
            rules={0.0: ""},
            own_scales=True,
        ),
        Scatter(),
        Lines(
            file="densities",
            finding="densities",
            caption="In how many tokens of the conversations latents are active: how many latents by the logarithm of "
            "the share of tokens, in steps of an eighth.",
            x="above",
            line="reader",
            panel="place",
            x_label="share of tokens (log 10)",
            y_label="latents",
            curves=True,
        ),
        *CURVES,
    ),
    claims=(
        Claim(
            "beyond",
            above="more than random ones",
            below="less than random ones",
            unclear="not detectably more or less than random ones",
        ),
        Claim("single", above="better", below="worse", unclear="not detectably better or worse"),
        Claim(
            "seen",
            above="above the recomputed floor",
            below="below the recomputed floor",
            unclear="not detectably above the recomputed floor",
        ),
    ),
    labels={
        "n": "{} conversations".format,
        **dict.fromkeys(("arm", "segment"), SLOTS),
        "reader": {
            "latents": "latents",
            "raw": "raw dimensions",
            "turned": "latents of a turned dictionary",
            PARTS[0]: "reconstruction",
            PARTS[1]: "what it leaves out",
        },
        "set": {
            "whole": "the whole activation",
            "all": "all latents",
            "differing": "latents that differ most",
            "random": "random latents",
        },
        "split": SPLITS,
    },
    written={
        **dict.fromkeys(("unexplained", "unexplained_turned", "recovered", "carried", "accuracy", "whole"), percent),
        **dict.fromkeys(("beyond", "single", "seen"), points),
        **dict.fromkeys(("latents", "count"), count),
        **dict.fromkeys(("recorded", "eta"), lambda share: f"{100 * share.mean:.2g} %"),
        **dict.fromkeys(("retained", "restart"), lambda value: f"{value.mean:.3g}"),
        "p": lambda p: f"{p.mean:.4f}",
        "difference": formatted("+.3g"),
        "active": lambda count: f"{count.mean:.1f}",
        "loss_added": formatted(".3f"),
    },
)
