"""What the dangling report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView, Figure, Report, Section, Table, passages_of
from kvprobe.stats import Estimate
from kvprobe.studies.dangling.analyse import PLACES
from kvprobe.studies.dangling.collect import CLOSED, FULL, HIDDEN, MASKED, RANDOM, TOP
from kvprobe.studies.dangling.config import Config
from kvprobe.studies.dangling.figures import ARM_NAMES, PLACE_NAMES, maps
from kvprobe.tasks.facts import conversation, facts
from kvprobe.tasks.ordinal import COLOURS, ITEMS, VERBS, Memo
from kvprobe.tasks.ordinal import PLACES as PLACES_OF_LIST
from kvprobe.wording import estimate_of, few_clusters, percent, plain, signed

QUESTION = (
    "A turn is hidden after later turns have seen it, and then asked about. Where does the attention go that would "
    "have looked at it; which heads miss it; and does anything that is left point to it?"
)
EXACT = 1e-4
"""How far attention gained may be from attention lost."""


def narrate(
    metrics: Mapping[str, Any],
    config: Config,
    model: Model,
    environment: Mapping[str, Any],
    views: Sequence[AttentionView],
) -> Report:
    """The report of a run."""
    return Report(
        title=f"Dangling attention: {model.name}",
        question=QUESTION,
        answer=answer(metrics),
        warnings=warnings(metrics),
        sections=[
            _attention_section(metrics, views),
            _rescue_section(metrics, config),
            *([_closed_section(metrics)] if metrics["closed"] else []),
            *([_memo_section(metrics)] if metrics["memos"] else []),
            _done_section(metrics, config),
            Section(title="Controls", points=[text for text, _ in controls(metrics)]),
            _limits_section(metrics, model),
            reproduce_section(
                "dangling",
                config,
                environment,
                also=[
                    f"Data: samples.parquet, rescues.parquet{', memos.parquet' if metrics['memos'] else ''} and "
                    "metrics.json beside this page."
                ],
            ),
        ],
    )


def answer(metrics: Mapping[str, Any]) -> str:
    """Where the attention goes, and whether the heads that lost most of it are those that matter."""
    largest = max(PLACES, key=lambda place: metrics["went"][place]["mean"])
    said = (
        f"The tokens of the question and the reply spend {percent(estimate_of(metrics['mass']))} of their attention on "
        f"the turn; when it is hidden, the largest part of that goes to {PLACE_NAMES[largest]}: "
        f"{percent(estimate_of(metrics['went'][largest]))}. {rescued(metrics)}"
    )
    return f"{said} {memo_sentence(metrics)}" if metrics["memos"] else said


def rescued(metrics: Mapping[str, Any]) -> str:
    """What the heads with the most dangling attention bring back, beside random ones: at the size that separates the
    two most."""
    every = metrics["rescues"]
    if not estimate_of(metrics["way"]).above():
        return (
            "That hiding the turn lowers the right answer's margin was not detected, so nothing is said of bringing "
            "it back."
        )
    worse = [str(entry["size"]) for entry in every if estimate_of(entry["difference"]["margin"]).below()]
    against = f" With {' or '.join(worse)} they bring back less than random ones." if worse else ""
    apart = [entry for entry in every if estimate_of(entry["difference"]["margin"]).above()]
    if not apart:
        entry = every[-1]
        return (
            "Shown again to the heads that had looked at it most, the turn brings back no more of the answer than "
            f"shown to random ones, as far as this run can tell (with {entry['size']} KV heads, "
            f"{percent(estimate_of(entry[TOP]['margin']))} of the margin against "
            f"{percent(estimate_of(entry[RANDOM]['margin']))}).{against}"
        )
    entry = max(apart, key=lambda entry: entry["difference"]["margin"]["mean"])
    return (
        f"Shown again to the {entry['size']} KV heads that had looked at it most on other conversations (of "
        f"{len(every)} numbers of heads tried, the one that tells most), the turn brings back "
        f"{percent(estimate_of(entry[TOP]['margin']))} of the right answer's margin; shown to random ones, "
        f"{percent(estimate_of(entry[RANDOM]['margin']))}.{against}"
    )


def memo_sentence(metrics: Mapping[str, Any]) -> str:
    """Whether the instrument tells a payload from a pointer where the truth is known."""

    def of(reference: str, follows: str) -> Estimate:
        return estimate_of(_memo(metrics, reference, "crossed", follows))

    told = of("payload", "payload").above(0.5) and of("pointer", "pointer").above(0.5)
    lead = (
        "In a model trained to hold either, an interchange of the summary tells a payload from a pointer"
        if told
        else ("In a model trained to hold either, an interchange of the summary does not tell a payload from a pointer")
    )
    return (
        f"{lead}: with the summary of another list, answers follow what that summary saw in "
        f"{percent(of('payload', 'payload'))} of payloads and in {percent(of('pointer', 'payload'))} of pointers."
    )


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    if few := few_clusters(metrics["prompts"], "conversations"):
        found.append(few)
    if metrics["able"] < 0.75 * metrics["prompts"]:
        found.append(
            f"The model says the right value in {metrics['able']} of {metrics['prompts']} conversations even with "
            "everything in view, so there is little to bring back."
        )
    if failed := [text for text, holds in controls(metrics) if not holds]:
        found.append(f"A control does not hold, doubt this run: {failed[0]}")
    return found


def controls(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each control in words, and whether it holds."""
    off = metrics["balance"]
    holds = off <= EXACT
    found = [
        (
            "Attention is neither made nor lost: what other slots gain is what was spent on the turn, but for "
            f"{off:.1e} (allowed: {EXACT:g}). It {'holds' if holds else 'DOES NOT HOLD'}.",
            holds,
        )
    ]
    if metrics["memos"]:
        seen = [_memo(metrics, reference, "seen", "payload")["mean"] for reference in VERBS]
        holds = min(seen) >= 0.9
        found.append(
            (
                "The trained model answers memos that it has not seen: "
                f"{', '.join(f'{100 * share:.0f} %' for share in seen)} right ({', '.join(VERBS.values())}; 90 % "
                f"wanted). It {'holds' if holds else 'DOES NOT HOLD'}.",
                holds,
            )
        )
    return found


def _attention_section(metrics: Mapping[str, Any], views: Sequence[AttentionView]) -> Section:
    top = sorted(metrics["heads"], key=lambda row: -row["dangling"])[:5]
    return Section(
        title="Where the attention goes",
        points=[
            *(
                f"{PLACE_NAMES[place]}: {percent(estimate_of(metrics['went'][place]))} of it; were no score to change, "
                f"the softmax alone would give {percent(estimate_of(metrics['expected'][place]))}."
                for place in PLACES
            ),
            "Heads that looked at the turn most: "
            + ", ".join(f"{row['layer']}.{row['head']} ({100 * row['dangling']:.0f} % of its attention)" for row in top)
            + ".",
        ],
        figures=[Figure("went", "Mean over heads and conversations."), Figure("heads", "Mean over conversations.")],
        maps=maps(metrics),
        heads=views,
    )


def _rescue_section(metrics: Mapping[str, Any], config: Config) -> Section:
    rows = [
        [
            str(entry["size"]),
            *(percent(estimate_of(entry[sort][measure])) for measure in ("margin", "kl") for sort in (TOP, RANDOM)),
        ]
        for entry in metrics["rescues"]
    ]
    return Section(
        title="Which heads miss it",
        paragraphs=[
            "The turn is hidden from all KV heads but some. Those that had most attention on it are found on one half "
            f"of the conversations and given their view back on the other, beside {config.random} random sets of as "
            "many. 0 % is the turn hidden from all, 100 % the turn in view of all."
        ],
        points=[rescued(metrics)],
        tables=[
            Table(
                columns=["KV heads", "margin: most attention", "margin: random", "KL: most attention", "KL: random"],
                rows=rows,
                caption="Share of the right answer's margin that comes back, and of the KL from the full run that goes "
                "away.",
            )
        ],
        figures=[Figure("rescues", "The same; bands are 95 % intervals over conversations.")],
    )


def _closed_section(metrics: Mapping[str, Any]) -> Section:
    masked, closed = metrics["arms"][MASKED], metrics["arms"][CLOSED]
    return Section(
        title="Does the gap matter?",
        paragraphs=[
            "A hidden turn leaves a gap between positions. Here the turn is evicted and the gap closed, every key "
            "after it being turned to its new position: if heads reached for the turn by distance, attention would "
            "move."
        ],
        points=[
            f"Closing the gap moves {percent(estimate_of(metrics['closed']['moved']))} as much attention between parts "
            "of the cache as hiding the turn did.",
            f"KL from the masked run {plain(estimate_of(closed['kl_masked']), 3)} nats, beside "
            f"{plain(estimate_of(masked['kl']), 3)} that masking itself makes.",
            f"Margin of the right answer: masked {signed(estimate_of(masked['margin']), 2)}, closed up "
            f"{signed(estimate_of(closed['margin']), 2)}, with everything in view "
            f"{signed(estimate_of(metrics['arms'][FULL]['margin']), 2)}.",
        ],
    )


def _memo_section(metrics: Mapping[str, Any]) -> Section:
    rows = [
        [
            f"{verb} ({reference})",
            *(percent(estimate_of(_memo(metrics, reference, arm, "payload"))) for arm in ("seen", "masked", "crossed")),
            percent(estimate_of(_memo(metrics, reference, "crossed", "pointer"))),
        ]
        for reference, verb in VERBS.items()
    ]
    memo = Memo(
        (
            ("red", "apple"),
            ("blue", "boat"),
            ("green", "chair"),
            ("black", "drum"),
            ("white", "eagle"),
            ("pink", "flute"),
        ),
        2,
    )
    return Section(
        title="Payload or pointer, where the truth is known",
        paragraphs=[
            "`ordinal` is a Llama of three layers that ships with kvprobe. It was trained on lists, a summary that "
            "names a place in the list but not the thing, and a question about the thing; by the summary's verb, its "
            "slots had to hold the thing itself (a payload) or only its place (a pointer), or the model was free. The "
            "lists here hold pairs that training never had.",
            f"One memo: {' '.join(memo.texts())}",
        ],
        points=[memo_sentence(metrics)],
        tables=[
            Table(
                columns=[
                    "verb",
                    f"right, {ARM_NAMES['seen']}",
                    f"right, {ARM_NAMES['masked']}",
                    "crossed: what the summary saw",
                    "crossed: what stands there now",
                ],
                rows=rows,
                caption=f"Answers of {metrics['memos'][0]['memos']} memos of each verb, with Wilson intervals; a guess "
                f"that knows the list is right in {1 / len(PLACES_OF_LIST):.1%}, one that does not in "
                f"{(1 / len(ITEMS) + 1 / len(COLOURS)) / 2:.1%}. Crossed: the summary's K and V are those of a run in "
                "whose list the named thing had changed places with another.",
            )
        ],
        figures=[Figure("memos", "The same.")],
    )


def _done_section(metrics: Mapping[str, Any], config: Config) -> Section:
    fact = facts(config.kinds[:1])[0]
    passages = passages_of(conversation(fact, fact.values[0]), masked=(HIDDEN,))
    return Section(
        title="What was done",
        paragraphs=[
            "A conversation states a fact, goes on to something else, and asks for the fact. Everything up to the "
            "question is read with the turn of the fact in view; then the turn is hidden, and the question and the "
            "beginning of the reply are read. One conversation:"
        ],
        passages=passages,
        points=[
            f"{metrics['prompts']} conversations. The right value has the larger logit in {metrics['able']} of them "
            f"with everything in view, in {metrics['able_masked']} with the turn hidden.",
            "The margin is the logit of the right value less that of another, after the last token; KL is from the run "
            "with everything in view.",
        ],
    )


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger "
            "ones.",
            "Attention on a slot is not use of it; the heads given back say what is used, attention alone does not.",
            "Query heads that share a KV head see the same slots, so that views are given back by KV head.",
            "The trained model shows that the interchange can tell a payload from a pointer, not which of them a large "
            "model holds.",
            "Random sets are of any layer and may hold some of the same heads, the more so the larger they are: a "
            "difference may be of layers as well as of heads.",
        ],
    )


def _memo(metrics: Mapping[str, Any], reference: str, arm: str, follows: str) -> Mapping[str, Any]:
    (found,) = (
        entry
        for entry in metrics["memos"]
        if (entry["reference"], entry["arm"], entry["follows"]) == (reference, arm, follows)
    )
    return found
