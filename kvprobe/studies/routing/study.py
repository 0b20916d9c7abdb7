"""The routing study: its declaration."""

from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.routing import Config
from kvprobe.studies.routing.collect import collect
from kvprobe.studies.routing.conclude import conclude
from kvprobe.wording import percent, plain, points

NEGLIGIBLE = 0.01
"""Of the damage, a share that is of no account; and so many nats of a log-probability."""

STYLES = {
    "sound, slip": Style("#d55e00", "s"),
    "sound, harmless": Style("#0072b2"),
    "slip, harmless": Style("#009e73", "D"),
    "slip": Style("#d55e00", "s"),
    "harmless": Style("#0072b2"),
    "cold": Style("#56b4e9", "s"),
    "nothing": Style("#7f7f7f", "^"),
    "warm": Style("#cc79a7"),
    "cold, routed warm": Style("#0072b2", "D", "--"),
    "warm, routed cold": Style("#d55e00", "v", "--"),
}


def by_overlap(file: str, finding: str, x: str, x_label: str, caption: str, **more: Any) -> Lines:
    """Overlap along something, beside that of random choices."""
    return Lines(
        file=file,
        finding=finding,
        x=x,
        x_label=x_label,
        line="pair",
        caption=f"{caption} 1 is the same experts; dotted: two random choices. 95 % intervals over problems.",
        level=("chance", "random choices"),
        y_label="overlap (Jaccard index)",
        styles=STYLES,
        curves=True,
        **more,
    )


STUDY = Study(
    name="routing",
    title="Where tokens are routed after a mistake",
    question=(
        "An answer states a wrong value early on. In a mixture of experts, are the tokens after it routed as after a "
        "sound answer, or as where the same value is right? Does the mistake act through the routers? And is the "
        "beginning of a conversation routed differently from what comes later?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        by_overlap(
            "overlap_by_layer",
            "overlap",
            "layer",
            "layer",
            "Overlap of the experts of the same later tokens after two drafts.",
        ),
        by_overlap(
            "start_by_place",
            "start",
            "place",
            "token of the question",
            "The first tokens of a question, mean over layers: overlap of their experts after a conversation with "
            "those at the beginning of one (cold), after nothing at all, and after another conversation (warm).",
            size=(5.6, 3.0),
        ),
        Lines(
            file="course_by_step",
            finding="log_probability",
            caption="How likely the right value of each step is, the steps before it given, at the beginning of a "
            "conversation (cold), after another one (warm), and with the routing of the other. 95 % intervals over "
            "problems.",
            x="step",
            line="run",
            x_label="step of the answer",
            y_label="log-probability (nats)",
            styles=STYLES,
            curves=True,
        ),
        Heatmaps(
            file="overlap_by_token",
            finding="token",
            caption="Overlap after two drafts, by layer and later token.",
            rows="layer",
            columns="place",
            panel="pair",
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
            rules={0.0: ""},
            curves=True,
        ),
    ),
    claims=(
        Claim(
            "alike",
            above="are routed rather as where that value is right than as after the sound draft",
            below="are routed rather as after the sound draft than as where that value is right",
            unclear="are not detectably routed more like either",
        ),
        Claim(
            "undone",
            above="goes in part through the routers",
            below="is held back by the routers",
            unclear="does not detectably go through the routers",
            negligible=NEGLIGIBLE,
        ),
        Claim(
            "cold",
            above="is routed differently from",
            below="is routed more like",
            unclear="is not detectably routed differently from",
        ),
        Claim(
            "slower",
            above="are less likely after a cold start",
            below="are likelier after a cold start",
            unclear="are not detectably less likely after a cold start",
            negligible=NEGLIGIBLE,
        ),
        Claim(
            "first",
            above="loses more to a cold start than later ones",
            below="loses less to a cold start than later ones",
            unclear="does not detectably lose more to a cold start than later ones",
            negligible=NEGLIGIBLE,
        ),
        Claim(
            "warmed",
            above="helps a cold start",
            below="harms a cold start",
            unclear="does not detectably help a cold start",
            negligible=NEGLIGIBLE,
        ),
    ),
    labels={
        "n": "{} problems".format,
        "draft": {"slip": "after the slip", "harmless": "after the harmless change", "sound": "after the sound draft"},
        "pair": {
            "sound, slip": "sound draft and slip",
            "sound, harmless": "sound draft and harmless change",
            "slip, harmless": "slip and harmless change",
            "cold": "beginning (cold) and later",
            "nothing": "after nothing and later",
            "warm": "later and later (warm)",
        },
        "run": {
            "cold": "cold start",
            "warm": "after another conversation",
            "cold, routed warm": "cold start, routed as warm",
            "warm, routed cold": "warm, routed as a cold start",
        },
    },
    written={
        **dict.fromkeys(
            ("undone", "undone_by", "done_by", "undone_layer", "load", "overlap", "overlap_all", "overlap_last"),
            percent,
        ),
        **dict.fromkeys(("token", "start", "start_all", "kept", "course", "course_all"), percent),
        "bits": lambda value: plain(value, 4),
        "chance": lambda value: f"{100 * value.mean:.1f} %",
        **dict.fromkeys(("alike", "cold"), points),
        **dict.fromkeys(
            ("slower", "first", "warmed", "log_probability", "log_probability_all"), lambda value: plain(value, 5)
        ),
        "nats": plain,
        "logits": lambda value: plain(value, 1),
    },
)
