"""Whether readers read the secret: such as know the conversation, and such as have never seen it.

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
from kvprobe.forgetting.trace import SecretTrace, Slots
from kvprobe.forgetting.views import View, ViewOfOthers, view_of
from kvprobe.forgetting.ways import NOTHING, WAYS, Way, forgotten
from kvprobe.inference.model import Model
from kvprobe.probing.calibration import calibrated_tasks, joined
from kvprobe.probing.linear import log_frequency
from kvprobe.probing.readers import BEST, Known, Rung, calibrated, read
from kvprobe.progress import Bar
from kvprobe.stats import SHARE, Estimate, estimate
from kvprobe.tasks.grammar import draw, random_codes

SecretReader = Literal["ridge", "slot", "hidden", "attention", "transformer"]
"""Ridge on one part of one layer, or on one slot; one hidden layer on the best parts; attention over slots and layers;
a transformer over them."""
RIDGE: SecretReader = "ridge"
FOLDS = 4
CLASSES = 10
"""Of a digit."""
FEWEST_READ = 3 * CLASSES
"""Secrets of one conversation below which readers have nothing to learn from."""


@dataclass(frozen=True)
class SecretReading:
    """What a reader makes of secrets.

    Attributes:
        digits: share of the digits that were read right.
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

    @property
    def shares(self) -> dict[str, Estimate | None]:
        """The shares, by name."""
        return {name: getattr(self, name) for name in ("digits", "whole", "restart", "dealt", "control")}

    def record(self) -> dict[str, object]:
        """For JSON."""
        numbers = {name: one and one.record() for name, one in (*self.shares.items(), ("bits", self.bits))}
        return {"reader": self.reader, "place": self.place, "chance": self.chance, **numbers}

    @property
    def above_chance(self) -> bool:
        """Whether more was read than by chance, in digits or in bits: a bit of a digit hardly helps to name it."""
        return self.digits.above(self.chance) or self.bits.above()


def digits_of(secrets: Sequence[str]) -> Int[Tensor, "places secrets"]:
    """The digits of each secret that differ between them, a row for each place; none where some have more."""
    digits = [[int(letter) for letter in secret if letter in "0123456789"] for secret in secrets]
    if len({*map(len, digits)}) > 1:
        return torch.zeros(0, len(secrets), dtype=torch.long)
    numerals = torch.tensor(digits, dtype=torch.long).T
    return numerals[(numerals != numerals[:, :1]).any(1)]


def refuse_unreadable(case: HiddenSecret, secrets: Sequence[str], reader: SecretReader, conversations: int) -> None:
    """Refuse readers that were asked for and cannot learn, in place of leaving them out.

    Raises:
        UserError: too few secrets or no digits for a reader beside the ridge; or no code, or nothing after it, for
            readers from other conversations; or too few of these.
    """
    if reader != RIDGE and (len(secrets) < FEWEST_READ or not len(digits_of(secrets))):
        raise UserError(
            f"The reader {reader!r} learns digits, from {FEWEST_READ} secrets or more that have as many of them each, "
            f"and cannot from the {len(secrets)} here; give more such secrets, or leave reader (--reader) out."
        )
    if conversations and not _like_others(case, secrets):
        raise UserError(
            "Other conversations (--conversations) hold a code of digits alone, and are read in the segment after it; "
            "give a case of this kind, or leave them out."
        )
    others = min(conversations, 10 ** len(case.secret) - len(secrets))
    if conversations and others < FEWEST_READ:
        raise UserError(
            f"Readers learn from {FEWEST_READ} other conversations or more, each with a code of its own, and there "
            f"would be {others}; give longer codes or more conversations (--conversations), or leave them out."
        )


def _like_others(case: HiddenSecret, secrets: Sequence[str]) -> bool:
    """Whether the secrets are codes, and a segment comes after them."""
    order = case.chat.segments
    last = max(order.index(name) for name in case.hide) == len(order) - 1
    return not last and all(secret.isascii() and secret.isdecimal() for secret in secrets)


@dataclass(frozen=True)
class SecretQuestion:
    """What readers are asked: labels of samples, in folds; the samples that are asked about, and how many readers are
    asked."""

    labels: Int[Tensor, "places samples"]
    folds: Int[Tensor, "samples"]
    asked: Bool[Tensor, "samples"]
    readers: int
    seed: int

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

    None where secrets have no digits that differ, or are too few to learn from.
    """
    labels = digits_of(secrets)
    if not len(labels) or not slots.positions or len(secrets) < FEWEST_READ:
        return ()
    folds = torch.from_numpy(rng.permutation(np.arange(len(secrets)) % FOLDS))
    question = SecretQuestion(
        labels, folds, torch.ones_like(folds, dtype=torch.bool), len(readers), int(rng.integers(2**31))
    )
    view, restart = view_of(model, caches, slots, trace), View.alike(len(secrets))
    return tuple(held_against(reader, question, view, restart) for reader in readers)


def held_against(
    reader: SecretReader, question: SecretQuestion, left: View, restart: View, in_view: View | None = None
) -> SecretReading:
    """What a reader makes of what is left, and the same reader of a restart, by chance, and with everything in view."""
    return replace(
        _reading(reader, question, left),
        restart=_reading(reader, question, restart).digits,
        dealt=_reading(reader, question.dealt(), left).digits,
        control=None if in_view is None else _reading(reader, question, in_view).digits,
    )


def _reading(reader: SecretReader, question: SecretQuestion, view: View) -> SecretReading:
    if reader == RIDGE:
        return read_by_probes(view.sites, question.labels, question.folds, question.asked, comparisons=question.readers)
    return _read_on_the_ladder(reader, question, view)


def _read_on_the_ladder(reader: SecretReader, question: SecretQuestion, view: View) -> SecretReading:
    """In each fold in turn, what a reader makes of it that has learned from the others."""
    labels, folds, asked, count = question.labels, question.folds, question.asked, int(question.folds.max()) + 1
    features = view.averages if reader == "hidden" else view.tokens
    guesses, (bits, base) = torch.zeros_like(labels), torch.zeros(2, *labels.shape, dtype=torch.double)
    for fold in folds[asked].unique().tolist():
        here = folds == fold
        roles = torch.where(here, 0, torch.where(folds == (fold + 1) % count, 1, 2))
        known = Known(features, labels, roles, question.seed + fold)
        said = calibrated(known, read(cast(Rung, reader), known))
        guesses[:, here], truth = said.argmax(-1), labels[:, here]
        base[:, here] = -log_frequency(labels[:, ~here], CLASSES).gather(1, truth).double() / np.log(2)
        bits[:, here] = base[:, here] + said.gather(2, truth[..., None])[..., 0] / np.log(2)
    best = f"the best {min(BEST, features.shape[1])} of {features.shape[1]} parts of layers"
    place = best if reader == "hidden" else view.seen
    held = float(base[:, asked].mean())
    return _summed(
        guesses[:, asked], labels[:, asked], bits[:, asked], place, held, reader, comparisons=question.readers
    )


def _summed(
    guesses: Int[Tensor, "places asked"],
    labels: Int[Tensor, "places asked"],
    bits: Float[Tensor, "places asked"],
    place: str,
    held: float,
    reader: SecretReader,
    classes: int = CLASSES,
    comparisons: int = 1,
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
    own, that forgot it in the same way.

    They read the segment after what was forgotten: probes, in one part of one layer, its average, as it is or less that
    of the same text read anew, which anyone has who has the text that stays; networks, averages or its last slots, less
    those. The control reads what was forgotten itself, with everything in view: the easier task.
    """
    length = len(case.secret)
    drawn = random_codes(min(conversations + len(secrets), 10**length), rng, length)
    codes = [code for code in drawn if code not in secrets][:conversations]
    others = [HiddenSecret(up_to(made.transcript(), "summary"), ("T2",), made.code) for made in draw(codes, rng)]
    labels = torch.tensor([[int(digit) for digit in secret] for secret in (*codes, *secrets)]).T
    folds = torch.cat(
        [
            1 + torch.from_numpy(rng.permutation(np.arange(len(codes)) % FOLDS)),
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
    question = SecretQuestion(labels, folds, folds == 0, len(readers), int(rng.integers(2**31)))
    views = [one.view() for one in (left, anew, in_view)]
    return tuple(held_against(reader, question, *views) for reader in readers)
