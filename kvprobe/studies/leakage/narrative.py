"""What the leakage report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from typing import Any

from kvprobe.model import Model
from kvprobe.narrative import Figure, Passage, Report, Section, Table
from kvprobe.stats import Estimate
from kvprobe.studies.leakage.config import Config
from kvprobe.studies.leakage.figures import ARM_NAMES, FAMILY_NAMES
from kvprobe.tasks.passcode import contexts, conversation, draw_codes

QUESTION = (
    "A conversation holds a random 5-digit number in one turn (T2). The turn is summarised without the number and "
    "then masked. How much of the number can still be read from the KV cache of the turns that stay, and does the "
    "model use it?"
)

SPLIT_MEANING = {
    "random": "the probe has seen the same conversation with other codes",
    "leave-context-out": "the probe never saw the conversation",
    "paired": "as leave-context-out, but features are centred within each conversation, which takes several codes of "
    "the very conversation that is read",
}


def narrate(metrics: Mapping[str, Any], config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    single = config.contexts == 1
    return Report(
        title=f"Leakage after masking: {model.name}",
        question=QUESTION,
        answer=" ".join([answer_probe(metrics), answer_use(metrics)]),
        warnings=[SINGLE_CONTEXT_WARNING] if single else [],
        sections=[
            _conversation_section(model, config),
            _accuracy_section(metrics),
            _use_section(metrics),
            _controls_section(metrics),
            _limits_section(metrics, model),
            _reproduce_section(config, model, environment),
        ],
    )


SINGLE_CONTEXT_WARNING = (
    "All samples share one conversation, as in most published probes. The accuracy below tells codes apart within "
    "this one template; a probe may do so by features that exist in no other conversation. It does not say that "
    "the number can be read from a conversation that the probe has not seen. Run with more contexts for that."
)


def answer_probe(metrics: Mapping[str, Any]) -> str:
    """What the probes found, in a sentence or two."""
    split = metrics["headline_split"]
    masked, floor = (_estimate(metrics["accuracy"][split][arm]) for arm in ("masked", "restart"))
    leak = _estimate(metrics["leak"][split]["masked"])
    where = "in this one conversation" if split == "random" else "in conversations it was not trained on"
    reading = (
        f"a linear probe on the cache after the masked turn reads {_percent(masked)} of the digits {where} "
        f"(chance {metrics['chance']:.0%}, restart floor {_percent(floor)})"
    )
    if leak.low > 0:
        sentence = f"Information leaks: {reading}, {_points(leak)} above the floor."
    elif leak.high < 0:
        sentence = f"No leak, and an odd one out: {reading}, {_points(leak)} below the floor; doubt the run."
    else:
        sentence = f"No leak that a stranger could read was found: {reading}; the difference is {_points(leak)}."
    if split == "random":
        return sentence
    paired, paired_floor = (_estimate(metrics["accuracy"]["paired"][arm]) for arm in ("masked", "restart"))
    if _estimate(metrics["leak"]["paired"]["masked"]).low > 0:
        return (
            f"{sentence} The number is in there all the same: given several codes of the same conversation to "
            f"centre on, the probe reads {_percent(paired)} (floor {_percent(paired_floor)})."
        )
    return f"{sentence} Centring within each conversation does not bring it out either ({_percent(paired)})."


def answer_use(metrics: Mapping[str, Any]) -> str:
    """Whether the model uses what is left, in a sentence."""
    use = metrics["use"]
    gain = _estimate(use["delta_u"])
    right = {arm: _estimate(use[arm]["token_accuracy"]) for arm in ("full", "retained", "restart")}
    told = (
        f"asked for the code, it gets {_percent(right['full'])} of its tokens right with everything in view, "
        f"{_percent(right['retained'])} after masking and {_percent(right['restart'])} after a restart; masking instead of "
        f"restarting changes the log-probability of the true code by {gain.mean:+.2f} nats "
        f"(95 % interval {gain.low:+.2f} to {gain.high:+.2f})"
    )
    if gain.low > 0:
        return f"The model uses some of it: {told}."
    if gain.high < 0:
        return f"The model does not profit from it: {told}, so the retained cache points away from the true code."
    return f"No use by the model was found: {told}."


def _conversation_section(model: Model, config: Config) -> Section:
    import numpy as np

    context = contexts()[0]
    code = draw_codes(1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0]
    passages = [
        Passage(
            segment=message.segment,
            role=message.role,
            text=message.text,
            struck=message.segment in ("T1", "T2"),
            marked=code if message.segment in ("T2", "T3") else None,
        )
        for message in conversation(context, code).messages
    ]
    return Section(
        title="What the model reads",
        paragraphs=[
            f"One of {config.contexts} hand-written conversations, each with {config.samples // config.contexts} "
            "random codes. T1 and T2 (struck through) are masked when T3 begins: no later token can attend to them, but "
            "summary 2 was computed while T2 was in view, and T3 attends to summary 2. The text of summary 2 is the same "
            "whatever the code. Nothing moves: every token keeps its position.",
        ],
        passages=passages,
        points=[
            "direct: the slots of summary 2, computed while T2 was in view.",
            "masked: the slots of T3 up to the code, computed when T2 could no longer be seen. What they know of the code "
            "came through summary 2.",
            "restart: the same tokens at the same positions, computed afresh without T1 and T2. This is the floor: it "
            "cannot know the code.",
            "before: the slots of summary 1, computed before the code was said.",
            "hidden: the slots of T2 itself after the code; the ceiling.",
        ],
    )


def _accuracy_section(metrics: Mapping[str, Any]) -> Section:
    splits = list(metrics["accuracy"])
    rows = [
        [ARM_NAMES[arm], *(_percent(_estimate(metrics["accuracy"][split][arm])) for split in splits)]
        for arm in ARM_NAMES
    ]
    rows.append(["leak: masked − restart", *(_points(_estimate(metrics["leak"][s]["masked"])) for s in splits)])
    rows.append(["leak: direct − restart", *(_points(_estimate(metrics["leak"][s]["direct"])) for s in splits)])
    return Section(
        title="What a linear probe reads",
        paragraphs=[
            "Ridge probes classify each of the five digits from K, V or the residual stream of one layer; a segment's "
            "slots are averaged, or its last slot is taken. The table holds the accuracy per digit of the one probe "
            "that did best on an inner fold, so the search over layers flatters nothing; the figures show every layer. "
            f"Chance is {metrics['chance']:.0%}. Intervals are 95 %, from a bootstrap that resamples "
            + ("samples." if len(splits) == 1 else "whole conversations."),
        ],
        tables=[
            Table(
                columns=["slots", *splits],
                rows=rows,
                caption="; ".join(f"{split}: {SPLIT_MEANING[split]}" for split in splits) + ".",
            )
        ],
        figures=[
            Figure(
                "accuracy_by_layer_mean",
                "Accuracy per digit by layer, slots averaged; bands are 95 % intervals.",
            ),
            Figure("accuracy_by_layer_last", "The same, from the last slot of each segment."),
            Figure(
                "layer_by_segment",
                f"Where the code can be read: accuracy by layer and segment ({metrics['headline_split']} split, mean).",
            ),
        ],
    )


def _use_section(metrics: Mapping[str, Any]) -> Section:
    use = metrics["use"]
    rows = [
        [
            name,
            _plain(_estimate(use[arm]["logprob"])),
            _percent(_estimate(use[arm]["token_accuracy"])),
            _plain(_estimate(use[arm]["kl_from_full"])),
        ]
        for arm, name in (
            ("full", "full context"),
            ("retained", "retained (T1, T2 masked)"),
            ("restart", "restart (recomputed)"),
        )
    ]
    rows.append(["retained − restart", _plain(_estimate(use["delta_u"])), "", _plain(_estimate(use["delta_kl"]))])
    return Section(
        title="What the model makes of it",
        paragraphs=[
            "That a probe can read something does not mean that the model uses it. Here the model itself is asked for "
            "the code at the end of T3, under the same text and positions, with three caches. The log-probability is of "
            "the whole true code, each digit given the true ones before it.",
        ],
        tables=[
            Table(
                columns=[
                    "cache",
                    "log p(true code), nats",
                    "code tokens right",
                    "KL from full context, nats",
                ],
                rows=rows,
                caption="KL is of the next-token distribution where the code should begin. Intervals are 95 %.",
            )
        ],
        figures=[Figure("use", "The same three measures; bars are 95 % intervals, often smaller than the dot.")],
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    cone = metrics["light_cone"]
    split = metrics["headline_split"]
    before = _estimate(metrics["accuracy"][split]["before"])
    ceiling = _estimate(metrics["accuracy"][split]["hidden"])
    points = [
        f"Light cone: with one turn masked between, K and V of T3 at layers 0 and 1 cannot depend on the code. They vary by "
        f"{cone['layers_0_1']:.1e} of their size (round-off is about 1e-7); at the last layer by {cone['last_layer']:.1e}.",
        f"Before: slots that stand before the code are read at {_percent(before)}; chance is {metrics['chance']:.0%}.",
        f"Ceiling: slots of T2 right after the code are read at {_percent(ceiling)} under the same split.",
        "Codes are drawn uniformly, not balanced within a conversation: balanced labels would push the floor below chance.",
        "Penalty, layer, family and read-out are chosen on an inner fold; each test fold is touched once.",
        "Features that vary by less than 1e-5 of their size are treated as constant, so round-off cannot be read.",
    ]
    return Section(title="Controls", points=points)


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger ones.",
            "It was not trained to summarise and mask. A retained cache is out of distribution for it.",
            "A linear probe that fails does not prove absence; one that succeeds does not prove use.",
            f"{metrics['contexts']} hand-written English conversations and {metrics['samples']} codes; intervals cover these "
            "conversations as a sample of their like, not all conversations.",
            "The paired split and the random split need other codes of the same conversation. An attacker who sees one cache "
            "once has neither.",
        ],
    )


def _reproduce_section(config: Config, model: Model, environment: Mapping[str, Any]) -> Section:
    import dataclasses

    flags = " ".join(
        f"--{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    )
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return Section(
        title="Reproduce",
        paragraphs=["The same command with the same seed on the same machine gives the same numbers."],
        points=[
            f"kvprobe run leakage {flags}".strip(),
            f"Seed {config.seed}; weights {environment['model']}; {versions}; Python {environment['python']}.",
            f"{environment['machine']}; device {model.lanes.device}, {str(model.lanes.dtype).removeprefix('torch.')}"
            + (f"; commit {environment['commit'][:12]}." if environment["commit"] else "."),
            f"Families: {', '.join(FAMILY_NAMES.values())}. Data: samples.parquet, probes.parquet and metrics.json beside "
            "this page.",
            "Protocol: arXiv 2604.09852 (random number in a masked block), with held-out contexts, a recomputed floor and a "
            "measure of use added.",
        ],
    )


def _estimate(values: Mapping[str, float]) -> Estimate:
    return Estimate(**values)


def _percent(value: Estimate) -> str:
    return f"{100 * value.mean:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f})"


def _points(value: Estimate) -> str:
    return f"{100 * value.mean:+.1f} points ({100 * value.low:+.1f} to {100 * value.high:+.1f})"


def _plain(value: Estimate) -> str:
    return f"{value.mean:.2f} ({value.low:.2f} to {value.high:.2f})"
