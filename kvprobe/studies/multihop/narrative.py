"""What the multihop report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.probing.ridge import VARIANCE_FLOOR
from kvprobe.probing.splits import SPLITS, Split
from kvprobe.report.document import Figure, Report, Section, Table, passages_of
from kvprobe.studies.multihop.analyse import CLAIMS, TRANSFERRED
from kvprobe.studies.multihop.arms import ARMS, DISTANCES, FORK
from kvprobe.studies.multihop.collect import SHOWN, USE_ARMS
from kvprobe.studies.multihop.config import Config
from kvprobe.studies.multihop.figures import FAMILY_NAMES, accuracies, layer_maps
from kvprobe.tasks.hops import TURN_NAMES, conversation, sessions
from kvprobe.tasks.passcode import draw_codes
from kvprobe.wording import estimate_of, few_clusters, percent, plain, points, signed

QUESTION = (
    "A session has eight turns. Each is summarised and then masked; the first holds a random 5-digit number that no "
    "summary mentions. How many turns later can the number still be read from the KV cache of a summary, and does it "
    "come straight from the first summary or by hops from one summary to the next?"
)

ROUND_OFF = 100
"""Steps of the dtype's precision that a control may vary by."""
NEGLIGIBLE = 1e-3
"""Nats of margin that rounding alone may make."""
LAST = DISTANCES[-1]


def narrate(
    metrics: Mapping[str, Any], probes: Any, config: Config, model: Model, environment: Mapping[str, Any]
) -> Report:
    """The report of a run."""
    families = ", ".join(FAMILY_NAMES[family] for family in probes["family"].unique())
    return Report(
        title=f"Leak against distance: {model.name}",
        question=QUESTION,
        answer=" ".join([answer_new(metrics), answer_paired(metrics), answer_use(metrics)]),
        warnings=[few] if (few := few_clusters(metrics["sessions"], "sessions")) else [],
        sections=[
            _session_section(model, config),
            _distance_section(metrics, probes),
            _transfer_section(metrics),
            _use_section(metrics),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "multihop",
                config,
                environment,
                also=[
                    f"Families: {families}. Data: samples.parquet, probes.parquet and metrics.json beside this page.",
                    "Protocol: arXiv 2604.09852 (random number in a masked block; in its toy, leak at distances +1, +2 "
                    "and +7), with held-out sessions, a recomputed floor, forced hops and a measure of use added.",
                ],
            ),
        ],
    )


def reach(metrics: Mapping[str, Any], arm: str) -> list[int]:
    """The distances at which a leak is claimed in the paired split."""
    return [distance for distance in DISTANCES if estimate_of(metrics["claims"]["reach"][arm][distance]).above()]


def in_words(distances: Sequence[int]) -> str:
    """Distances as prose, runs of them joined."""
    runs: list[list[int]] = []
    for distance in distances:
        if runs and distance == runs[-1][-1] + 1:
            runs[-1].append(distance)
        else:
            runs.append([distance])
    pieces = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return "none" if not pieces else " and ".join(filter(None, [", ".join(pieces[:-1]), pieces[-1]]))


def answer_new(metrics: Mapping[str, Any]) -> str:
    """What probes read in sessions that they were not trained on."""
    split: Split = "leave-context-out"
    direct = estimate_of(metrics["accuracy"][split]["open"][0])
    leak = estimate_of(metrics["leak"][split]["open"][0])
    beyond = {arm: estimate_of(metrics["claims"]["beyond"][arm]) for arm in ARMS}
    first = (
        f"In sessions that it was not trained on, a linear probe reads {percent(direct)} of the digits from the "
        f"summary that saw them (chance {metrics['chance']:.0%}; over the restart floor {points(leak)})"
    )
    if not leak.has_interval:
        return (
            f"{first}; whether anything is read from the seven summaries after it cannot be said from so few sessions."
        )
    found = [arm for arm in ARMS if beyond[arm].above()]
    if found:
        told = "; ".join(f"{arm} {points(beyond[arm])}" for arm in found)
        arms = f"arm{'s' * (len(found) > 1)} {' and '.join(found)}"
        return f"{first}, and from the seven summaries after it more than the floor in the {arms} ({told})."
    most = max(ARMS, key=lambda arm: beyond[arm].mean)
    return (
        f"{first}, and from the seven summaries after it not significantly more than the floor in any arm (most in "
        f"{most}, {points(beyond[most])})."
    )


def answer_paired(metrics: Mapping[str, Any]) -> str:
    """What probes read when they are centred on other codes of the same session, and by which way it came."""
    accuracy = metrics["accuracy"]["paired"]
    reached = {arm: reach(metrics, arm) for arm in ARMS}
    if not estimate_of(accuracy["open"][0]).has_interval:
        return "Nor can it be said for a probe that is centred on other codes of the same session."
    if not any(any(distances) for distances in reached.values()):
        return (
            "Centred on other codes of the same session, a probe reads nothing significant beyond the first summary "
            "either."
        )
    floor = max(each["mean"] for arm in ARMS for each in metrics["floor"]["paired"][arm])
    ends = {arm: estimate_of(accuracy[arm][LAST]) for arm in ARMS}
    sentence = (
        f"Centred on other codes of the same session it reads {percent(estimate_of(accuracy['open'][0]))} there, "
        f"{percent(estimate_of(accuracy['open'][1]))} one summary on, and seven on {percent(ends['open'])} if all "
        f"summaries stay in view, {percent(ends['skip'])} if only the first does, and {percent(ends['hop-forced'])} if "
        f"only the last does, so that every hop is forced (floors at most {floor:.1%})."
    )
    straight = [
        distance for distance in DISTANCES[FORK:] if estimate_of(metrics["claims"]["straight"][distance]).above()
    ]
    hops = reached["hop-forced"]
    arrives = (
        f"Through forced hops it is above the floor at distances {in_words(hops)} only"
        if hops != list(DISTANCES)
        else "Through forced hops it is above the floor at every distance"
    )
    if not straight:
        return (
            f"{sentence} {arrives}; what comes straight from the first summary is not significantly more than what "
            "comes by hops."
        )
    return (
        f"{sentence} {arrives}; what comes straight from the first summary is more than what comes by hops at "
        f"distances {in_words(straight)}."
    )


def answer_use(metrics: Mapping[str, Any]) -> str:
    """Whether the model uses what is left, decided by the margin of the true code over others."""
    use = metrics["use"]
    gains = {arm: estimate_of(metrics["claims"]["use"][arm]) for arm in ARMS}
    told = "; ".join(f"{arm} {signed(gains[arm])}" for arm in ARMS)
    measured = (
        f"margin of the true code over others when it is asked for, masked less restarted, in nats: {told}; with the "
        f"first turn shown again the margin is {use[SHOWN]['margin']['mean']:.1f}"
    )
    used = [arm for arm in ARMS if gains[arm].above(NEGLIGIBLE)]
    away = [arm for arm in ARMS if gains[arm].below(-NEGLIGIBLE)]
    if not gains[ARMS[0]].has_interval:
        return f"Whether the model uses it cannot be said either ({measured})."
    if used:
        return f"The model uses a little of it in the arm{'s' * (len(used) > 1)} {' and '.join(used)} ({measured})."
    if away:
        arms = f"arm{'s' * (len(away) > 1)} {' and '.join(away)}"
        return (
            f"No use by the model was detected; in the {arms} the retained cache turns it away from the true code "
            f"({measured})."
        )
    return f"No use of it by the model was detected ({measured})."


def _session_section(model: Model, config: Config) -> Section:
    session = sessions()[0]
    code = draw_codes(1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0]
    passages = passages_of(conversation(session, code), masked=TURN_NAMES, marked=code, only_in=(TURN_NAMES[0], "Q"))
    return Section(
        title="What the model reads",
        paragraphs=[
            f"One of {config.sessions} hand-written sessions, each with {config.samples // config.sessions} random "
            "codes. Each turn (struck through) is masked as soon as its summary is written. Distance 0 is the summary "
            "of the first turn, which saw the code; distance d is the summary d turns later, which did not. All "
            "summaries are the same whatever the code, and nothing moves: every token keeps its position.",
        ],
        passages=passages,
        points=[
            "open: every summary sees all earlier ones.",
            "hop-forced: every turn and summary sees the last summary alone; the ones before it are hidden too. What "
            "arrives at distance d has passed through each summary between.",
            "skip: every turn and summary sees the first summary alone; the ones between are hidden. What arrives came "
            "straight from there.",
            "restart: the same summaries at the same positions, the same others in view, computed as if the first turn "
            "had never been. This is the floor: it cannot know the code.",
            "Distances 0 and 1 are the same in all arms.",
        ],
    )


def _distance_section(metrics: Mapping[str, Any], probes: Any) -> Section:
    return Section(
        title="What a linear probe reads, by distance",
        paragraphs=[
            "Ridge probes classify each of the five digits from one family of one layer; a summary's slots are "
            "averaged, or its last slot is taken. The tables hold the accuracy per digit of the one probe that did "
            f"best on an inner fold, so that the search flatters nothing. Chance is {metrics['chance']:.0%}. Intervals "
            "are 95 %, from leaving out one session at a time, and allow for probes that share their training data. "
            f"Those that decide the answer are so wide that all of its {CLAIMS} comparisons hold together. A leak is "
            "the difference to the restart floor at the same distance in the same arm. Bits are what calibrated "
            "probabilities of that probe tell of a digit, of log2(10) = 3.3; the floor tells none.",
        ],
        figures=[
            Figure(
                "by_distance",
                "Accuracy per digit by distance, for three ways to hold samples out; bands are 95 % intervals.",
            ),
            *(
                Figure(
                    f"by_layer_{family}",
                    f"{FAMILY_NAMES[family]}, paired, slots averaged. Below the green line the code cannot reach.",
                )
                for family in probes["family"].unique()
            ),
        ],
        tables=[_distance_table(metrics, split) for split in SPLITS],
        maps=layer_maps(probes, metrics),
    )


def _distance_table(metrics: Mapping[str, Any], split: Split) -> Table:
    rows = [
        [
            arm,
            str(distance),
            percent(estimate_of(metrics["accuracy"][split][arm][distance])),
            percent(estimate_of(metrics["floor"][split][arm][distance])),
            points(estimate_of(metrics["leak"][split][arm][distance])),
            plain(estimate_of(metrics["bits"][split][arm][distance])),
        ]
        for arm in ARMS
        for distance in (DISTANCES if arm == "open" else DISTANCES[FORK:])
    ]
    return Table(
        columns=["arm", "distance", "digits right", "restart floor", "leak", "bits per digit"],
        rows=rows,
        caption=f"{split} split. Distances 0 and 1 are shared by all arms.",
    )


def _transfer_section(metrics: Mapping[str, Any]) -> Section:
    rows = []
    for split in TRANSFERRED:
        for arm in ARMS:
            table = metrics["transfer"][split][arm]
            accuracy = accuracies(table)
            off = accuracy[~np.eye(len(accuracy), dtype=bool)].mean()
            rows.append(
                [
                    split,
                    arm,
                    f"{np.diag(accuracy).mean():.1%}",
                    f"{off:.1%}",
                    percent(estimate_of(table["accuracy"][0][LAST])),
                ]
            )
    return Section(
        title="Is it the same code at every distance?",
        paragraphs=[
            "A probe that was trained at one distance is tested at the others. All distances of an arm share one site "
            "here (the layer, family and read-out of the best inner accuracy, averaged over distances), and no session "
            "is trained and tested on at any distance. Each distance is centred by its own training mean. Where a "
            "probe reads as well at another distance as at its own, the digits lie in the same directions there.",
        ],
        tables=[
            Table(
                columns=["split", "arm", "tested where trained", "tested elsewhere", f"trained at 0, tested at {LAST}"],
                rows=rows,
                caption=f"Digits right, mean over distances; chance {metrics['chance']:.0%}.",
            )
        ],
        figures=[
            Figure("transfer", "Digits right, in percent, by the distance trained at and the distance tested at.")
        ],
    )


def _use_section(metrics: Mapping[str, Any]) -> Section:
    use = metrics["use"]
    rows = [
        [
            arm,
            plain(estimate_of(use[arm]["logprob"])),
            signed(estimate_of(use[arm]["margin"])),
            signed(estimate_of(use[arm]["delta_margin"])) if arm in ARMS else "",
            percent(estimate_of(use[arm]["token_accuracy"])),
        ]
        for arm in USE_ARMS
    ]
    return Section(
        title="What the model makes of it",
        paragraphs=[
            "That a probe can read something does not mean that the model uses it. After the eighth summary the model "
            "is asked for the code, with the caches that the arms left (the question sees what a ninth turn would "
            "see), with those of the restarts, and once with the first turn shown again to the question alone, beside "
            f"all summaries ({SHOWN}). A cache may make all codes likelier; only the margin of the true code over the "
            "session's other codes tells use.",
        ],
        tables=[
            Table(
                columns=[
                    "cache",
                    "log p(true code)",
                    "margin over other codes",
                    "less its restart",
                    "code tokens right",
                ],
                rows=rows,
                caption="In nats, with 95 % intervals, the true code given token by token.",
            )
        ],
        figures=[
            Figure(
                "use",
                "Margin gained by masking instead of restarting, and code tokens right; dashed: no use, and a guess "
                "among digits.",
            )
        ],
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    slack = ROUND_OFF * metrics["precision"]
    rows = []
    for arm in ARMS:
        for distance in DISTANCES if arm == "open" else DISTANCES[FORK:]:
            cone = metrics["light_cone"][arm][distance]
            there = "beyond the last layer" if cone["there"] is None else f"{cone['there']:.1e}"
            rows.append([arm, str(distance), str(cone["lowest"]), f"{cone['below']:.1e}", there, f"{cone['last']:.1e}"])
    worst = max(cone["below"] for arm in ARMS for cone in metrics["light_cone"][arm])
    holds = "holds" if worst <= slack else "DOES NOT HOLD: doubt this run"
    return Section(
        title="Controls",
        points=[
            "Light cone: a slot that attends to slots which vary with the code from layer l on does so itself from "
            "layer l + 1 on. Each forced hop so costs at least one layer, and below the layers of the table nothing "
            f"may vary with the code. It varies by at most {worst:.1e} of its size there (allowed for round-off: "
            f"{slack:.1e}). The control {holds}.",
            "Penalty, layer, family and read-out are chosen on an inner fold; each test fold is touched once.",
            "The restart floor is computed once per session and arm and shared by its codes, which cannot reach it. In "
            "the paired split nothing of it is left to read, and the probe guesses the commonest digit.",
            f"Features that vary by less than {VARIANCE_FLOOR:.0e} of their size are treated as constant.",
            "Codes are drawn uniformly, not balanced within a session.",
        ],
        tables=[
            Table(
                columns=["arm", "distance", "lowest layer", "variation below it", "there", "at the last layer"],
                rows=rows,
                caption="Largest variation of K and V with the code, relative to their size, and the lowest layer that "
                "the code can reach.",
            )
        ],
    )


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger "
            "ones, or of models trained to go on from masked turns.",
            f"{metrics['sessions']} hand-written English sessions of short turns and {metrics['samples']} codes; "
            "intervals are over such sessions. There are 20 places and three splits, and of the 60 intervals in the "
            "tables one or two lie above zero by chance; those that decide the answer are wide enough for all.",
            "Bits fall below zero where a probe is confident and wrong; one odd session can cost more bits than all "
            "others give, which accuracy does not show.",
            "In the arms that hide summaries, what is hidden differs as well as the way: a turn that sees fewer "
            "summaries attends more to those it sees.",
            "Distance and place in the session are one here: the summary at distance 7 is always the eighth.",
            "A linear probe that fails does not prove absence; one that succeeds does not prove use. The paired and "
            "the random split need other codes of the same session, which an attacker who sees one cache once has not.",
        ],
    )
