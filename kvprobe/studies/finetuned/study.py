"""The finetuned study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.finetuned import Config
from kvprobe.studies.finetuned.collect import ALL, collect, inputs
from kvprobe.studies.finetuned.conclude import UNIT, conclude
from kvprobe.wording import formatted, percent, points

STYLES = {"K": Style("#0072b2"), "V": Style("#d55e00", "s"), "KV": Style("black", "D")}
SHARE = "share of the way to the other model"

STUDY = Study(
    name="finetuned",
    title="Where a fine-tune writes its behaviour",
    question=(
        "A model and its fine-tune read the same conversation. If K and V of one are put into the cache of the other, "
        "by segment and by layer, which of them takes over the other's answer; and does the answer change where the "
        "weights did?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="whole",
            finding="whole",
            where={"reader": "base"},
            caption="All layers of a segment of the fine-tune's cache, read by the base from its last token on, with "
            "95 % intervals over conversations: 0 is the base's own answer, 1 the fine-tune's.",
            x="segment",
            line="part",
            panel="behaviour",
            x_label="",
            y_label=SHARE,
            styles=STYLES,
            rules={0.0: "", 1.0: ""},
        ),
        Heatmaps(
            file="bands",
            finding="band",
            where={"reader": "base", "part": "KV"},
            caption="One band of layers of one segment of the fine-tune's cache, read by the base; mean over "
            "conversations, on one scale. Rows begin at the layer that they name.",
            rows="layer",
            columns="segment",
            x_label="",
            panel="behaviour",
            label=SHARE,
        ),
        Lines(
            file="handover",
            finding="handover",
            caption="The other model reads up to the end of a segment, this one the rest and the last token.",
            x="segment",
            line="reader",
            panel="behaviour",
            x_label="handed over after",
            y_label=SHARE,
            rules={0.0: "", 1.0: ""},
        ),
        Lines(
            file="weights",
            finding="weights",
            where={"reader": "base"},
            caption="What the adapter adds to the weights of one band of layers, given to the base alone, with 95 % "
            "intervals over conversations.",
            x="layer",
            panel="behaviour",
            x_label="first layer of the band",
            y_label=SHARE,
            rules={0.0: ""},
            curves=True,
        ),
    ),
    claims=(
        Claim(
            "whole",
            above="moves the answer towards the other model's",
            below="moves the answer away from the other model's",
            unclear="is not shown to move the answer",
        ),
        Claim(
            "content",
            above="V carries more than K",
            below="K carries more than V",
            unclear="which carries more is not decided",
        ),
    ),
    labels={
        "n": "{} conversations".format,
        "behaviour": {
            "german": "answers in German",
            "pirate": "answers as a pirate",
            "oslo": "the Eiffel Tower in Oslo",
        },
        "reader": {"base": "the base", "tuned": "the fine-tune"},
        "place": {
            "base": "the base's cache",
            "tuned": "the fine-tune's cache",
            "shuffled": "shuffled changes",
            "other": "another behaviour",
        },
        "part": {"KV": "K and V"},
        "segment": {ALL: "all slots"},
    },
    written={
        UNIT: percent,
        "content": points,
        "says": percent,
        **dict.fromkeys(("margin", "rest", "agreement"), formatted("+.2f")),
    },
)
