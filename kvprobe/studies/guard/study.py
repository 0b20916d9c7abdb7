"""The guard study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.guard import Config
from kvprobe.studies.guard.collect import BITS, BOTH, DAMAGED, KNOWN, TALK, TASK, collect, inputs
from kvprobe.studies.guard.conclude import conclude
from kvprobe.tasks.task import shown_task
from kvprobe.wording import formatted, percent, points, share

STYLES = {
    DAMAGED: Style("#d55e00"),
    KNOWN: Style("#7f7f7f", "x", "--"),
    TASK: Style("#0072b2", "s"),
    TALK: Style("#009e73", "^"),
    BOTH: Style("#000000", "D"),
}

STUDY = Study(
    name="guard",
    title="A guard",
    question=(
        "A policy evicts the slots that hold a number far outside what sound caches of the model hold. What does that "
        "cost on sound caches, and what does it save on damaged ones?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="accuracy",
            finding="accuracy",
            caption="Right answers with 95 % intervals over items. Dashed line and grey band: sound cache.",
            x="rate",
            line="arm",
            panel="fault",
            x_label="struck (% of the slots)",
            y_label="right answers (share)",
            styles=STYLES,
            band=("sound", "sound cache"),
            limits=(-0.03, 1.03),
        ),
    ),
    claims=(
        Claim(
            "cost",
            above="costs right answers",
            below="gains right answers",
            unclear="costs no right answers that were detected",
        ),
        Claim("saved", above="saves answers", below="loses answers", unclear="no difference detected"),
        Claim("nearer", above="further away", below="nearer", unclear="no difference detected"),
    ),
    labels={
        "n": "{} items".format,
        "task": shown_task,
        "fault": {**{name: fault.label for name, fault in CATALOGUE.items()}, BITS: "bits flipped"},
        "rate": "{:g} %".format,
        "text": {TASK: "prompts of the task", TALK: "small talk"},
        "arm": {
            DAMAGED: "no guard",
            KNOWN: "exactly the struck slots evicted",
            TASK: "guard learnt from the task",
            TALK: "guard learnt from small talk",
            BOTH: "guard learnt from both",
        },
    },
    written={
        **dict.fromkeys(("sound", "guarded", "accuracy", "alarms", "found", "broken"), percent),
        **dict.fromkeys(("cost", "saved"), points),
        **dict.fromkeys(("kl", "kl_guarded"), formatted(".3f")),
        "nearer": formatted("+.3f"),
        "chance": share,
    },
)
