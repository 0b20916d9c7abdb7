"""What the compaction report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Figure, Report, Section, Table, passages_of
from kvprobe.studies.compaction.analyse import OUTCOMES
from kvprobe.studies.compaction.arms import ARMS, CONTRASTS, HIDDEN_SEGMENTS, MASK, RESTART
from kvprobe.studies.compaction.collect import CALIBRATION
from kvprobe.studies.compaction.config import Config
from kvprobe.studies.compaction.figures import dangling_maps
from kvprobe.tasks.compaction import KINDS, compacted_conversation, compactions
from kvprobe.tasks.passcode import contexts, draw_codes
from kvprobe.wording import estimate_of, percent, plain, points, signed, verdict

QUESTION = (
    "A conversation was summarised and its turns are dropped from the cache. Is it better to mask them and go on with "
    "what was computed while they were in view, or to restart and compute the retained slots again? And how much of "
    "the difference is provenance, how much position, how much the chat delimiters?"
)
_ROUND_OFF = 100
"""Steps of the dtype's precision that a control may vary by."""

_SHARES = ("agreement", "leak", "paired", *(name for name in OUTCOMES if name.startswith(("prefix", "right"))))


def narrate(
    metrics: Mapping[str, Any],
    conversations: pd.DataFrame,
    config: Config,
    model: Model,
    environment: Mapping[str, Any],
) -> Report:
    """The report of a run."""
    return Report(
        title=f"Mask or restart: {model.name}",
        question=QUESTION,
        answer=" ".join(
            [answer_distance(metrics), answer_factors(metrics), answer_questions(metrics), answer_code(metrics)]
        ),
        sections=[
            _conversation_section(model, config),
            _arms_section(metrics),
            _effects_section(metrics),
            _answers_section(metrics, conversations),
            _dangling_section(metrics["dangling"]),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "compaction",
                config,
                environment,
                also=[
                    "Data: samples.parquet (codes), conversations.parquet (continuations and answers, as text), "
                    "probes.parquet and metrics.json beside this page.",
                    "After the Goldberg/Papailiopoulos exchange on masking prefixes, and the restart ablation of arXiv "
                    "2604.09852, which changes provenance, positions and delimiters at once.",
                ],
            ),
        ],
    )


def answer_distance(metrics: Mapping[str, Any]) -> str:
    """Whether masking or restarting stays nearer to the full context, the two differing in provenance alone."""
    gap = estimate_of(metrics["mask_minus_restart"]["kl"])
    mask, restart = (estimate_of(metrics["arms"][arm.name]["kl"]) for arm in (MASK, RESTART))
    told = (
        f"over the next {metrics['full']['reply_tokens']:.0f} tokens its KL from the full context is {plain(mask, 3)} "
        f"nats per token, against {plain(restart, 3)} after a restart at the same positions: {signed(gap)}"
    )
    if gap.below():
        return f"Masking stays nearer to the full context than restarting: {told}."
    if gap.above():
        return f"Restarting stays nearer to the full context than masking: {told}."
    return f"Neither masking nor restarting was detected to stay nearer to the full context: masking, {told}."


def answer_factors(metrics: Mapping[str, Any]) -> str:
    """Which factors move the distance from the full context."""
    effects = {name: estimate_of(metrics["effects"]["kl"][name]) for name in ("provenance", "law", "delimiters")}
    phrases = {
        "provenance": "retaining instead of recomputing",
        "law": "leaving gaps instead of closing them",
        "delimiters": "keeping the delimiters of what was dropped",
    }
    parts = []
    for name, value in effects.items():
        moved = verdict(value, "raises", "lowers", "does not measurably change")
        parts.append(f"{phrases[name]} {moved} it, {signed(value)}")
    return "Taken apart over all eight arms, " + "; ".join(parts[:-1]) + f"; and {parts[-1]}."


def answer_questions(metrics: Mapping[str, Any]) -> str:
    """Whether masking or restarting answers more questions whose answer stands in the summary, and whether that is more
    than masking does whatever it masks."""
    gap = estimate_of(metrics["mask_minus_restart"]["right_summary"])
    mask, restart = (estimate_of(metrics["arms"][arm.name]["right_summary"]) for arm in (MASK, RESTART))
    beyond = estimate_of(metrics["calibration"]["right_summary_beyond_calibration"])
    other = estimate_of(metrics["calibration"]["right_summary_masked_minus_restarted"])
    told = (
        f"{percent(mask)} right after masking, {percent(restart)} after restarting, "
        f"{percent(estimate_of(metrics['full']['right_summary']))} with the full context"
    )
    if not gap.differs():
        return (
            f"Of questions whose answer stands in the summary, masking and restarting are indistinguishable ({told})."
        )
    worse, better = ("masking", "restarting") if gap.below() else ("restarting", "masking")
    sentence = f"Of questions whose answer stands in the summary, {worse} answers fewer than {better} ({told})"
    if not beyond.differs():
        return (
            f"{sentence}; that is indistinguishable from what it does when unrelated text is masked ({points(other)})."
        )
    return (
        f"{sentence}. It is not what masking does to any text: when unrelated text of equal length is masked, the "
        f"difference is {points(other)}, so what matters is that the summary was computed while what it sums up was in "
        "view."
    )


def answer_code(metrics: Mapping[str, Any]) -> str:
    """Whether the hidden code is read and used."""
    leak, paired, gain = (estimate_of(metrics["mask_minus_restart"][name]) for name in ("leak", "paired", "margin"))
    read = "reads more" if leak.above() else "reads no more"
    inside = "reads more" if paired.above() else "reads no more"
    used = verdict(gain, "uses some of it", "is turned away from it", "was not detected to use it")
    share = gain.mean / metrics["full"]["margin"]["mean"]
    return (
        f"Of a random number in the hidden turns, a probe {read} after masking than after restarting in conversations "
        f"that it never saw ({points(leak)}), and {inside} centred on other numbers of the same conversation "
        f"({points(paired)}); the model {used} (margin of the true code {signed(gain)} nats, {share:.2%} of what the "
        "full context gives)."
    )


def _conversation_section(model: Model, config: Config) -> Section:
    context, compaction = contexts()[0], compactions()[0]
    code = draw_codes(1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0]
    chat = compacted_conversation(context, compaction, code)
    passages = passages_of(chat, masked=HIDDEN_SEGMENTS, marked=code, only_in=("T2", "ask"))
    return Section(
        title="What the model reads",
        paragraphs=[
            f"One of {config.contexts} hand-written conversations, each with {config.samples // config.contexts} "
            "random codes. After the second summary, T1 and T2 (struck through) are dropped; every arm does it in its "
            "own way, and T3 and whatever is asked are then read after it, the same text under all arms.",
        ],
        passages=passages,
        points=[
            "provenance: retained slots keep the K and V that they got while T1 and T2 were in view; recomputed ones "
            "are read again without them.",
            "positions: gapped slots stay where they were; contiguous ones close the gap, retained keys being rotated "
            "once, in fp32, from where they were computed.",
            "delimiters: of the dropped messages, the chat template's own tokens are dropped too, or kept, as empty "
            "messages.",
            f"Questions on this conversation: {compaction.summary_question!r} (answer in the summary), "
            f"{compaction.hidden_question!r} (only in the hidden turns), {compaction.neither_question!r} (nowhere).",
        ],
    )


def _written(outcome: str, values: Mapping[str, float], difference: bool = False) -> str:
    value = estimate_of(values)
    if outcome in _SHARES:
        return points(value) if difference else percent(value)
    return signed(value) if difference else plain(value, 3 if outcome == "kl" else 2)


def _arms_section(metrics: Mapping[str, Any]) -> Section:
    shown = ("kl", "agreement", "margin", "leak", "paired")
    rows = [[arm.name, *(_written(outcome, metrics["arms"][arm.name][outcome]) for outcome in shown)] for arm in ARMS]
    rows.append(
        [
            "mask − restart in place",
            *(_written(name, metrics["mask_minus_restart"][name], difference=True) for name in shown),
        ]
    )
    return Section(
        title="The eight arms",
        paragraphs=[
            "KL(full ‖ arm) and the share of tokens on which both would say the same next are over the full context's "
            "own greedy reply to T3's question, fed to every arm. The margin is the log-probability of the true code, "
            "asked for after T3, less the mean over the other codes of the conversation; without knowledge of the code "
            "its mean is zero. The probes read T3's slots, as in the leakage study; chance is "
            f"{metrics['chance']:.0%}, and the recomputed arms, which no code can reach, are the floor at the same "
            "positions and tokens.",
        ],
        tables=[
            Table(
                columns=["arm", *(OUTCOMES[name] for name in shown)],
                rows=rows,
                caption="With 95 % intervals over conversations.",
            )
        ],
        figures=[
            Figure(
                "arms",
                "Orange retained, green recomputed; filled gapped, open contiguous; dots without, squares with the "
                "delimiters.",
            )
        ],
    )


def _effects_section(metrics: Mapping[str, Any]) -> Section:
    names = [" × ".join(factors) for factors in CONTRASTS]
    shown = ("kl", "agreement", "right_summary", "prefix_summary", "prefix_hidden", "margin", "paired")
    rows = [[name, *(_written(o, metrics["effects"][o][name], difference=True) for o in shown)] for name in names]
    return Section(
        title="How much is provenance, how much position, how much delimiters",
        paragraphs=[
            "A full factorial: each main effect is the mean over the four arms at one level less that over the four at "
            "the other, everything else equal. An interaction is half the change of one effect between the levels of "
            "the other.",
        ],
        tables=[
            Table(
                columns=["effect", *(OUTCOMES[name] for name in shown)],
                rows=rows,
                caption="Levels: retained − recomputed, gapped − contiguous, kept − dropped. With 95 % intervals, not "
                f"adjusted for there being {len(names) * len(shown)} of them.",
            )
        ],
        figures=[Figure("effects", "The same effects; filled where the interval excludes zero.")],
    )


def _answers_section(metrics: Mapping[str, Any], conversations: pd.DataFrame) -> Section:
    shown = tuple(name for name in OUTCOMES if name.startswith(("prefix", "right")))
    rows = [[arm.name, *(_written(name, metrics["arms"][arm.name][name]) for name in shown)] for arm in ARMS]
    full = metrics["full"]
    rows.insert(
        0,
        ["full context"] + [percent(estimate_of(full[name])) if name in full else "100 %" for name in shown],
    )
    first = conversations[conversations["context"] == 0].set_index("condition")
    examples = [
        [condition, *(str(first.loc[condition, f"answer_{kind}"]) for kind in KINDS)]
        for condition in ("full", MASK.name, RESTART.name, *CALIBRATION)
    ]
    return Section(
        title="Answers to questions",
        paragraphs=[
            "After T3 the model answers three questions greedily. Snapshot: the share of the answer's tokens before "
            "the first that differs from the answer given with the full context. Right: the answer holds the words "
            "that the text gives.",
        ],
        tables=[
            Table(columns=["arm", *(OUTCOMES[name] for name in shown)], rows=rows, caption="With 95 % intervals."),
            Table(
                columns=["condition", "in the summary", "only in the hidden turns", "nowhere"],
                rows=examples,
                caption="Answers on the conversation above.",
            ),
        ],
    )


def _dangling_section(dangling: Mapping[str, Any]) -> Section:
    mass = estimate_of(dangling["mass"])
    rows = [
        [name, points(estimate_of(dangling["went"][name])), percent(estimate_of(dangling["mask_minus_restart"][name]))]
        for name in dangling["went"]
    ]
    return Section(
        title="Dangling attention",
        paragraphs=[
            f"With everything in view, T3's queries spend {percent(mass)} of their attention on the hidden turns (mean "
            f"over layers, heads and queries; {dangling['most_by_head']:.0%} in the head that spends most). Attention "
            "has no pointers to follow: when the slots are masked, the softmax shares the same mass out among the "
            "slots that are left, in proportion to what they had; above layer 0 the queries change as well.",
        ],
        tables=[
            Table(
                columns=[
                    "where",
                    "more after masking, of all attention",
                    "mask against restart, mean absolute difference",
                ],
                rows=rows,
                caption="With 95 % intervals. The last column is what provenance alone does to where T3 looks.",
            )
        ],
        figures=[Figure("dangling", "Left: who would have looked at what is gone. Right: where that attention goes.")],
        maps=dangling_maps(dangling),
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    cone, calibration = metrics["light_cone"], metrics["calibration"]
    slack = _ROUND_OFF * metrics["precision"]
    holds = "holds" if cone["layers_0_1"] <= slack else "DOES NOT HOLD: doubt this run"
    beyond = estimate_of(calibration["kl_difference_beyond_calibration"])
    if not beyond.differs():
        meant = "so what masking does differently here is no more than it does with text that does not matter"
    else:
        meant = "so what masking does differently here is not what it does with text that does not matter"
    return Section(
        title="Controls",
        points=[
            "Light cone: under all retained arms K and V of T3 at layers 0 and 1 cannot depend on the code. They vary "
            f"by {cone['layers_0_1']:.1e} of their size (allowed for round-off: {slack:.1e}); at the last layer by "
            f"{cone['last_layer']:.1e}. The control {holds}.",
            "Calibration: the text of T1 and T2 is replaced by as many tokens of unrelated conversations, which then "
            "are masked, or dropped in a restart. A model not trained to go on from masked turns may be off balance "
            "whatever was in them. There KL from its own full context is "
            f"{plain(estimate_of(calibration['kl_masked']), 3)} nats after masking and "
            f"{plain(estimate_of(calibration['kl_restarted']), 3)} after restarting, a difference of "
            f"{signed(estimate_of(calibration['kl_masked_minus_restarted']))}. The difference above is beyond this one "
            f"by {signed(beyond)}, {meant}.",
            "From the restarted to the masked arm, on the same tokens, KL is "
            f"{plain(estimate_of(calibration['between']), 3)} nats with the true hidden turns and "
            f"{plain(estimate_of(calibration['between_irrelevant']), 3)} with unrelated ones.",
            "The same calibration for right answers in the summary: "
            f"{percent(estimate_of(calibration['right_summary_masked']))} after masking unrelated text and "
            f"{percent(estimate_of(calibration['right_summary_restarted']))} after restarting without it, a difference "
            f"of {points(estimate_of(calibration['right_summary_masked_minus_restarted']))}; the arms above differ by "
            f"more than that by {points(estimate_of(calibration['right_summary_beyond_calibration']))}.",
            "Ceiling: with the full context the model answers "
            f"{percent(estimate_of(metrics['full']['right_summary']))} of the questions on the summary and "
            f"{percent(estimate_of(metrics['full']['right_hidden']))} of those on the hidden turns with the right "
            "words; where that is low, right answers cannot distinguish the arms.",
        ],
    )


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers, not trained to go on from masked turns. "
            "Memento (arXiv 2604.09852) trains models for it, and found masking better by 15 points on AIME'24; "
            "nothing here speaks of such models.",
            "Nearness to the full context is not quality: an arm may differ from it and be no worse.",
            f"{metrics['contexts']} hand-written English conversations of some two hundred tokens; a few positions "
            "closed up are a small gap, and say nothing of gaps of thousands.",
            "Intervals are over conversations, with the fitted probes held fixed. Those of effects and differences "
            "between arms hold together for the claims of the headline (Bonferroni).",
        ],
    )
