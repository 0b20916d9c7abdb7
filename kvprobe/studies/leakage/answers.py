"""The leakage study's answer, in a few sentences that the numbers decide."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvprobe.stats import Estimate
from kvprobe.studies.leakage.analyse import CHANGED
from kvprobe.wording import estimate_of, percent, points, signed


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
    """What the probes found, in a sentence or two. Its claims and their intervals are those of `metrics["claims"]`."""
    split, words = metrics["headline_split"], WORDS[metrics["secret"]]
    leak = estimate_of(metrics["claims"]["leak"])
    read = f"{_read(metrics, split, 'masked')} (chance {metrics['chance']:.0%}, restart floor {_floor(metrics, split)})"
    told = f"{read}, a difference of {points(leak)}"
    if split == "random":
        found = {
            True: "Information leaks within this conversation",
            False: "No leak was detected in this conversation",
            None: "Whether information leaks in this conversation cannot be said",
        }[_claimed(metrics, "leak")]
        return (
            f"{found}: a linear probe on the slots after the masked turn reads {told}, in this one conversation, "
            f"having seen it with other secrets.{_doubt(leak)}"
        )
    name, changed = CHANGED["masked"], estimate_of(metrics["claims"]["changed"])
    leaks = _claimed(metrics, "leak") or _claimed(metrics, "changed")
    if leaks is None:
        found = "Whether information leaks cannot be said from so few conversations"
    elif not leaks:
        found = "No leak that a probe can read in new conversations was detected"
    elif _claimed(metrics, "leak"):
        found = "Information leaks"
    else:
        found = "Information leaks to anyone who has the visible text, too"
    sentence = (
        f"{found}: in conversations it was not trained on, a linear probe on the slots after the masked turn reads "
        f"{told}, with a selectivity of {_selective(metrics, split, 'masked')}; of what differs from the restart, "
        f"which anyone can compute from the visible text, it reads {_read(metrics, split, name)}, {points(changed)} "
        f"above its floor.{_doubt(leak)}"
    )
    centred = (
        f"centred on other secrets of the same conversation, a probe reads {_read(metrics, 'paired', 'masked')} (floor "
        f"{_floor(metrics, 'paired')})"
    )
    inside = _claimed(metrics, "inside")
    if inside is False:
        return f"{sentence} {centred.capitalize()}, not significantly more than the floor."
    if leaks or inside is None:
        return f"{sentence} {centred.capitalize()}."
    return (
        f"{sentence} Something of {words.known} is there all the same, in a place that differs between "
        f"conversations: {centred}."
    )


def _claimed(metrics: Mapping[str, Any], name: str) -> bool | None:
    """Whether a leak is claimed: its interval lies above zero, and permuted labels confirm it. None without an
    interval."""
    leak = estimate_of(metrics["claims"][name])
    return leak.above() and metrics["claims"][name]["confirmed"] if leak.has_interval else None


def _read(metrics: Mapping[str, Any], split: str, arm: str) -> str:
    return f"{percent(estimate_of(metrics['accuracy'][split][arm]))} of the {WORDS[metrics['secret']].read}"


def _floor(metrics: Mapping[str, Any], split: str) -> str:
    return percent(estimate_of(metrics["accuracy"][split]["restart"]))


def _selective(metrics: Mapping[str, Any], split: str, arm: str) -> str:
    return points(estimate_of(metrics["selectivity"][split][arm]))


def _doubt(leak: Estimate) -> str:
    return " A difference below zero cannot be information; doubt the run." if leak.below() else ""


def answer_use(metrics: Mapping[str, Any]) -> str:
    """Whether the model uses what is left, in a sentence. It is decided by the margin of the true secret over others,
    because a cache can make all of them likelier."""
    use = metrics["use"]
    gain = estimate_of(metrics["claims"]["use"])
    share = gain.mean / use["full"]["margin"]["mean"]
    right = {arm: estimate_of(use[arm]["token_accuracy"]) for arm in ("full", "retained", "restart")}
    known = WORDS[metrics["secret"]].known
    told = (
        f"asked for {known}, it gets {percent(right['full'])} of its tokens right with everything in view, "
        f"{percent(right['retained'])} after masking and {percent(right['restart'])} after a restart; masking instead "
        f"of restarting changes the log-probability of the true one, over that of others, in nats by {signed(gain)}, "
        f"which is {share:.1%} of what the full context gives"
    )
    if not gain.has_interval:
        return f"Whether the model uses what is left cannot be said from so few conversations: {told}."
    if gain.above():
        return f"The model uses some of what is left: {told}."
    if gain.below():
        return f"The retained cache turns the model away from {known}: {told}."
    return f"No use by the model was detected: {told}."
