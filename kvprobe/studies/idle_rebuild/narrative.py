"""What the idle-rebuild report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Figure, Report, Section, Table, passages_of
from kvprobe.studies.idle_rebuild.analyse import SHOWN
from kvprobe.studies.idle_rebuild.collect import AFTER, CONTROLS, LISTENERS, SPEAKERS
from kvprobe.studies.idle_rebuild.config import Config
from kvprobe.studies.idle_rebuild.figures import layer_maps
from kvprobe.tasks.sessions import SUMMARISED, conversation, sessions
from kvprobe.wording import estimate_of, few_clusters, percent, plain, signed

QUESTION = (
    "After three turns a session is compacted: a summary is written, and the turns it stands for are masked. Later it "
    "goes idle, its cache is dropped, and what is in view is read anew. Where does the rebuilt run drift from the one "
    "whose cache was kept?"
)

_ROUND_OFF = 100
"""Steps of the dtype's precision that a control may be off by."""


def narrate(
    metrics: Mapping[str, Any], layers: Any, config: Config, model: Model, environment: Mapping[str, Any]
) -> Report:
    """The report of a run."""
    return Report(
        title=f"Rebuilding an idle session's cache: {model.name}",
        question=QUESTION,
        answer=" ".join([answer_drift(metrics), answer_worse(metrics), answer_cause(metrics), answer_healing(metrics)]),
        warnings=[few] if (few := few_clusters(config.sessions, "sessions")) else [],
        sections=[
            _session_section(config),
            _drift_section(metrics),
            _own_section(metrics, config),
            _healing_section(metrics),
            _cache_section(layers),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "idle_rebuild",
                config,
                environment,
                also=[
                    "Data: samples.parquet (by reply), tokens.parquet (by token of the reply), layers.parquet (K and V "
                    "by layer) and metrics.json beside this page.",
                    "Protocol: setups A and B of the discussion of arXiv 2604.09852, whose restart ablation is one "
                    "number for a whole benchmark; here the drift is measured turn by turn.",
                ],
            ),
        ],
    )


def answer_drift(metrics: Mapping[str, Any]) -> str:
    """Whether the rebuilt run says other things than the compacted one, in a sentence."""
    drift = metrics["drift"]["all"]
    away, agreement = estimate_of(drift["kl_from_compacted"]["rebuilt"]), estimate_of(drift["agreement"]["rebuilt"])
    told = (
        f"it is {plain(away, 3)} nats per token away from the run whose cache was kept, and finds the same token "
        f"likeliest in {percent(agreement)} of places; a run rebuilt before the compaction is "
        f"{drift['kl_from_compacted']['control']['mean']:.1g} nats away"
    )
    if estimate_of(drift["over_control"]).above():
        return f"The rebuilt run drifts: {told}."
    return f"No drift of the rebuilt run was detected: {told}."


def answer_worse(metrics: Mapping[str, Any]) -> str:
    """Whether it predicts the scripted replies worse, in a sentence: to be different is not to be worse."""
    differences = metrics["drift"]["all"]["nll_difference"]
    loss, of_compaction = (estimate_of(differences[pair]) for pair in ("rebuilt - compacted", "compacted - kept"))
    told = (
        f"it changes the surprise at the scripted replies by {signed(loss)} nats per token; the compaction before it "
        f"by {signed(of_compaction)}"
    )
    if loss.above():
        return f"The rebuild costs: {told}."
    if loss.below():
        return (
            f"The rebuild does not cost, it helps: {told}. That may be the compacted cache's fault rather than the "
            "rebuild's merit, see Limits."
        )
    return f"Neither a cost nor a gain of the rebuild was detected: {told}."


def answer_cause(metrics: Mapping[str, Any]) -> str:
    """How much of the drift is provenance and how much position, in a sentence."""
    drift = metrics["drift"]["all"]
    provenance, position = estimate_of(drift["kl_from_compacted"]["in_place"]), estimate_of(drift["position"])
    told = (
        f"recomputed at the positions that its tokens had, it is {plain(provenance, 3)} nats per token away, and "
        f"counting positions from 0 moves it by another {plain(position, 3)}"
    )
    over = estimate_of(drift["provenance_over_position"])
    if over.above():
        return f"More of the drift comes of what the kept cache had seen than of positions: {told}."
    if over.below():
        return f"More of the drift comes of positions than of what the kept cache had seen: {told}."
    return f"What the kept cache had seen and where its tokens stand are indistinguishable as causes: {told}."


def answer_healing(metrics: Mapping[str, Any]) -> str:
    """Whether the drift shrinks as turns are read, and whether it matters when the cache was dropped."""
    healing = metrics["healing"]
    slope = estimate_of(healing["slope"])
    told = (
        f"each turn read since the summary changes it, at one and the same question, by {signed(slope, 4)} nats per "
        f"token, from {healing['right_after']['mean']:.3f} right after the summary to "
        f"{healing['at_its_place']['mean']:.3f} at the question's own place"
    )
    if slope.below():
        sentence = f"The drift heals as turns arrive: {told}."
    elif slope.above():
        sentence = f"The drift grows as turns arrive: {told}."
    else:
        sentence = f"That the drift heals or grows as turns arrive was not detected: {told}."
    if metrics["controls"]["whenever"] <= _slack(metrics):
        sentence += (
            " When after the compaction the cache was dropped makes no difference: a rebuild before turn "
            f"{AFTER[0]} and one before turn {AFTER[-1]} end in the same cache."
        )
    return sentence


def _slack(metrics: Mapping[str, Any]) -> float:
    return _ROUND_OFF * metrics["precision"]


def _session_section(config: Config) -> Section:
    shown = {"system", *SUMMARISED, "summary", *(f"T{turn}" for turn in AFTER[:2])}
    every = passages_of(conversation(sessions()[0]), masked=SUMMARISED)
    passages = [passage for passage in every if passage.segment in shown]
    return Section(
        title="What the model reads",
        paragraphs=[
            f"One of {config.sessions} hand-written sessions of eight turns, as far as turn {AFTER[1]}. Turns 1 to 3 "
            "(struck through) are masked as soon as the summary was read. Turn 4 opens a new matter; turns 5 to 8 ask "
            "back for what was said in turns 1 to 3. All runs read this same text, and at each turn each is held to "
            "the scripted reply.",
        ],
        passages=passages,
        points=[
            "kept: nothing is ever masked; the run that saw, and sees, everything.",
            "compacted: the summary was computed while turns 1 to 3 were in view, and its cache is kept. Every later "
            "token sees that summary and keeps its position.",
            "rebuilt before turn r: the cache was dropped before turn r and computed again from the system prompt, the "
            "summary and the turns after it, at positions from 0, as an engine does.",
            "rebuilt in place: the same at the positions that the tokens had. Held against compacted, only what the "
            "cache had seen differs; held against rebuilt, only positions do.",
            f"control: rebuilt before turn {CONTROLS[-1]}, when everything was still in view, and compacted afterwards "
            "like the others.",
        ],
    )


_TURNS = f"turns {AFTER[0]} to {AFTER[-1]}"
_GROUP_NAMES = {
    "all": _TURNS,
    "new": f"turn {AFTER[0]} (a new matter)",
    "back": f"turns {AFTER[1]} to {AFTER[-1]} (asking back)",
}


def _drift_section(metrics: Mapping[str, Any]) -> Section:
    by_group = [metrics["drift"][group] for group in _GROUP_NAMES]
    drift = metrics["drift"]["all"]
    apart = [
        [arm.replace("_", " "), *(plain(estimate_of(each["kl_from_compacted"][arm]), 3) for each in by_group)]
        for arm in SHOWN
        if arm != "compacted"
    ]
    apart.append(["in place to rebuilt", *(plain(estimate_of(each["position"]), 3) for each in by_group)])
    each_run = [
        [
            arm.replace("_", " "),
            plain(estimate_of(drift["kl_from_kept"][arm]), 3),
            percent(estimate_of(drift["agreement"][arm])),
            plain(estimate_of(drift["nll"][arm]), 3),
        ]
        for arm in SHOWN
    ]
    differences = [
        [
            pair.replace("_", " ").replace(" - ", " − "),
            *(signed(estimate_of(each["nll_difference"][pair])) for each in by_group),
        ]
        for pair in drift["nll_difference"]
    ]
    return Section(
        title="How the rebuilt run predicts the scripted replies",
        paragraphs=[
            "At each turn the run reads the user's message and the header of the answer, and then the scripted reply, "
            "token by token. Divergence says that two runs expect different things; surprise (the negative "
            "log-probability of the scripted token) says which of them expects what comes. The rebuilt run of a turn "
            "is the one that went idle right before it.",
        ],
        tables=[
            Table(
                columns=["KL from compacted", *_GROUP_NAMES.values()],
                rows=apart,
                caption="KL(compacted ‖ run) in nats per token of the reply, with 95 % intervals over "
                "sessions. The last row, KL(in place ‖ rebuilt), is what positions alone do.",
            ),
            Table(
                columns=["run", "KL from kept", "same top token", "surprise"],
                rows=each_run,
                caption=f"Over {_TURNS}. Same top token: in how many places the run and the compacted one find the "
                "same token likeliest. KL and surprise in nats per token.",
            ),
            Table(
                columns=["difference in surprise", *_GROUP_NAMES.values()],
                rows=differences,
                caption="In nats per token, paired reply by reply; above zero, the first of the two predicts worse.",
            ),
        ],
        figures=[
            Figure(
                "drift_by_turn",
                "Divergence from the compacted run and from the one that saw everything, and surprise at the scripted "
                "reply, turn by turn; bands are 95 % intervals. The dotted line is the compaction.",
            ),
            Figure(
                "drift_in_reply",
                "Where in a reply the runs part: divergence from the compacted run by token, over the turns after the "
                "compaction. Left along the scripted reply, right along what the compacted run itself would say.",
            ),
        ],
    )


def _own_section(metrics: Mapping[str, Any], config: Config) -> Section:
    rows = [
        [
            speaker,
            listener.replace("_", " "),
            plain(estimate_of(found["kl"]), 3),
            percent(estimate_of(found["agreement"])),
            plain(estimate_of(found["alike"]), 1),
            percent(estimate_of(found["identical"])),
        ]
        for speaker in SPEAKERS
        for listener in LISTENERS
        if listener != speaker
        for found in [metrics["own"][speaker][listener]]
    ]
    return Section(
        title="What it would say itself",
        paragraphs=[
            f"The scripted reply is not what the model would say. Here a run of reference replies greedily, up to "
            f"{config.continuation} tokens, and the others read that reply: where would they have said something else?",
        ],
        tables=[
            Table(
                columns=["reply of", "read by", "KL", "same token", "first tokens alike", "all alike"],
                rows=rows,
                caption=f"Over {_TURNS}, {metrics['replies']} replies of each; KL in nats per token. First tokens "
                "alike: how many come before the first that the reader would not have said, all of them where there is "
                "none.",
            )
        ],
    )


def _healing_section(metrics: Mapping[str, Any]) -> Section:
    healing = metrics["healing"]
    rows = [
        [f"turn {turn}", *("" if cell is None else plain(estimate_of(cell), 3) for cell in cells)]
        for turn, cells in zip(AFTER, healing["cells"], strict=True)
    ]
    return Section(
        title="Does the drift heal?",
        paragraphs=[
            "Once the session is compacted, whatever is in view can be read at any time with the same result: a run "
            "rebuilt before turn 4 that went on to turn 8 holds the cache of one rebuilt before turn 8. So the columns "
            "of the matrix must be constant below the compaction, and time since the rebuild is no cause of anything. "
            "What may heal is the compacted run, whose later turns stand between it and the summary that saw more.",
            "Along the turns of a session distance and question change together. So each question is also put early, "
            "when only some of the turns after the summary were read, to the compacted and to a rebuilt run; the slope "
            f"compares each question with itself alone. It is {signed(estimate_of(healing['slope']), 4)} nats per "
            "token and turn; from right after the summary to its own place a question's drift changes by "
            f"{signed(estimate_of(healing['change']))}. The surprise that the rebuild adds changes by "
            f"{signed(estimate_of(healing['nll_slope']), 4)} with each turn.",
        ],
        tables=[
            Table(
                columns=["asked after", *(f"{read} turns" for read in range(len(AFTER)))],
                rows=rows,
                caption="KL(compacted ‖ rebuilt) in nats per token of the scripted reply, by how many turns were read "
                "between the summary and the question. The last number of each row is the session as it was written.",
            )
        ],
        figures=[
            Figure(
                "rebuild_matrix",
                "KL(compacted ‖ rebuilt) by the turn before which the cache was dropped and the turn measured.",
            ),
            Figure(
                "drift_by_distance",
                "The same question put after more and more of the session; dots are its own place, bands 95 % "
                "intervals.",
            ),
        ],
    )


def _cache_section(layers: Any) -> Section:
    return Section(
        title="Where in the cache",
        paragraphs=[
            "K and V of the run that was rebuilt in place, against those of the compacted run, at the end of the "
            "session. Both stand at the same positions, so that the difference of keys is not rotation. A part of K or "
            "V that is the same whatever the text makes its relative distance smaller, so compare layers and segments "
            "rather than K with V.",
        ],
        figures=[
            Figure(
                "drift_by_layer",
                "Relative distance of K and V by layer, one line per segment; bands are 95 % intervals. The system "
                "prompt stands before everything and is not shown.",
            )
        ],
        maps=layer_maps(layers),
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    found, slack = metrics["controls"], _slack(metrics)

    def holds(*values: float) -> str:
        return "holds" if max(values) <= slack else "DOES NOT HOLD: doubt this run"

    before = (found["rebuilt_before_compaction"], found["rebuilt_before_compaction_from_kept"])
    cone = (found["system"], found["summary_layer_0"], found["turns_layers_0_1"])
    return Section(
        title="Controls",
        points=[
            "Rebuilt before the compaction, when everything was in view: at no token of any turn is the run further "
            f"than {before[0]:.1e} nats from the compacted one, and before the compaction {before[1]:.1e} from the "
            f"kept one (allowed for round-off: {slack:.1e}); the same token is likeliest in "
            f"{found['before_compaction_agreement']:.2%} of places. The control {holds(*before)}.",
            "Whenever rebuilt: runs rebuilt before different turns after the compaction differ, at any turn, by at "
            f"most {found['whenever']:.1e} nats per token. The control {holds(found['whenever'])}.",
            "Light cone: rebuilt in place, K and V of the system prompt cannot differ from the compacted ones at any "
            "layer, those of the summary not at layer 0, those of later turns not at layers 0 and 1. They do by "
            f"{cone[0]:.1e}, {cone[1]:.1e} and {cone[2]:.1e} of their size; at the last layer summary and later turns "
            f"differ by up to {found['summary_deepest']:.2f} and {found['turns_deepest']:.2f}. The control "
            f"{holds(*cone)}.",
            f"A run that reads its own greedy reply says it again in {found['own_reply_said_again']:.2%} of places; "
            "less than all is round-off between near-equal tokens.",
        ],
    )


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    windows = [window for window in model.geometry.windows if window is not None]
    points = [
        f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger ones, "
        "nor of a benchmark.",
        "Unless the model was trained to go on from masked turns, it is the compacted run that is out of distribution "
        "for it, not the rebuilt one; a difference in surprise holds both effects. Study `compaction` calibrates that "
        "with an irrelevant masked block.",
        "Replies are scripted, so no run ever acts on what it said itself; drift that builds up over a run's own "
        "replies is not seen.",
        f"{metrics['sessions']} hand-written English sessions, one point of compaction, one summary each; intervals "
        "are over these sessions.",
        "A question put early may refer to a turn that was not read. Both runs meet the same text, so their divergence "
        "is fair; how well they predict such a reply is another matter.",
    ]
    if windows:
        points.append(
            f"Some layers of {model.name} see a window of {min(windows)} positions: there, turns 1 to 3 may be out of "
            "the window as well as masked."
        )
    return Section(title="Limits", points=points)
