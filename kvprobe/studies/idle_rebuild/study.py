"""The idle-rebuild study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots import ARM_COLOURS
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.idle_rebuild import Config
from kvprobe.studies.idle_rebuild.collect import collect
from kvprobe.studies.idle_rebuild.conclude import conclude
from kvprobe.studies.idle_rebuild.removals import AFTER
from kvprobe.wording import formatted, percent, signed

RUNS = {
    "kept": Style(ARM_COLOURS["direct"]),
    "compacted": Style(ARM_COLOURS["masked"], "s"),
    "in_place": Style("#e69f00", "D"),
    "rebuilt": Style(ARM_COLOURS["restart"], "^"),
    "control": Style(ARM_COLOURS["before"], "v", "--"),
}
LATER = dict(zip(AFTER, map(Style, ("#443983", "#31688e", "#21918c", "#35b779", "#90d743"), "osD^v"), strict=True))

STUDY = Study(
    name="idle_rebuild",
    title="Rebuilding an idle session's cache",
    question=(
        "Something leaves a session's view: turns that a summary replaces, a tool's result, or the oldest turns. Later "
        "the session goes idle, its cache is dropped, and what is in view is read anew. Where does the rebuilt run "
        "drift from the one whose cache was kept?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="drift_by_turn",
            finding="by_turn",
            caption="How far the runs are from the running one and from the one that saw everything, and the surprise "
            "at the scripted reply that they add to the running one's. Bands are 95 % intervals over sessions. At the "
            "dotted line something leaves the view.",
            x="turn",
            line="run",
            panel="measure",
            y_label="nats per token of the scripted reply",
            styles=RUNS,
            upright=(AFTER[0] - 0.5,),
            curves=True,
            size=(3.2, 3.4),
        ),
        Lines(
            file="drift_in_reply",
            finding="along",
            caption="Where in a reply the runs part: KL from the running one by token, over turns 4 to 8. "
            "Only places that at least three in four replies reach; bands are 95 % intervals.",
            x="token",
            line="run",
            panel="reply",
            x_label="token of the reply",
            y_label="KL from the running one (nats)",
            styles=RUNS,
            curves=True,
            log=True,
            size=(4.0, 3.2),
        ),
        Heatmaps(
            file="rebuild_matrix",
            finding="matrix",
            caption="KL(running ‖ rebuilt) by the turn before which the cache was dropped (rows) and the turn "
            "measured (columns), mean over sessions. Where all leaves at once, columns must be constant from row 4 on.",
            rows="before",
            columns="turn",
            panel="run",
            label="nats per token",
        ),
        Lines(
            file="drift_by_distance",
            finding="asked",
            caption="The same question put after more and more of the session. The last point of each line is the "
            "question's own place; bands are 95 % intervals.",
            x="read",
            line="turn",
            panel="run",
            x_label="turns read between turn 3 and the question",
            y_label="KL(running ‖ rebuilt), nats per token",
            styles=LATER,
            curves=True,
        ),
        Lines(
            file="drift_by_layer",
            finding="distance",
            caption="How far K and V of the run that was rebuilt in place are from the running one's, relative to "
            "their size, by layer and segment; bands are 95 % intervals. The system prompt stands before everything "
            "that is hidden, and is not shown.",
            x="layer",
            line="segment",
            panel="family",
            y_label="‖rebuilt in place − running‖ / ‖running‖",
            drawn=lambda segment: segment != "system",
            styles={"summary": Style("#1a1a1a", "s")} | {f"T{turn}": style for turn, style in LATER.items()},
            curves=True,
            size=(4.0, 3.4),
        ),
    ),
    claims=(
        Claim("drift", above="drifts", below="is nearer than the control", unclear="does not detectably drift"),
        Claim("cost", above="worse", below="better", unclear="not detectably better or worse"),
        Claim(
            "cause",
            above="what it had seen is the larger",
            below="positions are the larger",
            unclear="neither is detectably larger",
        ),
        Claim("healing", above="grows", below="shrinks", unclear="does not detectably change"),
    ),
    labels={
        "n": "{} sessions".format,
        **{key: {"in_place": "rebuilt in place", "compacted": "running"} for key in ("run", "than", "reference")},
        **dict.fromkeys(("turn", "before"), "turn {}".format),
        "turns": {"all": "turns 4 to 8", "new": "turn 4 (a new topic)", "back": "turns 5 to 8 (asking back)"},
        "measure": {
            "from_compacted": "KL from the running one",
            "from_kept": "KL from the run that saw everything",
            "added": "surprise added to the running one's",
        },
        "reply": {"scripted": "the scripted reply", "own": "the reply that the running one would give"},
        "family": {"k": "K (keys)", "v": "V (values)"},
    },
    written={
        **dict.fromkeys(("drift", "cost", "cause", "surprise_over", "change"), signed),
        **dict.fromkeys(("healing", "cost_healing"), formatted("+.4f")),
        **dict.fromkeys(("agreement", "own_agreement", "own_identical"), percent),
        "own_alike": formatted(".1f"),
        "said_again": lambda share: f"{100 * share.mean:.2f} %",
        "nats": formatted(".3f"),
    },
)
