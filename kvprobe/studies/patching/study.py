"""The patching study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.patching import Config
from kvprobe.studies.patching.collect import VALUE, collect
from kvprobe.studies.patching.conclude import conclude
from kvprobe.wording import count, percent, points

STYLES = {"K": Style("#0072b2"), "V": Style("#d55e00", "s"), "KV": Style("black", "D"), "resid_pre": Style("#009e73")}
SHARE = "share of the way to the donor"


def maps(finding: str, columns: str, caption: str, stacked: bool = False) -> Heatmaps:
    """Layers from below, by something else."""
    return Heatmaps(
        file=f"layer_by_{'slot' if stacked else columns}",
        finding=finding,
        caption=caption,
        rows="layer",
        columns=columns,
        x_label="KV head" if columns == "head" else columns,
        panel="part",
        drawn=lambda part: part != "resid_pre",
        label=SHARE,
        stacked=stacked,
    )


STUDY = Study(
    name="patching",
    title="From where a fact is read",
    question=(
        "A conversation states a fact and is asked for it two turns later. From which layers, slots and heads of the "
        "cache is the fact read, and from K or from V?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="whole_by_segment",
            finding="segment",
            caption="All layers of a segment swapped at once, with 95 % intervals over facts: 0 is the run unpatched, "
            "1 the donor. Grey: all slots.",
            x="segment",
            line="part",
            panel="part",
            x_label="",
            y_label=SHARE,
            styles=STYLES,
            band=("everything", "all slots"),
            rules={0.0: "", 1.0: ""},
            size=(2.0, 2.6),
        ),
        maps("layer", "segment", "One layer of one segment swapped at a time, mean over facts, on one scale."),
        maps("head", "head", "One KV head of the value's own slots at a time, by attribution, mean over facts."),
        Lines(
            file="reader_and_total",
            finding="layer",
            caption="The value's own slots by layer. K, V: this layer alone, seen by the suffix. Residual stream: "
            "all later layers and tokens go on from there. Shaded: 95 % intervals over facts.",
            x="layer",
            line="part",
            panel="segment",
            where={"segment": VALUE},
            drawn=lambda part: part != "KV",
            y_label=SHARE,
            styles=STYLES,
            rules={0.0: ""},
            curves=True,
        ),
        maps("slot", "token", "One fact: one layer of one slot at a time, by attribution.", stacked=True),
    ),
    claims=(
        Claim("everything", above="carries the fact", below="moves the answer away"),
        Claim(
            "difference",
            above="V carries more than K",
            below="K carries more than V",
            unclear="which carries more is not decided",
        ),
        Claim("interaction", above="part takes both", below="part is in either"),
    ),
    labels={
        "n": "{} facts".format,
        "part": {"KV": "K and V", "resid_pre": "residual stream from this layer on"},
        "score": {"score": "attribution", "linear": "plain gradient"},
        "seen": {f"{who}: KV": f"{who}: K and V" for who in ("reader", "total")},
    },
    written={
        "of the way": percent,
        **dict.fromkeys(("difference", "interaction"), points),
        "summed": lambda share: f"{100 * share.mean:.1f} %",
        "agreement": lambda rho: f"{rho.mean:.2f}",
        **dict.fromkeys(("facts", "able_facts", "runs", "able", "checked", "band_layer"), count),
    },
)
