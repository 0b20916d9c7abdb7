"""What the policies report says: its answer, what the model reads, controls and limits. Every claim is decided by the
numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Report, Section, passages_of
from kvprobe.stats import Estimate
from kvprobe.studies.policies.analyse import ABOVE_CHANCE, TOLERANCE, judged_budgets
from kvprobe.studies.policies.collect import (
    CONTINUED,
    KINDS,
    LAST_TURN,
    RANDOM,
    RANDOM_SINKS,
    SINKS,
    TAIL,
    WINDOW,
    Condition,
    sample_conversation,
)
from kvprobe.studies.policies.config import Config
from kvprobe.studies.policies.figures import label_of
from kvprobe.studies.policies.results import (
    instructions_section,
    quality_section,
    random_section,
    shown_chance,
    shown_least,
)
from kvprobe.wording import estimate_of, few_clusters, percent, plain

QUESTION = (
    "A conversation of some hundred tokens holds instructions and a number that will be asked for later. Cache "
    "policies throw parts of its KV cache away, or round them. What does each policy cost in quality for the memory "
    "that it saves?"
)

NAMES = {
    "kl": "distance from the full cache (KL)",
    "agreement": "agreement with the full cache's next token",
    "code": "recall of the hidden code",
    "instructions": "instructions followed",
}
_UNCHANGED = 1e-6
"""Nats of KL that a policy which keeps everything may be from the full cache."""


def narrate(metrics: Mapping[str, Any], config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    return Report(
        title=f"Cache policies, quality for memory: {model.name}",
        question=QUESTION,
        answer=" ".join([answer_random(metrics, config), answer_memory(metrics)]),
        warnings=warnings(metrics, config),
        sections=[
            _conversation_section(metrics, config, model),
            quality_section(metrics, config),
            random_section(metrics, config),
            instructions_section(metrics, config),
            _controls_section(metrics, config),
            _limits_section(metrics, model),
            reproduce_section(
                "policies",
                config,
                environment,
                also=[
                    "Data: samples.parquet (one row per conversation and condition) and metrics.json beside this page.",
                    *(f"{kind.label}: {_policy_of(name, metrics)}." for name, kind in KINDS.items()),
                ],
            ),
        ],
    )


def answer_random(metrics: Mapping[str, Any], config: Config) -> str:
    """Which policies beat random eviction and which do not, budget by budget and measure by measure."""
    policies = [name for name in KINDS if _has_budget(name)]
    measures = ("agreement", *(name for name, judged in metrics["judged"].items() if judged))
    sentences = []
    for budget in judged_budgets(config):
        told = [f"on {NAMES[name]}, {_verdict(metrics, policies, name, budget)}" for name in measures]
        strict = _beating(metrics, policies, "agreement", budget, RANDOM_SINKS)
        sentences.append(
            f"At {budget} % of the slots, of {len(policies)} policies these beat random eviction significantly: "
            f"{'; '.join(told)}. "
            f"If random eviction spares the first {SINKS} slots, these still beat it on agreement: "
            f"{_named(strict, policies)}."
        )
    unjudged = [NAMES[name] for name, judged in metrics["judged"].items() if not judged]
    if unjudged:
        sentences.append(
            f"What policies cost in {' and '.join(unjudged)} cannot be judged on this model, whose full cache is too "
            "near chance."
        )
    return " ".join(sentences)


def answer_memory(metrics: Mapping[str, Any]) -> str:
    """Which policy stays near the full cache with the least memory, measure by measure."""
    told = []
    for measure in ("agreement", *(name for name, judged in metrics["judged"].items() if judged)):
        reached = {name: enough[measure]["mean"] for name, enough in metrics["enough"].items()}
        found = {name: memory for name, memory in reached.items() if memory is not None and not KINDS[name].baseline}
        if not found:
            told.append(f"on {NAMES[measure]}, nothing that was measured")
            continue
        best = min(found, key=found.__getitem__)
        at = [
            each for each in metrics["conditions"] if each["kind"] == best and np.isclose(each["memory"], found[best])
        ]
        label = label_of(at[0]) if at else KINDS[best].label
        told.append(f"on {NAMES[measure]}, {label} with {shown_least(metrics, best, measure)} of the memory")
    near = f"{100 * TOLERANCE['agreement']:.0f} points"
    return f"The least memory that keeps a policy within {near} of the full cache: {'; '.join(told)}."


def warnings(metrics: Mapping[str, Any], config: Config) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if few := few_clusters(metrics["samples"], "conversations"):
        found.append(few)
    for name, judged in metrics["judged"].items():
        if not judged:
            found.append(
                f"{NAMES[name].capitalize()}: with the full cache it is "
                f"{percent(estimate_of(metrics['ceiling'][name]))}, not significantly {100 * ABOVE_CHANCE:.0f} points "
                f"above chance ({shown_chance(metrics['chance'][name])}). What policies cost there cannot be judged on "
                "this model."
            )
    if metrics["unchanged"] is None:
        found.append(
            f"The budgets ({', '.join(map(str, config.budgets))}) leave out 100, so it was not checked that a policy "
            "which may keep everything changes nothing."
        )
    return found


def _verdict(metrics: Mapping[str, Any], policies: Sequence[str], measure: str, budget: int) -> str:
    """Who beats random eviction at a budget on a measure, and who does worse; the others are indistinguishable from
    it."""
    told = _named(_beating(metrics, policies, measure, budget, RANDOM), policies)
    worse = [name for name in policies if _gain(metrics, name, budget, RANDOM, measure).below()]
    return f"{told} (worse: {_named(worse, policies)})" if worse else told


def _beating(
    metrics: Mapping[str, Any], policies: Sequence[str], measure: str, budget: int, baseline: str
) -> list[str]:
    return [name for name in policies if _gain(metrics, name, budget, baseline, measure).above()]


def _gain(metrics: Mapping[str, Any], kind: str, level: int, baseline: str, measure: str) -> Estimate:
    for each in metrics["against"]:
        if (each["kind"], each["level"], each["baseline"]) == (kind, level, baseline):
            return estimate_of(each["gain"][measure])
    raise KeyError(f"{kind} at {level} was not held against {baseline}.")


def _has_budget(name: str) -> bool:
    return not KINDS[name].baseline and not KINDS[name].bits


def _named(names: Sequence[str], every: Sequence[str]) -> str:
    """Some of the policies, by the shorter way of naming them."""
    if not names:
        return "none"
    if len(names) == len(every):
        return "all"
    if len(names) > len(every) / 2:
        return f"all but {_listed([name for name in every if name not in names])}"
    return _listed(names)


def _listed(names: Sequence[str]) -> str:
    labels = [KINDS[name].label for name in names]
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _policy_of(name: str, metrics: Mapping[str, Any]) -> str:
    """A kind as the library would be asked for it, for the mean conversation at half its slots."""
    slots = round(metrics["full"]["slots"]["mean"])
    level = KINDS[name].bits[0] if KINDS[name].bits else 50
    return f"{Condition(name, level).policy(slots, 0)} at {level} {'bits' if KINDS[name].bits else '%'}"


def _conversation_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    given, chat = sample_conversation(model, config, 0)
    full = metrics["full"]
    passages = passages_of(chat, marked=given.code, only_in=("needle",))
    instruction, value = given.instructions[0]
    return Section(
        title="What the model reads",
        paragraphs=[
            f"The first of {metrics['samples']} conversations of {full['slots']['min']:.0f} to "
            f"{full['slots']['max']:.0f} tokens. Instructions, their values, small talk, the sentence with the code "
            "and its depth are drawn anew for each. The conversation is read once, with attention watched; every "
            "policy then acts on that same cache, and what it keeps is kept as it was computed. None of what is asked "
            "below is known when policies act.",
        ],
        passages=passages,
        points=[
            f"Going on: the user says “{LAST_TURN}” With the full cache the model's own greedy answer is taken, at "
            f"most {CONTINUED} tokens ({full['continued']['mean']:.0f} on average). Each condition reads the same "
            "tokens: KL of its next-token distributions from the full cache's, and how often both hold the same token "
            "likeliest.",
            f"Code: the user asks “{given.needle.question}” and the reply begins “{given.needle.lead}”. Share of the "
            "code's tokens that are the likeliest ones, the true ones before them given.",
            f"Instructions, four times, as: “{instruction.query}”, the reply begins “{instruction.lead}”. It is "
            f"followed if of the {len(instruction.values)} values that it might have named the true one, here "
            f"“{value}”, gains most over what the model gives its first token with nothing before the question.",
            "Memory: bytes of the slots that each head keeps, as a share of the full cache's, both at 16 bits a "
            "number; of quantised slots their codes, scales and minima.",
        ],
    )


def _controls_section(metrics: Mapping[str, Any], config: Config) -> Section:
    checks = []
    unchanged = metrics["unchanged"]
    if unchanged is not None:
        holds = unchanged["kl"] <= _UNCHANGED and unchanged["agreement"] == 1 and unchanged["memory"] == 1
        checks.append(
            f"Nothing evicted, nothing changed: {unchanged['conditions']} policies with a budget of 100 % keep at "
            f"least {unchanged['memory']:.0%} of the memory, differ from the full cache by a KL of at most "
            f"{unchanged['kl']:.1e} nats (allowed: {_UNCHANGED:.0e}) and agree with it on at least "
            f"{unchanged['agreement']:.0%} of the tokens. The control "
            f"{'holds' if holds else 'DOES NOT HOLD: doubt this run'}."
        )
    ceiling = metrics["ceiling"]
    checks += [
        "Chance: codes and values are drawn uniformly, so a cache that knows nothing recalls "
        f"{shown_chance(metrics['chance']['code'])} of the code at best and follows "
        f"{shown_chance(metrics['chance']['instructions'])} of the instructions, whatever the model likes to say.",
        f"Ceiling: with the full cache the log-probability of the true code exceeds that of others by "
        f"{plain(estimate_of(ceiling['code_margin']))} nats, and of an instruction's true value that of others by "
        f"{plain(estimate_of(ceiling['instruction_margin']))} nats; a cache that knows nothing has a mean of zero.",
        "Every condition acts on the cache of the same reading; nothing is read again.",
        f"Below {2 * WINDOW} slots of budget, SnapKV and what builds on it look with the last half of the budget "
        f"instead of {WINDOW} queries. PyramidKV's steps between layers are rounded down, as published, so it may hold "
        "more than the budget.",
        "Positions of what is asked follow the ledger, so a policy that closes gaps is asked right after its last "
        "slot.",
    ]
    return Section(title="Controls", points=checks)


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    limits = [
        f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger ones.",
        "Policies act once, at the end of the conversation, before any question is known. SnapKV, PyramidKV, Ada-KV "
        "and TOVA are often run with the question at the prompt's end, where their last queries can look for what it "
        "asks; that is an easier task than this one. H2O, TOVA and windows would also go on evicting while an answer "
        "is written.",
        "Memory counts what each head keeps, as if an engine stored every head's slots apart; with slots that differ "
        "between heads that takes kernels which most engines do not have. `bytes_held` in samples.parquet is what "
        "kvprobe holds, one length for all. Time is not measured.",
        f"The model runs in {str(model.lanes.dtype).removeprefix('torch.')}; quality is that of this dtype, memory "
        f"that of 16 bits. Quantised numbers are rounded to their codes and read back; groups of 32, the last {TAIL} "
        "slots at full precision, which short conversations feel: at more tokens quantisation takes less memory than "
        "here.",
        "Hand-written English sentences in conversations of one length; a code is a digit string and stands once.",
        "An instruction counts as followed by the first token of its value among eight, each held against what the "
        "model gives it anyway; that the model would say it of its own accord is not claimed.",
    ]
    windows = [window for window in model.geometry.windows if window is not None]
    if windows:
        reach, window = metrics["full"]["reach"]["max"], min(windows)
        fits = (
            f"conversations with their questions reach {reach:.0f} positions and fit into it"
            if reach <= window
            else f"conversations with their questions reach {reach:.0f} positions, so these layers do not see their "
            "beginning under any policy, the full cache included: what is out of window is not what a policy has "
            "evicted"
        )
        limits.append(
            f"{len(windows)} of {model.geometry.n_layers} layers have a sliding window of {window} positions; {fits}. "
            "Their slots are counted whole, although an engine need not hold what is out of window."
        )
    return Section(title="Limits", points=limits)
