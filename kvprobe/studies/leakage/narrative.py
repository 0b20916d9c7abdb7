"""What the leakage report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.probing.intervals import LEVEL
from kvprobe.probing.ridge import VARIANCE_FLOOR
from kvprobe.report.document import Figure, Report, Section, Table, passages_of
from kvprobe.studies.leakage.analyse import Analysis
from kvprobe.studies.leakage.answers import WORDS, answer_probe, answer_use
from kvprobe.studies.leakage.collect import HIDDEN_SEGMENTS
from kvprobe.studies.leakage.config import Config
from kvprobe.studies.leakage.figures import ARM_NAMES, FAMILY_NAMES, layer_maps
from kvprobe.studies.leakage.readings import readings_section
from kvprobe.tasks.passcode import conversation
from kvprobe.tasks.secrets import secret
from kvprobe.wording import estimate_of, few_clusters, percent, plain, points

QUESTION = (
    "A conversation holds {secret} in one turn (T2). The turn is summarised without it and then masked. How much of it "
    "can still be read from the KV cache of the turns that stay, and does the model use it?"
)


_ROUND_OFF = 100
"""Steps of the dtype's precision that a control may vary by."""

SPLIT_MEANING = {
    "random": "the probe has seen the same conversation with other secrets",
    "leave-context-out": "the probe never saw the conversation",
    "paired": "as leave-context-out, but features are centred within each conversation, which takes several secrets of "
    "the very conversation that is read",
}


def narrate(analysis: Analysis, config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    metrics, words = analysis.metrics, WORDS[config.secret]
    return Report(
        title=f"Leakage after masking: {model.name}, {words.known}",
        question=QUESTION.format(secret=words.secret),
        answer=" ".join([answer_probe(metrics), answer_use(metrics)]),
        warnings=_warnings(metrics, config),
        sections=[
            _conversation_section(model, config),
            _accuracy_section(metrics, analysis.probes),
            readings_section(analysis, config),
            _use_section(metrics),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "leakage",
                config,
                environment,
                also=[
                    f"Families: {', '.join(FAMILY_NAMES.values())}. Data: samples.parquet, probes.parquet, "
                    "readings.parquet and metrics.json beside this page.",
                    "Protocol: arXiv 2604.09852 (random number in a masked block), with held-out contexts, a "
                    "recomputed floor, control tasks and a measure of use added.",
                ],
            ),
        ],
    )


SINGLE_CONTEXT_WARNING = (
    "This does not generalise: all samples share one conversation, as in most published probes. The accuracy below "
    "separates secrets within this one template; a probe may do so by features that exist in no other conversation. It "
    "does not say that they can be read from a conversation that the probe has not seen. Run with more contexts for "
    "that."
)


def _warnings(metrics: Mapping[str, Any], config: Config) -> list[str]:
    few = few_clusters(metrics["clusters"], "conversations")
    return [SINGLE_CONTEXT_WARNING] if config.contexts == 1 else [few] if few else []


def _conversation_section(model: Model, config: Config) -> Section:
    hidden, words = secret(config.secret), WORDS[config.secret]
    context = hidden.contexts[0]
    text = hidden.draw(1, 1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0][0]
    passages = passages_of(conversation(context, text), masked=HIDDEN_SEGMENTS, marked=text, only_in=("T2", "T3"))
    return Section(
        title="What the model reads",
        paragraphs=[
            f"One of {config.contexts} hand-written conversations, each with {config.samples // config.contexts} "
            f"random secrets (here {words.secret}). T1 and T2 (struck through) are masked when T3 begins: no later "
            "token can attend to them, but summary 2 was computed while T2 was in view, and T3 attends to summary 2. "
            f"The text of summary 2 is the same whatever {words.known} is. Nothing moves: every token keeps its "
            "position.",
        ],
        passages=passages,
        points=[
            "direct: the slots of summary 2, computed while T2 was in view.",
            f"masked: the slots of T3 up to {words.known}, computed when T2 could no longer be seen. What they know of "
            "it came through summary 2.",
            "restart: the same tokens at the same positions, computed afresh without T1 and T2. This is the floor: it "
            f"cannot know {words.known}. The floor of direct is summary 2, computed in the same way.",
            "less its restart: the slots of an arm minus those of its restart, which takes away all that the visible "
            "text itself puts there. Anyone who has the visible text can compute that; it takes no other secret of the "
            "conversation.",
            f"before: the slots of summary 1, computed before {words.known} was said.",
            f"hidden: the slots of T2 itself after {words.known}; the ceiling.",
        ],
    )


def _accuracy_section(metrics: Mapping[str, Any], probes: Any) -> Section:
    splits = list(metrics["accuracy"])
    arms = [arm for arm in ARM_NAMES if arm in metrics["accuracy"][splits[0]]]
    rows = [
        [ARM_NAMES[arm], *(percent(estimate_of(metrics["accuracy"][split][arm])) for split in splits)] for arm in arms
    ]
    claims = []
    for arm in (arm for arm in arms if arm in metrics["leak"][splits[0]]):
        of = {
            name: [metrics[name][split].get(arm) for split in splits]
            for name in ("leak", "selectivity", "bits", "scan")
        }
        claims += [
            [f"{arm}: leak", *(points(estimate_of(each)) for each in of["leak"])],
            ["selectivity", *(points(estimate_of(each)) if each else "" for each in of["selectivity"])],
            ["bits", *(plain(estimate_of(each)) for each in of["bits"])],
            ["sites found", *map(_found, of["scan"])],
        ]
    return Section(
        title="What a linear probe reads",
        paragraphs=[
            f"Ridge probes classify the {WORDS[metrics['secret']].read} from K, V or the residual stream of one layer; "
            "a segment's slots are averaged, or its last slot is taken. The table holds the accuracy per label of the "
            "one probe that did best on an inner fold, so the search over layers flatters nothing; the figures show "
            "every layer. Selectivity is the accuracy less that of the same procedure on a control task, in which each "
            "(conversation, label) has a random label of its own, so that it can only be memorised. Bits are what the "
            "probe's calibrated probabilities are worth above class frequencies; below zero they mislead. "
            f"Chance is {metrics['chance']:.0%}. Intervals are 95 %, from leaving out one "
            + ("sample" if len(splits) == 1 else "conversation")
            + " at a time, and allow for probes that share their training data. Those of the answer are wider, so that "
            "all its claims hold together.",
        ],
        tables=[
            Table(
                columns=["slots", *splits],
                rows=rows,
                caption="; ".join(f"{split}: {SPLIT_MEANING[split]}" for split in splits) + ".",
            ),
            Table(
                columns=["above its floor", *splits],
                rows=claims,
                caption="Leak: accuracy less that of the restart. Sites found: layers, families and read-outs at which "
                f"the scan finds more than the conversation tells, at a family-wise p of {LEVEL} or less; the lowest "
                "of these layers.",
            ),
        ],
        figures=[
            Figure(
                "accuracy_by_layer_mean",
                "Accuracy per label by layer, slots averaged; bands are 95 % intervals.",
            ),
            Figure("accuracy_by_layer_last", "The same, from the last slot of each segment."),
            Figure(
                "layer_by_segment",
                f"Where {WORDS[metrics['secret']].known} can be read: accuracy by layer and segment "
                f"({metrics['headline_split']} split, mean).",
            ),
        ],
        maps=layer_maps(probes, metrics),
    )


def _found(scan: Mapping[str, Any]) -> str:
    if not scan["found"]:
        return f"0 of {scan['sites']}"
    return f"{scan['found']} of {scan['sites']}, from layer {scan['lowest_layer']}"


def _use_section(metrics: Mapping[str, Any]) -> Section:
    use = metrics["use"]
    rows = [
        [
            name,
            plain(estimate_of(use[arm]["logprob"])),
            plain(estimate_of(use[arm]["margin"])),
            percent(estimate_of(use[arm]["token_accuracy"])),
            plain(estimate_of(use[arm]["kl_from_full"])),
        ]
        for arm, name in (
            ("full", "full context"),
            ("retained", "retained (T1, T2 masked)"),
            ("restart", "restart (recomputed)"),
        )
    ]
    rows.append(
        [
            "retained − restart",
            plain(estimate_of(use["delta_u"])),
            plain(estimate_of(use["delta_margin"])),
            "",
            plain(estimate_of(use["delta_kl"])),
        ]
    )
    return Section(
        title="What the model makes of it",
        paragraphs=[
            "That a probe can read something does not mean that the model uses it. Here the model itself is asked for "
            f"{WORDS[metrics['secret']].known} at the end of T3, under the same text and positions, with three caches. "
            "The log-probability is of the whole true secret, each token given the true ones before it. It may rise "
            "because a cache makes all of them likelier; only the margin over others tells use.",
        ],
        tables=[
            Table(
                columns=[
                    "cache",
                    "log p(true)",
                    "margin over others",
                    "tokens right",
                    "KL from full context",
                ],
                rows=rows,
                caption="In nats, with 95 % intervals. Margin: log p(true) less the mean over the other secrets of the "
                "conversation, token by token; its mean is zero for a cache that does not know the secret, whatever it "
                "prefers. KL is of the next-token distribution where the secret should begin.",
            )
        ],
        figures=[Figure("use", "The same three measures; bars are 95 % intervals, often smaller than the dot.")],
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    cone = metrics["light_cone"]
    split = metrics["headline_split"]
    before = estimate_of(metrics["accuracy"][split]["before"])
    ceiling = estimate_of(metrics["accuracy"][split]["hidden"])
    slack = _ROUND_OFF * metrics["precision"]
    holds = "holds" if cone["layers_0_1"] <= slack else "DOES NOT HOLD: doubt this run"
    checks = [
        "Light cone: with one turn masked between, K and V of T3 at layers 0 and 1 cannot depend on the secret. They "
        f"vary by {cone['layers_0_1']:.1e} of their size (allowed for round-off: {slack:.1e}); at the last layer by "
        f"{cone['last_layer']:.1e}. The control {holds}.",
        f"Before: slots that stand before the secret are read at {percent(before)}; chance is {metrics['chance']:.0%}.",
        f"Ceiling: the slots of T2 after the secret are read at {percent(ceiling)} under the same split.",
        "Secrets are drawn at random, not balanced within a conversation: balanced labels would push the floor below "
        "chance.",
        "P-values: labels are permuted within conversations and every probe is fitted again, at one fixed penalty; "
        "family-wise by the step-down maximum over all layers, families and read-outs.",
        "Penalty, layer, family and read-out are chosen on an inner fold; each test fold is touched once.",
        "The restart floor is computed once per conversation and shared by its secrets, which cannot reach it. In the "
        "paired split nothing of it is left to read, and the probe guesses the commonest label.",
        f"Features that vary by less than {VARIANCE_FLOOR:.0e} of their size are treated as constant.",
    ]
    return Section(title="Controls", points=checks)


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger "
            "ones.",
            "Unless the model was trained to go on from masked turns, a retained cache is out of distribution for it. "
            "This run has no arm with an irrelevant masked block to calibrate that.",
            "A linear probe that fails does not prove absence; one that succeeds does not prove use.",
            f"{metrics['contexts']} hand-written English conversations and {metrics['samples']} secrets; intervals are "
            "over such conversations, and say nothing of other kinds of text.",
            "The paired split and the random split need other secrets of the same conversation. An attacker who sees "
            "one cache once has neither.",
        ],
    )
