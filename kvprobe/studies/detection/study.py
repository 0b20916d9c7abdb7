"""The detection study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.detection import Config
from kvprobe.studies.detection.collect import collect, inputs
from kvprobe.studies.detection.conclude import conclude
from kvprobe.tasks.task import shown_task
from kvprobe.wording import percent, points, two_digits

STYLES = {
    "hash": Style("#7f7f7f", "x", "--"),
    "text": Style("#d55e00", "^"),
    "surprise": Style("#e69f00", "v"),
    "logprob": Style("#009e73", "s"),
    "canary": Style("#56b4e9", "D"),
    "audit": Style("#cc79a7", "P"),
    "diff": Style("#0072b2", "o"),
}

STUDY = Study(
    name="detection",
    title="Who sees a wrong cache",
    question=(
        "Real bugs of inference engines are planted in caches, from one block of one layer up to their reported size. "
        "Which of them do texts, perplexity, log-probabilities, a canary, an audit, a diff and a hash see, at the same "
        "rate of false alarms, where do these say that they are, and what do they take them for?"
    ),
    config=Config,
    inputs=inputs,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="seen",
            finding="seen",
            caption="Planted bugs that a detector reports, with 95 % intervals over prompts.",
            x="size",
            line="detector",
            panel="pairs",
            x_label="size of the bug",
            y_label="reported (share)",
            styles=STYLES,
            limits=(-0.03, 1.03),
        ),
        Lines(
            file="severity",
            finding="seen_by_move",
            caption="The same, by how far the fault moves a log-probability of the continuation.",
            x="moved",
            line="detector",
            panel="pairs",
            x_label="moved by (nats)",
            y_label="reported (share)",
            styles=STYLES,
            limits=(-0.03, 1.03),
        ),
    ),
    claims=(
        Claim(
            "ahead",
            above="sees more of the bugs than a comparison of texts",
            below="sees fewer of the bugs than a comparison of texts",
            unclear="is not shown to see more or fewer of the bugs than a comparison of texts",
        ),
    ),
    labels={
        "n": "{} prompts".format,
        "task": shown_task,
        "size": {
            "spot": "in one block of one layer",
            "block": "in one block of all layers",
            "layer": "in all blocks of one layer",
            "reported": "as large as reported",
        },
        "detector": {
            "hash": "a hash of the bytes",
            "text": "a comparison of texts",
            "surprise": "perplexity",
            "logprob": "a monitor of log-probabilities",
            "canary": "a canary",
            "audit": "an audit",
            "diff": "a diff",
        },
        "base": {
            "same": "as the reference",
            "chunks": "read in two pieces",
            "batch": "read in a batch",
            "eager": "eager attention",
            "bf16": "stored in bfloat16",
            "fp16": "stored in float16",
        },
        "pairs": {"rounding": "sound: other rounding", "8 bits too": "sound: other rounding, or 8 bits"},
    },
    written={
        **dict.fromkeys(
            ("alarms", "alarms_by_way", "own_alarms", "seen", "seen_by_kind", "seen_by_bug", "seen_by_base",
             "seen_by_move", "seen_where_it_matters", "seen_in_silence", "matters", "matters_by_bug", "silent",
             "silent_by_bug", "nobody", "nobody_by_bug", "alone", "alone_by_bug", "alone_where_it_matters",
             "layer_right", "block_right", "kind_right", "accuracy", "accuracy_by_bug", "sound", "seen_by_score"),
            percent,
        ),
        "ahead": points,
        "limit": two_digits,
        **dict.fromkeys(
            ("silent_nats", "left_out", "called", "moves", "held_out", "planted"), lambda number: f"{number.mean:g}"
        ),
    },
)  # fmt: skip
