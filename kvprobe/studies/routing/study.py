"""The routing study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.routing import Config
from kvprobe.studies.routing.collect import collect
from kvprobe.studies.routing.conclude import conclude
from kvprobe.wording import percent, plain, points

STYLES = {
    "slip": Style("#d55e00", "s"),
    "harmless": Style("#0072b2"),
    "cold": Style("#56b4e9", "s"),
    "warm": Style("#cc79a7"),
}

STUDY = Study(
    name="routing",
    title="Where tokens are routed after a mistake",
    question=(
        "An answer states a wrong value early on. In a mixture of experts, are the tokens after it routed otherwise "
        "than after a sound answer, more so than after a change that is harmless? Does the mistake act through the "
        "routers? And is the beginning of a conversation routed otherwise when nothing stands before it?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="overlap_by_layer",
            finding="overlap",
            caption="Overlap of the chosen experts with those after the sound draft, on the same later tokens, with "
            "95 % intervals over problems: 1 is the same experts. Dotted: two random choices.",
            x="layer",
            line="draft",
            level=("chance", "random choices"),
            x_label="layer",
            y_label="overlap (Jaccard index)",
            styles=STYLES,
            curves=True,
        ),
        Lines(
            file="start_by_place",
            finding="start",
            caption="The first tokens of a question: overlap of the experts after nothing with those after a "
            "conversation (cold), and after two different conversations (warm). 95 % intervals over problems. Dotted: "
            "two random choices.",
            x="place",
            line="pair",
            level=("chance", "random choices"),
            x_label="token of the question",
            y_label="overlap, mean over layers",
            styles=STYLES,
            curves=True,
            size=(5.6, 3.0),
        ),
        Heatmaps(
            file="overlap_by_token",
            finding="token",
            caption="Overlap with the routing after the sound draft, by layer and later token.",
            rows="layer",
            columns="place",
            panel="draft",
            label="overlap",
            stacked=True,
            middle=1.0,
        ),
        Lines(
            file="undone_by_layer",
            finding="undone_layer",
            caption="The share of the change of the last prediction that goes away if the later tokens are routed as "
            "after the sound draft at one layer. 95 % intervals over problems.",
            x="layer",
            line="draft",
            x_label="layer whose routing is exchanged",
            y_label="share undone",
            styles=STYLES,
            rules=(0.0,),
            curves=True,
        ),
    ),
    claims=(
        Claim(
            "moved",
            above="moves the routing more than the harmless change",
            below="moves the routing less than the harmless change",
            unclear="does not detectably move the routing more or less than the harmless change",
        ),
        Claim(
            "undone",
            above="acts in part through the routers",
            below="is held back by the routers",
            unclear="does not detectably act through the routers",
            negligible=1e-3,
        ),
        Claim(
            "cold",
            above="is routed otherwise",
            below="is routed more alike",
            unclear="is not detectably routed otherwise",
        ),
    ),
    labels={
        "draft": {"slip": "after the slip", "harmless": "after the harmless change", "sound": "after the sound draft"},
        "pair": {"cold": "cold and warm", "warm": "warm and warm"},
    },
    written={
        **dict.fromkeys(
            ("undone", "undone_by", "done_by", "undone_layer", "load", "overlap", "overlap_all", "overlap_last"),
            percent,
        ),
        **dict.fromkeys(("token", "start", "start_all"), percent),
        "bits": lambda value: plain(value, 4),
        "chance": lambda value: f"{100 * value.mean:.1f} %",
        **dict.fromkeys(("moved", "cold"), points),
        "nats": plain,
        "logits": lambda value: plain(value, 1),
    },
)
