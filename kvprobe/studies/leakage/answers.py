"""The leakage study's answer, in a few sentences that the numbers decide."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvprobe.stats import Estimate
from kvprobe.studies.leakage.analyse import CHANGED
from kvprobe.wording import estimate_of, percent, points


@dataclass(frozen=True)
class Words:
    """How a kind of secret is spoken of.

    Attributes:
        secret: with its article, when first named.
        known: when known.
        read: what a probe reads.
    """

    secret: str
    known: str
    read: str


WORDS = {
    "code": Words("a random 5-digit number", "the code", "digits"),
    "name": Words("a random person's name", "the name", "first names"),
    "topic": Words("a random word on one of eight topics", "the word", "topics"),
    "sentiment": Words("a random word for a good or a bad mood", "the word", "moods"),
}


def answer_probe(metrics: Mapping[str, Any]) -> str:
    """What the probes found, in a sentence or two."""
    split, words = metrics["headline_split"], WORDS[metrics["secret"]]
    leak = estimate_of(metrics["leak"][split]["masked"])
    read = f"{_read(metrics, split, 'masked')} (chance {metrics['chance']:.0%}, restart floor {_floor(metrics, split)})"
    told = f"{read}, a difference of {points(leak)}"
    if split == "random":
        found = (
            "Information leaks within this conversation" if leak.low > 0 else "No leak was found in this conversation"
        )
        return (
            f"{found}: a linear probe on the slots after the masked turn reads {told}, in this one conversation, having seen it "
            "with other secrets." + _doubt(leak)
        )
    name = CHANGED["masked"]
    changed = estimate_of(metrics["leak"][split][name])
    leaks = leak.low > 0 or changed.low > 0
    found = "No leak that a probe can read in new conversations was found"
    if leaks:
        found = "Information leaks" if leak.low > 0 else "Information leaks to whoever has the visible text, too"
    sentence = (
        f"{found}: in conversations it was not trained on, a linear probe on the slots after the masked turn reads {told}, with a "
        f"selectivity of {_selective(metrics, split, 'masked')}; of what differs from the restart, which anyone can compute from the visible text, it reads {_read(metrics, split, name)}, "
        f"{points(changed)} above its floor."
    )
    inside = estimate_of(metrics["leak"]["paired"]["masked"])
    centred = (
        f"centred on other secrets of the same conversation, a probe reads {_read(metrics, 'paired', 'masked')} (floor "
        f"{_floor(metrics, 'paired')})"
    )
    if inside.low <= 0:
        return f"{sentence}{_doubt(leak)} {centred.capitalize()}, no more than the floor."
    if leaks:
        return f"{sentence}{_doubt(leak)} {centred.capitalize()}."
    return (
        f"{sentence}{_doubt(leak)} Something of {words.known} is there all the same, in a place that differs between "
        f"conversations: {centred}."
    )


def _read(metrics: Mapping[str, Any], split: str, arm: str) -> str:
    return f"{percent(estimate_of(metrics['accuracy'][split][arm]))} of the {WORDS[metrics['secret']].read}"


def _floor(metrics: Mapping[str, Any], split: str) -> str:
    return percent(estimate_of(metrics["accuracy"][split]["restart"]))


def _selective(metrics: Mapping[str, Any], split: str, arm: str) -> str:
    return points(estimate_of(metrics["selectivity"][split][arm]))


def _doubt(leak: Estimate) -> str:
    return " A difference below zero cannot be information; doubt the run." if leak.high < 0 else ""


def answer_use(metrics: Mapping[str, Any]) -> str:
    """Whether the model uses what is left, in a sentence. It is decided by the margin of the true secret over others,
    because a cache can make all of them likelier."""
    use = metrics["use"]
    gain = estimate_of(use["delta_margin"])
    share = gain.mean / use["full"]["margin"]["mean"]
    right = {arm: estimate_of(use[arm]["token_accuracy"]) for arm in ("full", "retained", "restart")}
    known = WORDS[metrics["secret"]].known
    told = (
        f"asked for {known}, it gets {percent(right['full'])} of its tokens right with everything in view, "
        f"{percent(right['retained'])} after masking and {percent(right['restart'])} after a restart; masking instead of "
        f"restarting changes the log-probability of the true one, over that of others, by {gain.mean:+.3f} nats "
        f"(95 % interval {gain.low:+.3f} to {gain.high:+.3f}), which is {share:.1%} of what the full context gives"
    )
    if gain.low > 0:
        return f"The model uses some of what is left: {told}."
    if gain.high < 0:
        return f"The retained cache turns the model away from {known}: {told}."
    return f"No use by the model was found: {told}."
