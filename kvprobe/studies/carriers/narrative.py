"""What the carriers report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Figure, HeatMap, Report, Section, Table, TokenView, passages_of
from kvprobe.studies.carriers.analyse import BOTH, COMPARED, share
from kvprobe.studies.carriers.collect import DIRECTIONS, QUESTIONS
from kvprobe.studies.carriers.config import Config
from kvprobe.studies.carriers.figures import ROWS, row_name, shares_by_layer
from kvprobe.studies.carriers.groups import GROUPS, HIDDEN, PARTS
from kvprobe.tasks.compaction import compacted_conversation, compactions
from kvprobe.tasks.passcode import contexts, draw_codes
from kvprobe.wording import estimate_of, few_clusters, percent, plain, signed, span

QUESTION = (
    "A turn of a conversation was masked. The slots after it were computed while it was in view, and so the model does "
    "not go on as if that turn had never been said. Which of these slots carry its effect: the summary's text, the "
    "chat template's delimiters, later turns; at which layers, and in K or in V?"
)
NEGLIGIBLE = 1e-3
"""Nats per token below which there is hardly an effect to carry."""
_ROUND_OFF = 100
"""Steps of the dtype's precision that a control may vary by."""
_CLOSE = 0.01
"""Share of the mean KL that a control may move."""

QUESTION_NAMES = {"hidden": "code in the hidden turn", "summary": "answer in the first summary", BOTH: "both questions"}


def narrate(metrics: Mapping[str, Any], config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    warnings = []
    if few := few_clusters(metrics["conversations"], "conversations"):
        warnings.append(few)
    if not all(checks(metrics).values()):
        warnings.append("A control fails (see Controls): doubt this run.")
    return Report(
        title=f"Carriers: {model.name}",
        question=QUESTION,
        answer=f"{answer_carriers(metrics)} {answer_codes(metrics['codes'])}",
        warnings=warnings,
        sections=[
            _shares_section(metrics),
            _layers_section(metrics),
            _codes_section(metrics["codes"]),
            _done_section(metrics, config, model),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "carriers", config, environment, also=["Data: samples.parquet and metrics.json beside this page."]
            ),
        ],
    )


def answer_carriers(metrics: Mapping[str, Any]) -> str:
    """Which slots carry what the hidden turn left behind, in both directions."""
    scale = float(np.mean([each["kl"]["mean"] for each in metrics["scale"]]))
    if scale < NEGLIGIBLE:
        return (
            "There is hardly anything to carry: after the turn was masked and after it was left out, replies differ "
            f"by a KL of {scale:.1e} nats per token."
        )
    groups = ("summary", "summary text", "summary delimiters", "later turns")
    whole, text, delimiters, later = (_share(share(metrics, group)) for group in groups)
    sentence = (
        f"Of what tells the cache that has seen the turn from one that has not (KL {scale:.2g} nats per token), "
        f"swapping in the summary's slots restores {whole} (its text alone {text}, its delimiters {delimiters}), later "
        f"turns' {later}; {_layers_said(metrics)}, {_parts_said(metrics)}."
    )
    return f"{sentence} {_agreement(metrics)}"


def _share(record: Mapping[str, Any]) -> str:
    return "an unknown share" if record["share"] is None else percent(estimate_of(record["share"]))


def _layers_said(metrics: Mapping[str, Any]) -> str:
    most = metrics["most"][DIRECTIONS[0]]
    if most["band"] is None:
        return "which layers do is not known"
    told = percent(estimate_of(most["share"]))
    if most["told"]:
        return f"mostly at layers {most['band']}, which alone restore {told}"
    return f"no band of layers differs significantly from all others (the first is {most['band']}, {told})"


def _parts_said(metrics: Mapping[str, Any]) -> str:
    keys, values = (_share(share(metrics, "all after", part)) for part in ("K", "V"))
    told = f"(V alone {values}, K alone {keys})"
    signs = {_sign(metrics["compared"][way]["V over K"][question]) for way in DIRECTIONS for question in QUESTIONS}
    if signs in ({1}, {-1}):
        return f"and more of it in {'V' if signs == {1} else 'K'} {told}"
    return f"and both questions, both ways, do not agree on whether more of it is in K or in V {told}"


def _sign(gap: Mapping[str, float] | None) -> int:
    """1 or −1 where an interval excludes zero, else 0."""
    return 0 if gap is None else estimate_of(gap).above() - estimate_of(gap).below()


def _agreement(metrics: Mapping[str, Any]) -> str:
    """Whether taking the effect away finds the same carrier as giving it back."""
    signs = [_sign(metrics["compared"][way]["summary over later turns"][BOTH]) for way in DIRECTIONS]
    summary, later = (_share(share(metrics, group, direction=DIRECTIONS[1])) for group in ("summary", "later turns"))
    told = f"swapped for slots that never saw the turn, the summary's remove {summary}, later turns' {later}"
    if signs[0] == signs[1] != 0:
        return f"The other way round agrees: {told}."
    if signs[0] == signs[1]:
        return f"In neither direction do the summary and later turns differ significantly: {told}."
    return f"The other way round does not agree on which carries more: {told}."


def answer_codes(codes: Mapping[str, Any]) -> str:
    """Whether what is carried is which code the turn held."""
    if codes["able"] < 2:
        return (
            "Whether the slots carry which code it was cannot be said: with everything in view the model tells the "
            f"two codes apart in {codes['able']} of {codes['of']} conversations."
        )
    masked, view = estimate_of(codes["masked"]), estimate_of(codes["in_view"])
    told = f"{signed(masked)} logits between two codes, of {plain(view, 1)} with the turn in view"
    if masked.above():
        return f"Some of what they carry is the code itself: {told}."
    if masked.below():
        return f"Of the code itself they carry nothing that helps; the answer is turned away from it: {told}."
    return f"That they carry the code itself was not detected: {told}."


def _shares_section(metrics: Mapping[str, Any]) -> Section:
    def at(question: str, direction: str, group: str, part: str, metric: str) -> Mapping[str, Any]:
        return share(metrics, group, part, question=question, direction=direction, metric=metric)

    rows = []
    for group in GROUPS:
        for part in PARTS:
            told = [at(BOTH, direction, group, part, "kl") for direction in DIRECTIONS]
            pooled = told[0]["share"]
            each = "not known" if pooled is None else f"{100 * pooled['mean'] / max(told[0]['slots'], 1e-9):+.2f}"
            size = f"{told[0]['slots']:.1f} ({told[0]['of_slots']:.0%})"
            rows.append([group, part, size, *(_share(record) for record in told), each])
    apart = [
        [
            name,
            QUESTION_NAMES[question],
            *(
                "not known" if gap is None else signed(estimate_of(gap), 2)
                for gap in (metrics["compared"][direction][name][question] for direction in DIRECTIONS)
            ),
        ]
        for name in COMPARED
        for question in (*QUESTIONS, BOTH)
    ]
    single = [
        [
            QUESTION_NAMES[question],
            group,
            *(_share(at(question, direction, group, "KV", "kl")) for direction in DIRECTIONS),
            *(signed(estimate_of(at(question, d, group, "KV", "logprob")["effect"])) for d in DIRECTIONS),
        ]
        for question in QUESTIONS
        for group in GROUPS
    ]
    return Section(
        title="What was found",
        paragraphs=[
            "A share is 1 − KL(donor ‖ patched) / KL(donor ‖ base), pooled over conversations: 0 where a swap changes "
            "nothing, 1 where it gives the donor's replies, below 0 where it leads away from them. Shares of groups "
            "need not add up to one."
        ],
        figures=[
            Figure(
                "shares",
                "Swaps at all layers, both questions together; bars are 95 % intervals. Restoring: the retained "
                "cache's slots in the recomputed one; removing: the other way round.",
            )
        ],
        tables=[
            Table(
                columns=["slots", "swapped", "how many (of all after)", *DIRECTIONS, "points per slot, restoring"],
                rows=rows,
                caption="Shares at all layers, both questions, with 95 % intervals; beside each the size of its group, "
                "so that none wins by its number of slots unseen.",
            ),
            Table(
                columns=["share of the one less that of the other", "question", *DIRECTIONS],
                rows=apart,
                caption="Paired, with 95 % intervals; above zero, the first carries more. Text and delimiters are the "
                "summary's.",
            ),
            Table(
                columns=[
                    "question",
                    "slots",
                    *DIRECTIONS,
                    *(f"{direction}: log p of the answer" for direction in DIRECTIONS),
                ],
                rows=single,
                caption="Each question alone, K and V swapped. The last two columns are changes in nats, which may be "
                "of either sign.",
            ),
        ],
        views=_token_view(metrics),
    )


def _token_view(metrics: Mapping[str, Any]) -> list[TokenView]:
    tokens = metrics["tokens"]
    if not tokens:
        return []
    return [
        TokenView(
            caption="The first conversation after its hidden turn, asked for the code: the share that each slot "
            "restores when it alone is swapped in, at all layers.",
            tokens=[each["token"] for each in tokens],
            labels=["share restored"],
            values=[[round(each["share"], 4) for each in tokens]],
        )
    ]


def _layers_section(metrics: Mapping[str, Any]) -> Section:
    names = [row_name(*row) for row in ROWS]
    return Section(
        title="By layer",
        paragraphs=[
            f"Restoring: {_layers_said(metrics)}. A band is swapped while all other layers stay as in the base. The "
            "first three rows swap every slot after the hidden turn, the others one kind of slot."
        ],
        figures=[Figure("layers", "Shares of the KL, both questions together.")],
        maps=[
            HeatMap(
                caption=f"{direction.capitalize()}: share of the KL by slots and layers.",
                rows=names,
                columns=metrics["bands"],
                values=[
                    [None if value is None else round(value, 4) for value in row]
                    for row in shares_by_layer(metrics, direction)
                ],
                unit="of the KL",
                row_axis="slots",
                column_axis="layers",
            )
            for direction in DIRECTIONS
        ],
    )


def _codes_section(codes: Mapping[str, Any]) -> Section:
    counted = (
        "With everything in view, the model prefers the right one of two codes, whichever of them was said, in "
        f"{codes['able']} of {codes['of']} conversations; the others are left out here."
    )
    if "groups" not in codes:
        return Section(title="Is it the code itself?", paragraphs=[counted, answer_codes(codes)])
    rows = [
        [
            each["group"],
            signed(estimate_of(each["effect"])),
            "" if each["share"] is None else _percent_fine(each["share"]),
        ]
        for each in codes["groups"]
    ]
    return Section(
        title="Is it the code itself?",
        paragraphs=[
            "Two retained caches of the same conversation with two codes in the hidden turn differ, once it is masked, "
            "only in what their slots have seen. " + counted,
            f"Between them logit(own code) − logit(other code), at the code's first token, differs by "
            f"{signed(estimate_of(codes['masked']))}; with the turn in view by {plain(estimate_of(codes['in_view']))}.",
        ],
        figures=[Figure("codes", "Swaps at all layers, K and V; 95 % intervals over conversations.")],
        tables=[
            Table(
                columns=["slots", "moved towards the other code (logits)", "of the swing in view"],
                rows=rows,
                caption="With 95 % intervals.",
            )
        ],
    )


def _percent_fine(values: Mapping[str, float]) -> str:
    known = estimate_of(values)
    return f"{100 * known.mean:+.2f} % ({span(known, lambda share: f'{100 * share:+.2f}')})"


def _done_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    context, compaction = contexts()[0], compactions()[0]
    code = draw_codes(1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0]
    chat = compacted_conversation(context, compaction, code)
    passages = passages_of(chat, masked=(HIDDEN,), marked=code, only_in=(HIDDEN, "ask"))
    rows = [
        [
            QUESTION_NAMES[each["question"]],
            plain(estimate_of(each["kl"]), 4),
            *(plain(estimate_of(each[name])) for name in ("full", "retained", "recomputed")),
            percent(estimate_of(each["right"])),
        ]
        for each in metrics["scale"]
    ]
    return Section(
        title="What was done",
        paragraphs=[
            f"Each of {metrics['conversations']} conversations is read up to its cut: whole, after which {HIDDEN} "
            f"(struck through) is dropped from the cache (retained), and without {HIDDEN} at the same positions "
            "(recomputed). Both hold the same tokens at the same places; only what these have seen differs. Groups of "
            "slots are swapped from one into the other before the question is read, so that only the question and its "
            "reply see the swap. The second summary's words are the same whatever the code.",
        ],
        passages=passages,
        points=[
            "Restoring swaps the retained cache's slots into the recomputed one: which suffice? Removing goes the "
            "other way: without which is it gone?",
            f"The code's question is as shown; the other is {compaction.summary_question!r}, answered by "
            f"{compaction.summary_answer!r}.",
            "KL is the mean over the tokens of the reply, the true one being fed; log p is of the answer in it.",
            "Summary: the request for it, its text, and the template's tokens around both. Later turns: a follow-up "
            "and its reply.",
        ],
        tables=[
            Table(
                columns=[
                    "question",
                    "KL(retained ‖ recomputed)",
                    "log p: everything in view",
                    "retained",
                    "recomputed",
                    "foretold in view",
                ],
                rows=rows,
                caption="In nats, with 95 % intervals. Foretold: every token of the answer is the likeliest with "
                "everything in view. Conversations where it is not stay in the shares, which are about the difference "
                "between two caches.",
            )
        ],
    )


def checks(metrics: Mapping[str, Any]) -> dict[str, bool]:
    """Which controls hold."""
    controls = metrics["controls"]
    slack = _CLOSE * max(each["largest_kl"] for each in metrics["scale"])
    return {
        "light cone": controls["before_apart"] <= _ROUND_OFF * metrics["precision"]
        and controls["before"]["kl"] <= slack,
        "base itself": controls["self"]["kl"] <= slack,
        "everything": controls["all_missed"]["kl"] <= slack,
    }


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    controls = metrics["controls"]
    verdicts = {name: "holds" if held else "DOES NOT HOLD: doubt this run" for name, held in checks(metrics).items()}
    return Section(
        title="Controls",
        points=[
            f"Light cone: slots before {HIDDEN} cannot know of it. Their K and V differ between the caches by "
            f"{controls['before_apart']:.1e} of the largest; swapping them all moves the KL by at most "
            f"{controls['before']['kl']:.1e} nats. The control {verdicts['light cone']}.",
            f"Base itself: every slot swapped for its own K and V moves the KL by at most {controls['self']['kl']:.1e} "
            f"nats. The control {verdicts['base itself']}.",
            f"Everything: with every slot after {HIDDEN} swapped at all layers, the KL from the donor is at most "
            f"{controls['all_missed']['kl']:.1e} nats, and log p misses the donor's by at most "
            f"{controls['all_missed']['logprob']:.1e}. The control {verdicts['everything']}.",
            "Sizes of groups stand beside their shares.",
        ],
    )


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger "
            "ones.",
            f"{metrics['conversations']} hand-written English conversations of one plan; the summary always follows "
            "the hidden turn at once, so its text is also what stands nearest to it. Distance and role are not "
            "separated.",
            "KL shows that replies differ, not that one is better.",
            "Slots carry jointly: what one group restores may depend on what others hold, which is why both directions "
            "are shown.",
            "Intervals are over conversations. Those that decide the headline hold together; the others are not "
            "adjusted for how many there are. Codes are one pair for each conversation.",
            "Shares weigh each conversation and question by its KL: "
            + ", ".join(
                f"with the {QUESTION_NAMES[each['question']]}, one conversation makes up {each['heaviest']:.0%} of it"
                for each in metrics["scale"]
            )
            + ".",
        ],
    )
