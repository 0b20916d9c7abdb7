"""What the features report says: its answer, what is read, controls and limits. Every claim is decided by the numbers;
none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Report, Section, TokenView, passages_of
from kvprobe.studies.features.analyse import PARTS
from kvprobe.studies.features.collect import HIDDEN_SEGMENTS, SPLICED
from kvprobe.studies.features.config import Config
from kvprobe.studies.features.results import (
    best,
    best_single,
    decoding_section,
    difference_section,
    exchange_section,
    latents_section,
    quality_section,
)
from kvprobe.tasks.passcode import contexts, conversation
from kvprobe.wording import estimate_of, few_clusters, percent

QUESTION = (
    "A turn that holds a random number is summarised without it and then masked. In terms of sparse features: which "
    "latents differ between the cache that saw the turn and one recomputed without it, on the same text; do single "
    "latents tell the number better than single dimensions do; and do the latents that differ matter to the answer?"
)
_ROUND_OFF = 100
"""Steps of the dtype's precision that a control may vary by."""


def narrate(
    metrics: Mapping[str, Any],
    curves: Any,
    config: Config,
    model: Model,
    environment: Mapping[str, Any],
    views: Mapping[str, Sequence[TokenView]],
) -> Report:
    """The report of a run.

    Args:
        views: by place, the texts of the latents that are shown.
    """
    return Report(
        title=f"Sparse features after masking: {model.name}",
        question=QUESTION,
        answer=f"{answer_differs(metrics)} {answer_tells(curves, metrics)}",
        warnings=warnings(metrics),
        sections=[
            _read_section(config),
            quality_section(metrics, config),
            difference_section(metrics),
            *(latents_section(place, metrics, views[place]) for place in metrics["places"]),
            decoding_section(metrics, curves),
            exchange_section(metrics),
            Section(title="Controls", points=[text for text, _ in controls(metrics)]),
            _limits_section(metrics, model, config),
            reproduce_section(
                "features",
                config,
                environment,
                also=[
                    "Data: samples.parquet (quality), differences.parquet, curves.parquet, exchanges.parquet and "
                    "metrics.json beside this page"
                    + ("; the dictionaries are in dictionaries/." if config.trains else "."),
                    "k-sparse probing: Gurnee et al. 2023 (arXiv 2305.01610). TopK: arXiv 2406.04093; JumpReLU: arXiv "
                    "2407.14435.",
                ],
            ),
        ],
    )


def answer_differs(metrics: Mapping[str, Any]) -> str:
    """How many latents of the first place differ in T3, beside raw dimensions, and whether those that differ most
    matter most."""
    place = metrics["places"][0]
    counts, entry = metrics["differing"][place]["T3"], metrics["exchange"][place]
    apart = estimate_of(entry["claim"])
    verb = (
        "too few conversations to say whether more than random ones"
        if not apart.has_interval
        else "more than random ones"
        if apart.above()
        else "less than random ones"
        if apart.below()
        else "not significantly more or less than random ones"
    )
    return (
        f"At {place}, {counts['latents']['claimed']} of {counts['latents']['alive']} latents "
        f"({counts['raw']['claimed']} of {counts['raw']['alive']} raw dimensions) differ in T3 between the retained "
        f"and the recomputed cache, and the {metrics['exchanged']} that differ most on other conversations carry "
        f"{percent(estimate_of(entry['sets']['differing']))} of the distance between the predictions, {verb} (the "
        f"whole activation {percent(estimate_of(entry['sets']['whole']))})."
    )


def answer_tells(curves: Any, metrics: Mapping[str, Any]) -> str:
    """Whether one latent tells a digit better than one raw dimension, where the label is to be read at all."""
    claims = {
        name: {place: estimate_of(own) for place, own in metrics["claims"][name].items()} for name in ("single", "read")
    }
    better, worse = [], []
    for place, apart in claims["single"].items():
        latents, raw = (best_single(curves, place, "hidden", "paired", reader) for reader in ("latents", "raw"))
        told = f"{place} ({percent(latents)} against {percent(raw)})"
        better += [told] * apart.above()
        worse += [told] * apart.below()
    told = [f"{word} at {', '.join(each)}" for word, each in (("better", better), ("worse", worse)) if each]
    single = "In T2 itself the best single latent"
    if not any(each.has_interval for each in claims["single"].values()):
        found = [f"{single} and the best single dimension cannot be compared over so few conversations"]
    elif told:
        found = [f"{single} tells a digit {' and '.join(told)} than the best single dimension"]
    else:
        found = [f"{single} does not tell a digit significantly better or worse than the best single dimension"]
    parts = [best(curves, metrics["places"][0], "hidden", "paired", part) for part in PARTS]
    found.append(
        f"at {metrics['places'][0]} a probe reads {percent(parts[0])} of the digits from all of the reconstruction and "
        f"{percent(parts[1])} from what it leaves out"
    )
    read = claims["read"].values()
    if any(each.has_interval for each in read):
        verb = "read" if any(each.above() for each in read) else "are not significantly read"
        found.append(f"in conversations that the probe has not seen, T3's latents {verb} above the recomputed floor")
    return f"{'; '.join(found)}."


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    if few := few_clusters(metrics["contexts"], "conversations"):
        found.append(few)
    for place in metrics["places"]:
        judged = metrics["quality"][place]
        if judged["recovered"]["mean"] < 0.5:
            found.append(
                f"The dictionary of {place} brings back only {percent(estimate_of(judged['recovered']))} of what the "
                "mean activation costs: what it does not see, this report does not see."
            )
    if failed := [text for text, holds in controls(metrics) if not holds]:
        found.append(f"A control does not hold, doubt this run: {failed[0]}")
    return found


def controls(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each control in words, and whether it holds."""
    slack = _ROUND_OFF * metrics["precision"]
    found = []
    for place in metrics["places"]:
        off = metrics["untouched"][place]
        found.append(
            (
                f"Light cone, {place}: the system message stands before everything that is hidden, so that nothing may "
                f"differ there. It differs by {off:.1e} of its size (allowed for round-off: {slack:.1e}).",
                off <= slack,
            )
        )
        judged = metrics["quality"][place]
        turned, own = (estimate_of(judged[name]) for name in ("unexplained_turned", "unexplained"))
        holds = own.high < turned.low if own.has_interval else own.mean < turned.mean
        found.append(
            (
                f"Turned dictionary, {place}: turned at random, it leaves {percent(turned)} of the variance "
                f"unexplained; as trained, {percent(own)}.",
                holds,
            )
        )
    return found


def _read_section(config: Config) -> Section:
    context = contexts()[0]
    code = "48213"
    passages = passages_of(conversation(context, code), masked=HIDDEN_SEGMENTS, marked=code, only_in=("T2", "T3"))
    return Section(
        title="What is read",
        paragraphs=[
            f"One of {config.contexts} hand-written conversations, each with {config.codes} random codes. Retained: T1 "
            "and T2 are masked when T3 begins, but summary 2 was computed while T2 was in view. Restart: the same "
            "tokens at the same positions, computed afresh without T1 and T2.",
        ],
        passages=passages,
    )


def _limits_section(metrics: Mapping[str, Any], model: Model, config: Config) -> Section:
    trained = [entry.get("kvprobe_tokens") for entry in metrics["trained_on"]]
    recorded = [entry.get("kvprobe_recorded") for entry in metrics["trained_on"]]
    size: Sequence[str] = (
        [
            f"Dictionaries published for research see 10⁸ tokens and more; these saw {max(map(int, recorded)):,}, "
            f"again and again ({max(map(int, trained)):,} in all), of a narrow distribution. What they lack is no "
            "evidence that the model lacks it.",
        ]
        if all(trained) and all(recorded)
        else ["What the dictionaries were trained on is what their own cards say."]
    )
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what its features do says nothing of "
            "larger ones.",
            *size,
            "Unless the model was trained to go on from masked turns, a retained cache is out of distribution for it. "
            "There is no arm with an irrelevant masked block, so a latent that differs may tell of masking as such.",
            "Means over slots hide where in a segment a latent differs.",
            f"One dictionary for each place, one seed; losses were measured on {min(SPLICED, config.contexts)} "
            "conversations.",
            "Other seeds give other latents (their numbers mean nothing), and features that dictionaries agree on may "
            "be few.",
        ],
    )
