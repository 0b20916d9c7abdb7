"""What the bit-flip report says: its answer, what was done, controls and limits. Every claim is decided by the numbers;
none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.experiments.trial_settings import TIMINGS
from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.inference.model import Model
from kvprobe.report.document import Report, Section, passages_of
from kvprobe.studies.bitflips.analyse import harm, of_field, tolerated
from kvprobe.studies.bitflips.collect import ANY, tasks_of
from kvprobe.studies.bitflips.config import Config
from kvprobe.studies.bitflips.figures import has_kl
from kvprobe.studies.bitflips.results import (
    bits_section,
    examples_section,
    rates_section,
    shown_kl,
    shown_rate,
    where_section,
)
from kvprobe.wording import estimate_of, few_clusters, percent

QUESTION = (
    "A prompt's K and V lie in memory while its answer is written, and one bit of one number flips. What does that do "
    "to the answer, by the bit's place in the number; and how many flips can a cache bear?"
)
FEW = 12
"""Items below which intervals over them decide little."""
PAPER = "arXiv 2604.17249"
_BF16_PAPER = 13
"""Of the 16 bits of bf16, those that the paper finds to give coherent but altered outputs."""
_SAME = 1e-6
"""Nats of KL that a row in which nothing was flipped may be from the clean one."""


def narrate(metrics: Mapping[str, Any], config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    sections = [_done_section(metrics, config, model)]
    for number, task in enumerate(metrics["tasks"], start=1):
        sections += [bits_section(task, number), where_section(task, metrics["layers"]), rates_section(task, number)]
        if task["examples"]:
            sections.append(examples_section(task))
    return Report(
        title=f"Flipped bits in K and V: {model.name}",
        question=QUESTION,
        answer=" ".join(answer(task, several=len(metrics["tasks"]) > 1) for task in metrics["tasks"]),
        warnings=warnings(metrics, model.lanes.dtype),
        sections=[
            *sections,
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "bitflips",
                config,
                environment,
                also=[
                    "Data: samples.parquet (one row per item and flip; the clean answer has case -1) and metrics.json "
                    "beside this page.",
                    f"Sources: {PAPER} (single flips in shared blocks of a prefix cache); “KV Cache is "
                    "More Robust Than You Think in Large Language Models” (canarypwn), takeaway 1 (“even tiny memory "
                    "errors (bit flips) could be catastrophic if they produce out-of-distribution activations”).",
                ],
            ),
        ],
    )


def answer(task: Mapping[str, Any], several: bool = False) -> str:
    """What flips do on a task, in a few sentences."""
    told = [answer_bits(task), answer_silence(task), answer_rate(task)]
    return (f"{task['task']}: " if several else "") + " ".join(told)


def answer_bits(task: Mapping[str, Any]) -> str:
    """Which bits do harm, in the first of the dtypes."""
    dtype = task["dtypes"][0]
    ranked = task["too_hard"] is None
    measure, verb = ("breaks", "breaks") if ranked else ("changed", "changes")
    exponent, mantissa = (harm(dtype["fields"][field], ranked) for field in ("exponent", "mantissa"))
    gap = estimate_of(dtype["contrasts"]["exponent - mantissa"][measure])
    pair = f"{percent(exponent)} of answers, one of a mantissa bit {percent(mantissa)}"
    if gap.above():
        said = f"A single flip of an exponent bit of {dtype['dtype']} {verb} {pair}: the exponent is what matters."
    elif gap.below():
        said = f"A single flip of an exponent bit of {dtype['dtype']} {verb} {pair}: the mantissa matters more."
    else:
        said = (
            f"No difference between fields was detected: a flip of an exponent bit of {dtype['dtype']} {verb} {pair}."
        )
    worst = max(dtype["bits"], key=lambda each: harm(each, ranked).mean)
    if harm(worst, ranked).mean > 0:
        said += f" The worst is bit {worst['bit']} ({worst['field']}), which {verb} {percent(harm(worst, ranked))}."
    return said


def answer_silence(task: Mapping[str, Any]) -> str:
    """How many places in a number alter an answer with every number finite, beside what was published for bf16."""
    found = [
        f"{len(dtype['altered'])} of the {len(dtype['bits'])} bits of {dtype['dtype']}" for dtype in task["dtypes"]
    ]
    said = f"At {_listed(found)} some flip altered an answer while all numbers stayed finite"
    if any(dtype["dtype"] == "bf16" for dtype in task["dtypes"]):
        said += f" (for bf16 {PAPER} reports {_BF16_PAPER} of 16, its places being chosen and not drawn)"
    broken = task["broken"]["single"]
    loud = [f"{_numbered(dtype['nonfinite'])} of {dtype['dtype']}" for dtype in task["dtypes"] if dtype["nonfinite"]]
    if not broken["broken"]:
        return f"{said}. None of {broken['rows']} single flips gave NaN or infinity."
    return f"{said}. NaN or infinity came of {broken['broken']} of {broken['rows']} single flips, of {', '.join(loud)}."


def answer_rate(task: Mapping[str, Any]) -> str:
    """Up to which error rate accuracy is not significantly below clean."""
    if task["too_hard"]:
        return task["too_hard"]
    dtype, rates = task["dtypes"][0]["dtype"], of_field(task, ANY)
    clean = percent(estimate_of(task["clean"]))
    if not estimate_of(rates[0]["from_clean"]).has_interval:
        return (
            f"From {task['items']} items nothing can be said of the rate at which accuracy falls below clean ({clean})."
        )
    bearable = tolerated(task, ANY)
    if bearable is None:
        first = rates[0]
        return (
            f"When bits of {dtype} flip all over the cache, accuracy is below clean ({clean}) at the lowest rate "
            f"measured, {shown_rate(first)}: {percent(estimate_of(first['accuracy']))}."
        )
    said = (
        f"When bits of {dtype} flip all over the cache, accuracy is not significantly below clean ({clean}) up to a "
        f"rate of {shown_rate(bearable)}"
    )
    beyond = rates[rates.index(bearable) + 1 :]
    if not beyond:
        return f"{said}, the highest measured."
    return f"{said}; at {shown_rate(beyond[0])} it is {percent(estimate_of(beyond[0]['accuracy']))}."


def warnings(metrics: Mapping[str, Any], dtype: torch.dtype) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if few := few_clusters(metrics["items"], "items of each task"):
        found.append(few)
    for task in metrics["tasks"]:
        if task["too_hard"]:
            found.append(
                f"{task['too_hard']} For it, only whether answers stay the same and numbers finite is reported, not "
                "what breaks."
            )
        elif task["right"] < FEW <= metrics["items"]:
            found.append(
                f"Of {task['task']}, only {task['right']} items are answered rightly on a sound cache, and only those "
                "can break."
            )
    if dtype != torch.float32:
        found.append(
            f"The model runs in {_named(dtype)}, in which K and V are held: bits of a finer dtype that it cannot hold "
            "are rounded away again after the flip."
        )
    return found


def _done_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    task = tasks_of(config)[0]
    item = task.items(1, config.seed)[0]
    passages = passages_of(item.chat, marked=item.answer)
    dtypes = config.dtypes
    bits = sum(LAYOUTS[dtype].bits for dtype in dtypes)
    return Section(
        title="What was done",
        paragraphs=[
            f"The first item of {task.name}"
            + (f"; the reply begins “{item.lead}”. " if item.lead else ". ")
            + "Each prompt is read once; each flip is a row of one batch beside the clean row, and answers on its own "
            "copy of K and V.",
        ],
        passages=passages,
        points=[
            f"Single flips: {config.flips} for each item at each of {bits} bits of {_listed(dtypes)}. Layer, KV head, "
            "slot, channel, and K or V are drawn once for each flip and kept for all bits and dtypes, so that bits are "
            "compared at the same places. The struck number is rounded to the dtype, one of its bits is inverted, and "
            f"it is put back; the model computes in {_named(model.lanes.dtype)}.",
            "Error rates: a share of all numbers of K and V, in each layer and in each of K and V alike, has one "
            f"drawn bit flipped, in {dtypes[0]}: of any field, or of one field only. Each number is drawn on its own, "
            "so how many flip is itself random.",
            f"Damage is {TIMINGS['once']}: the prompt's last token and all that is written feel it.",
            "An answer is one of three kinds, if the clean answer is right: nothing (the same, token for token), words "
            "(other tokens, still right), breaks (no longer right, or a number is NaN or infinite). KL is clean ‖ "
            "struck in nats per token of the clean answer, which both rows read"
            + ("." if config.follow else "; it was not measured here (follow is off)."),
            "Shares have Wilson intervals over items, in which an item's flips count once; differences and KL have "
            "jackknife intervals over items. Those that decide the headline hold together.",
        ],
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    told = []
    for task in metrics["tasks"]:
        control, name = task["control"], task["task"]
        holds = control["struck"] == 0 and control["changed"] == 0 and (control["kl"] or 0) <= _SAME
        kl = "" if control["kl"] is None else f", KL at most {control['kl']:.1e} nats (allowed: {_SAME:.0e})"
        told.append(
            f"{name}: flips at a rate of zero, {control['rows']} rows, struck {control['struck']} vectors and changed "
            f"{control['changed']} answers{kl}. The control {'holds' if holds else 'DOES NOT HOLD: doubt this run'}."
        )
        low, high = control["flips_struck"]
        told.append(
            f"{name}: each single flip struck "
            f"{'exactly one vector' if low == high == 1 else f'{low} to {high} vectors, NOT ONE: doubt this run'}."
        )
        if has_kl(task):
            lowest = "; ".join(f"{dtype['dtype']} {shown_kl(dtype['bits'][0]['kl'])}" for dtype in task["dtypes"])
            told.append(
                f"{name}: the struck number alone is rounded to the dtype before its bit flips. The lowest mantissa "
                f"bit changes a number by at least as much as that rounding, and its KL is: {lowest} nats."
            )
        for kind, label in (("single", "single flips"), ("rate", "flips at a rate")):
            broken = task["broken"][kind]
            if broken["broken"]:
                first = broken["first"]
                told.append(
                    f"{name}, {label}: in {broken['broken']} of {broken['rows']} rows numbers were not finite. They "
                    f"count as breaks and as wrong, and have no KL. The first: {first['broken']} (item "
                    f"{first['item']}, {first['dtype']}, bits: {first['field']})."
                )
    return Section(title="Controls", points=told)


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    limits = [
        f"{model.name} is one model with {model.geometry.n_layers} layers; larger ones have more numbers to strike, "
        "and each may weigh less.",
        "Only the struck numbers are stored in the dtype; all others, and the computation, stay as the model has them. "
        "That sets the flip apart from what rounding the whole cache does, which is not measured here.",
        f"Places are drawn, so this is what a chance error does; an attacker who chooses places ({PAPER}) does at "
        "least as much. Blocks that several requests share are not modelled: there the same flip would be felt by each "
        "of them.",
        "Answers are greedy and short; the longer an answer, the more chances a small change has to turn it.",
        "With few flips to an item, bits that seldom do harm look harmless: see the upper ends of the intervals.",
    ]
    windows = [window for window in model.geometry.windows if window is not None]
    if windows:
        limits.append(
            f"{len(windows)} of {model.geometry.n_layers} layers have a sliding window of {min(windows)} positions; "
            "flips in slots that are out of the window are counted, though nobody reads them."
        )
    return Section(title="Limits", points=limits)


def _numbered(bits: Sequence[int]) -> str:
    return f"bit{'' if len(bits) == 1 else 's'} {', '.join(str(bit) for bit in bits)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
