"""The sentences of the use report. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from kvprobe.studies.use.analyse import found
from kvprobe.studies.use.check import ANEW, INTACT, SAME
from kvprobe.studies.use.effects import CODE_MASKED, ERASE, FULL, IN_VIEW, STRENGTHS, TURN_MASKED
from kvprobe.studies.use.figures import PLACE_NAMES, SITES, accuracy
from kvprobe.studies.use.fit import LEACE, RANDOM
from kvprobe.studies.use.read import PLACES
from kvprobe.wording import estimate_of, few_clusters, percent, signed

MUCH = 0.05
"""Share of the margin in view below which what is used is a trace."""
NEAR_CHANCE = 0.05
"""How far above chance a probe may read after erasure for the erasure to be called complete."""
_ROUND_OFF = 1e4
"""Steps of the dtype's precision, of the largest logit difference, that a control may move."""

VIEW_NAMES = {
    IN_VIEW: "everything in view",
    CODE_MASKED: "the code's own slots masked",
    TURN_MASKED: "T1 and T2 masked",
}


def used(metrics: Mapping[str, Any], view: str, place: str) -> str:
    """`used`, `a trace`, `not detected` or `unknown`: what erasing K and V of all layers takes from the margin beyond
    random subspaces, its interval wide enough for all places together."""
    beyond = estimate_of(found(metrics, "erased", view, place)["claim"])
    if not beyond.above():
        return "not detected" if beyond.has_interval else "unknown"
    return "used" if beyond.mean >= MUCH * metrics["scale"][IN_VIEW]["margin"]["mean"] else "a trace"


def answer_use(metrics: Mapping[str, Any]) -> str:
    """Of each place whether the model uses what the probe reads in it."""
    whole = metrics["scale"][IN_VIEW]["margin"]["mean"]
    told = {
        "used": "The model uses what the probe reads in",
        "a trace": f"It uses a trace (below {MUCH:.0%} of the margin) of what the probe reads in",
        "not detected": "No use was detected of what the probe reads in",
        "unknown": "Too few conversations to say whether the model uses what the probe reads in",
    }
    sentences = []
    for verdict, start in told.items():
        places = [
            f"{site_name(view, place)} [{_lost(metrics, view, place)}]"
            for view, place in SITES
            if used(metrics, view, place) == verdict
        ]
        if places:
            sentences.append(f"{start} {'; '.join(places)}.")
    return (
        f"{' '.join(sentences)} In brackets: nats of the true code's margin over other codes that are lost when the "
        "code is erased there from K and V of all layers, beyond random subspaces of the same rank, and when the whole "
        f"vectors are averaged away; with everything in view the margin is {whole:.1f}."
    )


def _lost(metrics: Mapping[str, Any], view: str, place: str) -> str:
    own = found(metrics, "erased", view, place)
    return f"{signed(estimate_of(own['claim']), 2)}; whole vectors {signed(estimate_of(own['lost'][FULL]), 2)}"


def site_name(view: str, place: str) -> str:
    return PLACE_NAMES[place] if view == IN_VIEW else f"{PLACE_NAMES[place]} with {VIEW_NAMES[view]}"


def answer_swap(metrics: Mapping[str, Any]) -> str:
    """How far exchanging the subspace turns the answer, at the code's own slots."""
    own = found(metrics, "swapped", IN_VIEW, "code")
    if own["share"] is None:
        return "Between two codes the model's answer hardly differs, so that there is no way for an exchange to go."
    share = {name: percent(estimate_of(own["share"][name])) for name in (LEACE, RANDOM, FULL)}
    return (
        f"Exchanged for another code's in the code's own slots, the same subspace turns the answer {share[LEACE]} of "
        f"the way to the other code, random subspaces {share[RANDOM]}, the whole vectors {share[FULL]}."
    )


def answer_probes(metrics: Mapping[str, Any]) -> str:
    """Whether the erasure erased, as probes see it."""
    same = {place: accuracy(metrics, place, "V", SAME, LEACE)["mean"] for place in PLACES}
    before = {place: accuracy(metrics, place, "V", SAME, INTACT)["mean"] for place in PLACES}
    anew = {place: accuracy(metrics, place, "V", ANEW, LEACE)["mean"] for place in PLACES}

    def each(values: Mapping[str, float]) -> str:
        return ", ".join(f"{values[place]:.0%}" for place in PLACES)

    places = ", ".join(PLACE_NAMES[place] for place in PLACES)
    if max(same.values()) > metrics["chance"] + NEAR_CHANCE:
        return (
            f"The erasure did not take all that the probe reads (V of {places}: {each(before)} before, {each(same)} "
            f"after, chance {metrics['chance']:.0%}), so that a use that was not detected may be of what was left."
        )
    sentence = (
        f"The erasure did erase what the probe reads (V of {places}: {each(before)} of digits before, {each(same)} "
        f"after, chance {metrics['chance']:.0%})"
    )
    if max(anew.values()) > metrics["chance"] + NEAR_CHANCE:
        return (
            f"{sentence}; a probe trained anew on what is left still reads {each(anew)}, and only averaging whole "
            "vectors leaves it nothing."
        )
    return f"{sentence}, and a probe trained anew reads no more ({each(anew)})."


def dose_sentence(metrics: Mapping[str, Any]) -> str:
    """Whether more erasure takes more."""
    lost = {strength: dose(metrics, ERASE, LEACE, strength)["mean"] for strength in STRENGTHS if strength <= 1}
    rises = all(after >= before for before, after in pairwise(lost.values()))
    if not rises or lost[1.0] <= 0:
        return "Between nothing and all, more erasure does not always take more."
    return f"More erasure takes more; half of it takes {lost[0.5] / lost[1.0]:.0%} of what all of it does."


def dose(metrics: Mapping[str, Any], kind: str, name: str, strength: float) -> Mapping[str, float]:
    wanted = {"kind": kind, "name": name, "strength": strength}
    return next(each for each in metrics["doses"] if wanted.items() <= each.items())["value"]


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    told = []
    if few := few_clusters(metrics["conversations"], "conversations"):
        told.append(few)
    if failed := [text for text, holds in controls(metrics) if not holds]:
        told.append(f"A control does not hold, doubt this run: {failed[0]}")
    return told


def controls(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each control in words, and whether it holds."""
    own = metrics["controls"]
    allowed = _ROUND_OFF * metrics["precision"] * max(1.0, own["largest"])

    def checked(name: str, claim: str) -> tuple[str, bool]:
        holds = own[name] <= allowed
        verdict = "holds" if holds else "DOES NOT HOLD"
        return f"{claim}: off by at most {own[name]:.1e} logits (allowed: {allowed:.1e}). It {verdict}.", holds

    return [
        checked("itself", "Every slot from the code to the summary exchanged for the run's own changes nothing"),
        checked("donor", "Every slot from the code to the summary exchanged for the donor's gives the donor's answer"),
    ]
