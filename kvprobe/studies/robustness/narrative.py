"""What the robustness report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvprobe.experiments.reported import Reported
from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.experiments.trial_settings import TIMINGS
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.inference.model import Model
from kvprobe.report.document import Passage, Report, Section, Table, passages_of
from kvprobe.stats import Estimate
from kvprobe.studies.robustness.collect import cases
from kvprobe.studies.robustness.config import Config
from kvprobe.studies.robustness.figures import shown_task
from kvprobe.studies.robustness.results import (
    UNITS,
    accuracy_section,
    beside_section,
    distance_section,
    listed_labels,
    procedure_section,
    ranking_section,
    shown_chance,
    shown_kl,
)
from kvprobe.tasks.task import Task
from kvprobe.wording import estimate_of, few_clusters, percent, points, span, verdict

QUESTION = (
    "A share of the slots of a model's KV cache holds something else than what the model wrote there: noise, zeros, "
    "another conversation, a neighbouring block. How much of the cache can be damaged, and how, before answers go "
    "wrong?"
)
FEW = 20
"""Items below which little can be distinguished."""


def narrate(
    metrics: Mapping[str, Any],
    config: Config,
    tasks: Sequence[Task],
    table: Reported | None,
    model: Model,
    environment: Mapping[str, Any],
) -> Report:
    """The report of a run."""
    sections = [
        Section(title="What was found", points=findings(metrics)),
        _done_section(metrics, config, tasks),
        accuracy_section(metrics, config),
        ranking_section(metrics, config),
        distance_section(metrics, config),
    ]
    if table is not None:
        sections.append(beside_section(metrics, config, table, model.name))
    if config.procedure > 0:
        sections.append(procedure_section(metrics, config))
    first = {str(case.labels["fault"]): case for case in reversed(cases(config))}
    sections += [
        _controls_section(metrics, config),
        _limits_section(metrics, config, model),
        reproduce_section(
            "robustness",
            config,
            environment,
            also=[
                "Data: samples.parquet (one row per item and case, with what was said) and metrics.json beside this "
                "page.",
                *(
                    f"{CATALOGUE[name].label} at {first[name].labels['rate']:g} %: {first[name].trial.fault}."
                    for name in metrics["faults"]
                ),
            ],
        ),
    ]
    return Report(
        title=f"Damage to the cache: {model.name}",
        question=QUESTION,
        answer=headline(metrics),
        warnings=warnings(metrics, config),
        sections=sections,
    )


def headline(metrics: Mapping[str, Any]) -> str:
    """The extremes on each task, or why there are none."""
    told = []
    for name, task in metrics["tasks"].items():
        if not task["ranking"]:
            told.append(task["too_hard"] or f"On {shown_task(name)} only controls were struck.")
            continue
        worst, mildest = (
            f"{CATALOGUE[each['fault']].label} ({_cost(estimate_of(each['harm'])).removeprefix('which ')})"
            for each in (task["ranking"][0], task["ranking"][-1])
        )
        told.append(
            f"{shown_task(name).capitalize()}, {_clean(task)} right with a sound cache: worst is {worst}, mildest "
            f"{mildest}."
        )
    return " ".join(told)


def findings(metrics: Mapping[str, Any]) -> list[str]:
    """What costs most on each task, where the cliffs are, and whether canarypwn's order is found."""
    judged = {name: task for name, task in metrics["tasks"].items() if task["rankable"]}
    told = [_answer_of(name, task, metrics["rates"]) for name, task in judged.items()]
    told += [_seed_order(name, task) for name, task in judged.items() if _claims(task)]
    told += [_answer_by_kl(name, task) for name, task in metrics["tasks"].items() if not task["rankable"]]
    return told


def warnings(metrics: Mapping[str, Any], config: Config) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if few := few_clusters(metrics["items"], "items of each task"):
        found.append(few)
    elif metrics["items"] < FEW:
        found.append(f"{metrics['items']} items of each task show only large differences. Run with more samples.")
    found += [task["too_hard"] for task in metrics["tasks"].values() if task["too_hard"]]
    if metrics["broken"]["rows"]:
        broken = metrics["broken"]
        found.append(
            f"In {broken['rows']} of {broken['of']} rows K, V or the logits were not finite. They count as wrong and "
            f"are left out of KL. The first: {broken['first']}."
        )
    controls = metrics["controls"]
    failed = [entry["holds"] for entry in (controls["nothing"], controls["nan"], *controls["reordered"])]
    if False in failed:
        found.append("A control does not hold; see Controls. Doubt this run until it does.")
    if not config.follow:
        found.append("KL was not measured in this run (follow is off), so what changes no answer was not seen.")
    return found


def _answer_of(name: str, task: Mapping[str, Any], rates: Sequence[float]) -> str:
    baseline = (
        f"On {shown_task(name)} the model is right in {_clean(task)} with a sound cache (chance "
        f"{shown_chance(task['chance'])})"
    )
    ranking = task["ranking"]
    if not ranking:
        return f"{baseline}; only controls were struck."
    span = f"Averaged over rates of {rates[0]:g} to {rates[-1]:g} %" if len(rates) > 1 else f"At {rates[0]:g} %"
    worst, mildest = (
        f"{CATALOGUE[each['fault']].label}, {_cost(estimate_of(each['harm']))}" for each in (ranking[0], ranking[-1])
    )
    told = f"the worst of {len(ranking)} faults is {worst}; the mildest is {mildest}" if len(ranking) > 1 else worst
    return f"{baseline}. {span}, {told}. {_cliff_sentence(task, [each['fault'] for each in ranking], rates)}"


def _answer_by_kl(name: str, task: Mapping[str, Any]) -> str:
    """Why faults are not ranked, and what KL says all the same."""
    ranking = task["ranking_kl"]
    if not ranking:
        return task["too_hard"]
    worst, mildest = (
        f"{CATALOGUE[each['fault']].label} ({shown_kl(each['harm'])} nats)" for each in (ranking[0], ranking[-1])
    )
    extremes = f"is moved most by {worst} and least by {mildest}" if len(ranking) > 1 else f"is moved by {worst}"
    return (
        f"{task['too_hard']} What it says next on {shown_task(name)}, right or wrong, {extremes}, averaged over rates."
    )


def _cost(lost: Estimate) -> str:
    """What a fault does to accuracy."""
    size = f"{100 * lost.mean:.1f} points ({span(lost, lambda share: f'{100 * share:.1f}')})"
    return verdict(
        lost,
        f"which costs {size}",
        f"which gains accuracy (its loss is {size})",
        f"for which a loss was not detected ({size})",
    )


def _cliff_sentence(task: Mapping[str, Any], faults: Sequence[str], rates: Sequence[float]) -> str:
    at: dict[float | None, list[str]] = {}
    for name in faults:
        at.setdefault(task["cliffs"][name], []).append(CATALOGUE[name].label)
    told = [f"{rate:g} % of {listed_labels(at[rate])}" for rate in rates if rate in at]
    if not told:
        return f"At no measured rate, up to {rates[-1]:g} %, has accuracy significantly fallen below half of that."
    never = f"; at none, up to {rates[-1]:g} %, of {listed_labels(at[None])}" if None in at else ""
    return f"Accuracy has significantly fallen below half of that at {', '.join(told)}{never}."


def _claims(task: Mapping[str, Any]) -> list[tuple[str, str, Estimate]]:
    """Canarypwn's order of its three faults, as far as it was measured: what each costs more than the next."""
    order = list(pairwise(REPORTED_FAULTS))
    found = {tuple(each["faults"]): each["lost"] for each in task["contrasts"] if each["lost"]}
    return [(*pair, estimate_of(found[pair])) for pair in order if pair in found]


def _seed_order(name: str, task: Mapping[str, Any]) -> str:
    claims = [
        f"that {CATALOGUE[first].label} costs more than {CATALOGUE[second].label} is "
        f"{verdict(more, 'found', 'reversed', 'not found')} ({points(more)})"
        for first, second, more in _claims(task)
    ]
    return f"Of canarypwn's order, on {shown_task(name)}: {'; '.join(claims)}."


def _clean(task: Mapping[str, Any]) -> str:
    return percent(estimate_of(task["clean"][task["scorers"][0]]))


def _done_section(metrics: Mapping[str, Any], config: Config, tasks: Sequence[Task]) -> Section:
    examples = next(iter(metrics["tasks"].values()))["examples"]
    item = tasks[0].items(examples["place"] + 1, config.seed)[-1]
    chat = passages_of(item.chat, marked=item.answer)
    if item.lead:
        chat.append(Passage("generation", "assistant", f"{item.lead} …"))
    said = [["sound cache", _quoted(examples["clean"])]]
    said += [[CATALOGUE[name].label, _quoted(text)] for name, text in examples["damaged"].items()]
    return Section(
        title="What was done",
        paragraphs=[
            "Each prompt is read once. From its last token on the answer is decoded greedily, in one batch: a row with "
            "the sound cache, and a row for each fault at each rate. All rows of an item share random draws, so a "
            "higher rate strikes what a lower one struck and more, and two faults of one rate strike the same places.",
            f"What is drawn: {UNITS[config.unit]}; the drawn share is the rate, of all slots that hold a token by "
            f"then, those of the answer included. Damage is {TIMINGS[config.timing]}. Faults of pages strike whole "
            "blocks of 16 slots, in all layers, and their rate is a share of blocks; faults that move whole vectors "
            "never strike single numbers. Where a rate is less than one slot or block, chance decides whether one is "
            "struck, so that the rate is met on average.",
            f"{metrics['items']} items of each task; {config.repeats} draw{'s' if config.repeats > 1 else ''} of each "
            "fault, rate and item. Accuracies have Wilson intervals over items (repeats are averaged first: they are "
            "no new items); differences and KL have jackknife intervals over items, paired. All are 95 % intervals; "
            "see docs/intervals.md.",
        ],
        passages=chat,
        tables=[
            Table(
                columns=["answer with", "text"],
                rows=said,
                caption=f"An item of {shown_task(tasks[0].name)} at {examples['rate']:g} %; right is "
                f"“{examples['answer']}”.",
            ),
            Table(
                columns=["task", "prompt (slots)", "chance", *_scorer_columns(metrics), "faults ranked"],
                rows=[_task_row(metrics, name) for name in metrics["tasks"]],
                caption="Accuracy with a sound cache, before anything else. A task at which the model fails then shows "
                "nothing of what damage does.",
            ),
            Table(
                columns=["fault", "a struck slot holds", "drawn at once"],
                rows=[
                    [
                        CATALOGUE[name].label,
                        CATALOGUE[name].content,
                        "blocks of 16" if CATALOGUE[name].paged else CATALOGUE[name].unit(config.unit),
                    ]
                    for name in metrics["faults"]
                ],
                caption="Faults. K and V permuted together and blocks swapped are controls: where all slots are "
                "visible, attention does not care for their order.",
            ),
        ],
    )


def _quoted(text: str) -> str:
    shown = " ".join(text.split())
    return f"“{shown}”" if len(shown) <= 100 else f"“{shown[:100]} …”"


def _scorers(metrics: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(scorer for task in metrics["tasks"].values() for scorer in task["scorers"]))


def _scorer_columns(metrics: Mapping[str, Any]) -> list[str]:
    return [f"right ({scorer})" for scorer in _scorers(metrics)]


def _task_row(metrics: Mapping[str, Any], name: str) -> list[str]:
    task = metrics["tasks"][name]
    clean = [percent(estimate_of(task["clean"][each])) if each in task["clean"] else "–" for each in _scorers(metrics)]
    slots = "{} to {}".format(*task["slots"])
    return [
        shown_task(name),
        slots,
        shown_chance(task["chance"]),
        *clean,
        "yes" if task["rankable"] else "no: too hard",
    ]


def _controls_section(metrics: Mapping[str, Any], config: Config) -> Section:
    controls = metrics["controls"]
    nothing, nan = controls["nothing"], controls["nan"]
    checks = [
        f"Nothing struck, nothing changed: at a rate of 0 no slot is written, {nothing['same']} of {nothing['rows']} "
        f"rows give the sound cache's whole answer, and KL is at most {_number(nothing['kl'])}, which is how far rows "
        f"of one batch are from each other by rounding alone (allowed: {controls['allowed']:g}). "
        f"{_holds(nothing['holds'])}",
        f"A NaN is found: one slot of NaN was reported as broken in {nan['found']} of {nan['rows']} rows. "
        f"{_holds(nan['holds'])}",
    ]
    for each in controls["reordered"]:
        checks.append(
            f"{CATALOGUE[each['fault']].label}: slots in another order. Over all rates {each['same']} of "
            f"{each['rows']} rows give the whole answer unchanged, and KL is at most {_number(each['kl'])} (allowed "
            f"for rounding: {controls['allowed']:g}). "
            + (
                _holds(each["holds"])
                if each["holds"] is not None
                else f"Prompts and answers reach {metrics['reach']} positions and the shortest sliding window is "
                f"{metrics['window']}, so order decides what is visible: here this is no control."
            )
        )
    broken = metrics["broken"]
    checks.append(
        f"Rows that broke: {broken['rows']} of {broken['of']}"
        + (f", the first at {broken['first']}." if broken["rows"] else " (the NaN control apart).")
    )
    return Section(title="Controls", points=checks)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e} nats" if value else "0 nats"


def _holds(holds: bool) -> str:
    return "The control holds." if holds else "The control DOES NOT HOLD: doubt this run."


def _limits_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    few = min(metrics["rates"])
    shortest = min(task["slots"][0] for task in metrics["tasks"].values())
    limits = [
        f"{model.name} is one model with {model.geometry.n_layers} layers; what it bears says nothing of larger ones.",
        f"The shortest prompt has {shortest} slots, of which {few:g} % are {shortest * few / 100:.1f}, and of its "
        f"{-(-shortest // 16)} blocks {-(-shortest // 16) * few / 100:.1f}; at low rates many reads see no damage.",
        "A share of slots is not a measure of how much was damaged: a fault that turns keys leaves values as they are, "
        "and one of a single part writes half as much as one of both.",
        f"Timing ({config.timing}) and unit ({config.unit}) are one reading of “corrupted during decoding”; others "
        "give other numbers.",
        "Answers are greedy. An answer that is right by chance counts as right, and one that says the right thing in "
        "other words may not.",
        "KL is averaged over the tokens of the sound answer, right or wrong; a damaged row's own errors do not "
        "compound in it, as they do in its own answer.",
        f"The model runs in {str(model.lanes.dtype).removeprefix('torch.')}; faults of fp8 and of rounding act on "
        "these numbers.",
    ]
    return Section(title="Limits", points=limits)
