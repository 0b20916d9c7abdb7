"""Whether readers read the secret: such as know the conversation, and such as have never seen it.

They read its digits, or else words that recur in several secrets; of other conversations, else which secret it is.

A ridge on one part of one layer always does; a stronger reader of the ladder (`kvprobe.probing.readers`) may read
beside it. Each is held against itself: after a restart, with secrets dealt out at random, and with everything in view.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.forgetting.hidden_secret import HiddenSecret, up_to
from kvprobe.forgetting.secret_places import CLASSES, FEWEST_READ, REPEATS, Noun, SecretPlaces, are_codes, learnable
from kvprobe.forgetting.trace import SecretTrace, Slots
from kvprobe.forgetting.views import View, ViewOfOthers, view_of
from kvprobe.forgetting.ways import NOTHING, WAYS, Way, forgotten
from kvprobe.inference.model import Model
from kvprobe.probing.calibration import calibrated_tasks, joined
from kvprobe.probing.linear import log_frequency
from kvprobe.probing.readers import BEST, Known, Rung, calibrated, read
from kvprobe.progress import Bar
from kvprobe.stats import SHARE, Estimate, estimate
from kvprobe.tasks.grammar import Conversation, draw, random_codes

SecretReader = Literal["ridge", "slot", "hidden", "attention", "transformer"]
"""Ridge on one part of one layer, or on one slot; one hidden layer on the best parts; attention over slots and layers;
a transformer over them."""
RIDGE: SecretReader = "ridge"
FOLDS = 4


@dataclass(frozen=True)
class SecretReading:
    """What a reader makes of secrets.

    Attributes:
        digits: share of the digits that were read right, or of what `noun` names.
        whole: share of the secrets of which every digit was.
        bits: read of each digit, of `held`; below zero where the reader misleads.
        place: the layers, parts or slots that it read.
        held: bits of each place for one who knows how often each word stands there, as the reader does: the most that
            can be read.
        restart: digits that the same reader reads after a restart.
        dealt: digits that it reads by chance: of secrets dealt out at random among the same caches.
        control: digits that it reads of the segments themselves with everything in view; None where it was not asked.
        chance: digits that the same guesses find of the other secrets: where some digits are commoner than others, more
            than the one in ten of an even draw, below which it is never set.
    """

    digits: Estimate
    whole: Estimate
    bits: Estimate
    place: str
    held: float
    reader: SecretReader = RIDGE
    restart: Estimate | None = None
    dealt: Estimate | None = None
    control: Estimate | None = None
    chance: float = 1 / CLASSES
    noun: Noun = "digit"

    @property
    def shares(self) -> dict[str, Estimate | None]:
        """The shares, by name."""
        return {name: getattr(self, name) for name in ("digits", "whole", "restart", "dealt", "control")}

    def record(self) -> dict[str, object]:
        """For JSON."""
        numbers = {name: one and one.record() for name, one in (*self.shares.items(), ("bits", self.bits))}
        said = {"reader": self.reader, "reads": self.noun, "place": self.place, "chance": self.chance}
        return {**said, **numbers}

    @property
    def above_chance(self) -> bool:
        """Whether more was read than by chance, in digits or in bits: a bit of a digit hardly helps to name it."""
        return self.digits.above(self.chance) or self.bits.above()


def refuse_unreadable(case: HiddenSecret, secrets: Sequence[str], reader: SecretReader, conversations: int) -> None:
    """Refuse readers that were asked for and cannot learn, in place of leaving them out.

    Raises:
        UserError: too few secrets, or none that readers can learn from, for a reader beside the ridge; or nothing after
            them, for readers from other conversations; or too few of these.
    """
    if reader != RIDGE and not conversations and not learnable(secrets):
        raise UserError(
            f"The reader {reader!r} learns digits, or words that recur, from {FEWEST_READ} secrets or more that have "
            f"as many of them each, and cannot from the {len(secrets)} here; give more such secrets, or leave reader "
            "(--reader) out."
        )
    order = case.chat.segments
    if conversations and max(order.index(name) for name in case.hide) == len(order) - 1:
        raise UserError(
            "Other conversations (--conversations) are read in the segment after what is hidden, and there is none; "
            "give a conversation that goes on, or leave them out."
        )
    if not are_codes(secrets):
        places = SecretPlaces.or_which(secrets)
        fewest = REPEATS * places.classes
        if 0 < conversations < fewest:
            raise UserError(
                f"Readers of one {places.noun} of {places.classes} learn from {fewest} other conversations or more, "
                f"{REPEATS} for each, and there would be {conversations}; give more conversations (--conversations) or "
                "fewer secrets, or leave them out."
            )
        return
    others = min(conversations, 10 ** len(case.secret) - len(secrets))
    if conversations and others < FEWEST_READ:
        raise UserError(
            f"Readers learn from {FEWEST_READ} other conversations or more, each with a code of its own, and there "
            f"would be {others}; give longer codes or more conversations (--conversations), or leave them out."
        )


@dataclass(frozen=True)
class SecretQuestion:
    """What readers are asked: labels of samples, in folds; the samples that are asked about, and how many readers are
    asked."""

    labels: Int[Tensor, "places samples"]
    folds: Int[Tensor, "samples"]
    asked: Bool[Tensor, "samples"]
    readers: int
    seed: int
    classes: int = CLASSES
    noun: Noun = "digit"

    def dealt(self) -> "SecretQuestion":
        """With labels dealt out at random, among those that are asked about and among the others."""
        rng, order = np.random.default_rng(self.seed), torch.arange(len(self.asked))
        for some in (self.asked, ~self.asked):
            order[some] = torch.from_numpy(rng.permutation(order[some].numpy()))
        return replace(self, labels=self.labels[:, order])


def known_readings(
    model: Model,
    caches: Sequence[KVCache],
    slots: Slots,
    trace: SecretTrace,
    secrets: Sequence[str],
    readers: Sequence[SecretReader],
    rng: np.random.Generator,
) -> tuple[SecretReading, ...]:
    """What readers make of the slots that stay which have learned from other secrets of this very conversation.

    None where secrets have neither digits that differ nor words that recur, or are too few to learn from.
    """
    if not slots.positions or not learnable(secrets):
        return ()
    places = SecretPlaces.of(secrets)
    folds = torch.from_numpy(rng.permutation(np.arange(len(secrets)) % FOLDS))
    asked = torch.ones_like(folds, dtype=torch.bool)
    question = SecretQuestion(
        places.labels, folds, asked, len(readers), int(rng.integers(2**31)), places.classes, places.noun
    )
    view, restart = view_of(model, caches, slots, trace), View.alike(len(secrets))
    return tuple(held_against(reader, question, view, restart) for reader in readers)


def held_against(
    reader: SecretReader, question: SecretQuestion, left: View, restart: View, in_view: View | None = None
) -> SecretReading:
    """What a reader makes of what is left, and the same reader of a restart, by chance, and with everything in view."""
    return replace(
        _reading(reader, question, left),
        noun=question.noun,
        restart=_reading(reader, question, restart).digits,
        dealt=_reading(reader, question.dealt(), left).digits,
        control=None if in_view is None else _reading(reader, question, in_view).digits,
    )


def _reading(reader: SecretReader, question: SecretQuestion, view: View) -> SecretReading:
    if reader == RIDGE:
        return read_by_probes(
            view.sites, question.labels, question.folds, question.asked, question.classes, question.readers
        )
    return _read_on_the_ladder(reader, question, view)


def _read_on_the_ladder(reader: SecretReader, question: SecretQuestion, view: View) -> SecretReading:
    """In each fold in turn, what a reader makes of it that has learned from the others."""
    labels, folds, asked, count = question.labels, question.folds, question.asked, int(question.folds.max()) + 1
    features = view.averages if reader == "hidden" else view.tokens
    guesses, (bits, base) = torch.zeros_like(labels), torch.zeros(2, *labels.shape, dtype=torch.double)
    for fold in folds[asked].unique().tolist():
        here = folds == fold
        roles = torch.where(here, 0, torch.where(folds == (fold + 1) % count, 1, 2))
        known = Known(features, labels, roles, question.seed + fold, question.classes)
        said = calibrated(known, read(cast(Rung, reader), known))
        guesses[:, here], truth = said.argmax(-1), labels[:, here]
        base[:, here] = -log_frequency(labels[:, ~here], question.classes).gather(1, truth).double() / np.log(2)
        bits[:, here] = base[:, here] + said.gather(2, truth[..., None])[..., 0] / np.log(2)
    best = f"the best {min(BEST, features.shape[1])} of {features.shape[1]} parts of layers"
    place = best if reader == "hidden" else view.seen
    held = float(base[:, asked].mean())
    shown = guesses[:, asked], labels[:, asked], bits[:, asked]
    return _summed(*shown, place, held, reader, question.classes, question.readers)


def _summed(
    guesses: Int[Tensor, "places asked"],
    labels: Int[Tensor, "places asked"],
    bits: Float[Tensor, "places asked"],
    place: str,
    held: float,
    reader: SecretReader,
    classes: int,
    comparisons: int,
) -> SecretReading:
    right = guesses.eq(labels).double()
    digits, whole = (
        estimate(share.numpy(), within=SHARE, comparisons=comparisons) for share in (right.mean(0), right.amin(0))
    )
    count = right.shape[1]
    of_others = guesses[:, :, None].eq(labels[:, None]).double().mean(0).sum() - right.mean(0).sum()
    chance = max(1 / classes, float(of_others) / (count * (count - 1)))
    gained = estimate(bits.mean(0).double().numpy(), comparisons=comparisons)
    return SecretReading(digits, whole, gained, place, held, reader, chance=chance)


def read_by_probes(
    numbers: Mapping[tuple[int, str], Float[Tensor, "samples _"]],
    labels: Int[Tensor, "places samples"],
    folds: Int[Tensor, "samples"],
    asked: Bool[Tensor, "samples"] | None = None,
    classes: int = CLASSES,
    comparisons: int = 1,
) -> SecretReading:
    """What probes read of the samples that are asked about: in each fold, that which did best on its inner fold.

    Args:
        asked: all by default.
        comparisons: readers of which the best is reported.
    """
    asked = torch.ones_like(folds, dtype=torch.bool) if asked is None else asked
    several = len({one.shape for one in numbers.values()}) == 1
    groups = [[*numbers.values()]] if several else [[one] for one in numbers.values()]
    results = joined([calibrated_tasks(torch.stack(group), [labels], folds, classes)[0] for group in groups])
    guesses, bits = torch.zeros_like(labels), torch.zeros(labels.shape)
    picks = results.inner_accuracy.argmax(0)
    for fold, best in enumerate(picks.tolist()):
        here = folds == fold
        guesses[:, here] = results.predicted[best][:, here]
        bits[:, here] = results.information[best][:, here].float()
    tested = [int(picks[fold]) for fold in folds[asked].unique().tolist()]
    layer, part = list(numbers)[max(tested, key=tested.count)]
    held = float(results.base_bits[:, asked].mean())
    place = f"{part} of layer {layer}"
    return _summed(guesses[:, asked], labels[:, asked], bits[:, asked], place, held, RIDGE, classes, comparisons)


def readings_from_others(
    model: Model,
    way: Way,
    case: HiddenSecret,
    caches: Sequence[KVCache],
    secrets: Sequence[str],
    conversations: int,
    readers: Sequence[SecretReader],
    rng: np.random.Generator,
) -> tuple[SecretReading, ...]:
    """What readers make of it that have never seen this conversation: they learn from others, each with a code of its
    own, that forgot it in the same way. Secrets that are no codes are said there themselves, each as often.

    They read the segment after what was forgotten: probes, in one part of one layer, its average, as it is or less that
    of the same text read anew, which anyone has who has the text that stays; networks, averages or its last slots, less
    those. The control reads what was forgotten itself, with everything in view: the easier task.
    """
    said, labels, classes, noun = _said_elsewhere(case, secrets, conversations, rng)
    made = draw(said, rng)
    kept = [number for number, one in enumerate(made) if not _said_beside(one)]
    others = [HiddenSecret(up_to(made[number].transcript(), "summary"), ("T2",), said[number]) for number in kept]
    labels = torch.cat([labels[:, kept], labels[:, len(said) :]], 1)
    folds = torch.cat(
        [
            1 + torch.from_numpy(rng.permutation(np.arange(len(others)) % FOLDS)),
            torch.zeros(len(secrets), dtype=torch.long),
        ]
    )
    left, anew, in_view = ViewOfOthers(model), ViewOfOthers(model), ViewOfOthers(model, itself=True)
    for other in Bar(others, desc="Other conversations forget", unit="conversation"):
        restart = WAYS["restart in place"](model, other.chat, other.hide)
        left.add(forgotten(model, way, other, other.secret), other, restart)
        anew.add(restart, other)
        in_view.add(WAYS[NOTHING](model, other.chat, other.hide), other)
    restart = WAYS["restart in place"](model, case.chat, case.hide)
    for cache, secret in zip(caches, secrets, strict=True):
        left.add(cache, case, restart)
        anew.add(restart, case)
        in_view.add(WAYS[NOTHING](model, case.said(secret), case.hide), case)
    question = SecretQuestion(labels, folds, folds == 0, len(readers), int(rng.integers(2**31)), classes, noun)
    views = [one.view() for one in (left, anew, in_view)]
    return tuple(held_against(reader, question, *views) for reader in readers)


def _said_elsewhere(
    case: HiddenSecret, secrets: Sequence[str], conversations: int, rng: np.random.Generator
) -> tuple[list[str], Int[Tensor, "places samples"], int, Noun]:
    """What other conversations say, the labels of these and then of the secrets, their classes, and of what."""
    if not are_codes(secrets):
        places, which = SecretPlaces.or_which(secrets), rng.permutation(conversations) % len(secrets)
        labels = torch.cat([places.labels[:, torch.from_numpy(which)], places.labels], 1)
        return [secrets[int(number)] for number in which], labels, places.classes, places.noun
    length = len(case.secret)
    drawn = random_codes(min(conversations + len(secrets), 10**length), rng, length)
    codes = [code for code in drawn if code not in secrets][:conversations]
    digits = torch.tensor([[int(digit) for digit in secret] for secret in (*codes, *secrets)]).T
    return codes, digits, CLASSES, "digit"


def _said_beside(made: Conversation) -> bool:
    """Whether a conversation says its secret in messages that stay, too, as one that speaks of its subject may."""
    messages = up_to(made.transcript(), "summary").messages
    return any(made.code in message.text for message in messages if message.segment != "T2")


SHOWN_READERS: dict[SecretReader, str] = {
    "ridge": "a ridge on one part of one layer",
    "slot": "a ridge on one slot of one layer",
    "hidden": "a network with one hidden layer",
    "attention": "attention over slots and layers",
    "transformer": "a transformer over slots and layers",
}
"""How they are written."""
