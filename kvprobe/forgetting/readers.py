"""Whether probes read the secret: such as know the conversation, and such as have never seen it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import recurrent
from kvprobe.forgetting.hidden_secret import HiddenSecret, up_to
from kvprobe.forgetting.trace import STATE, Slots, seen
from kvprobe.forgetting.ways import NOTHING, WAYS, Way, forgotten
from kvprobe.inference.model import Model
from kvprobe.inference.states import state_of
from kvprobe.probing.calibration import calibrated_tasks, joined
from kvprobe.progress import Bar
from kvprobe.stats import SHARE, Estimate, estimate
from kvprobe.tasks.grammar import draw, random_codes

FOLDS = 4
CLASSES = 10
"""Of a digit."""
FEWEST_READ = 3 * CLASSES
"""Secrets of one conversation below which probes have nothing to learn from."""


@dataclass(frozen=True)
class SecretReading:
    """What probes read of secrets.

    Attributes:
        digits: share of the digits that were read right.
        whole: share of the secrets of which every digit was.
        bits: read of each digit, of 3.32; below zero where the probe misleads.
        site: layer and part that most folds chose.
        held: bits of each place for one who knows how often each word stands there, as the probe does: the most that
            can be read.
        control: what the same probes read of the segments themselves with everything in view; None where they were not
            asked.
        classes: that each place can be of; of other words than digits, these are what `digits` counts.
    """

    digits: Estimate
    whole: Estimate
    bits: Estimate
    site: tuple[int, str]
    held: float
    control: Estimate | None = None
    classes: int = CLASSES

    @property
    def chance(self) -> float:
        return 1 / self.classes


def digits_of(secrets: Sequence[str]) -> Int[Tensor, "places secrets"]:
    """The digits of each secret that differ between them, a row for each place."""
    digits = [[int(letter) for letter in secret if letter in "0123456789"] for secret in secrets]
    numerals = torch.tensor(digits, dtype=torch.long).T
    return numerals[(numerals != numerals[:, :1]).any(1)]


def known_reading(
    model: Model, caches: Sequence[KVCache], slots: Slots, secrets: Sequence[str], rng: np.random.Generator
) -> SecretReading | None:
    """What probes read that have learned from other secrets of this very conversation: every slot that stays, of one
    part of one layer, which is chosen on secrets that are neither learned from nor tested on.

    None where secrets have no digits that differ, or are too few to learn from.
    """
    labels = digits_of(secrets)
    if not len(labels) or not slots.positions or len(secrets) < FEWEST_READ:
        return None
    folds = torch.from_numpy(rng.permutation(np.arange(len(secrets)) % FOLDS))
    numbers: dict[tuple[int, str], Tensor] = {}
    for layer in range(caches[0].n_layers):
        held = [seen(model, cache, slots, number, layer) for number, cache in enumerate(caches)]
        numbers |= {(layer, name): rotated(torch.stack([one[name].flatten() for one in held])) for name in held[0]}
    return read_by_probes(numbers, labels, folds)


def rotated(numbers: Float[Tensor, "samples numbers"]) -> Float[Tensor, "samples dim"]:
    """The same inner products between samples, of standardised numbers, in as many numbers as there are samples.

    Ridge regression asks for inner products alone. A random rotation spreads them over all numbers, since probes scale
    each number to the same variance.
    """
    size = numbers.norm(dtype=torch.double) / max(numbers.numel(), 1) ** 0.5
    varying = numbers[:, (numbers != numbers[:1]).any(0)].double()
    off = varying - varying.mean(0)
    scaled = off[:, off.square().mean(0).sqrt() > 1e-9 * size]
    scaled = scaled / scaled.square().mean(0).sqrt()
    if not scaled.shape[1]:
        return torch.zeros(len(numbers), len(numbers))
    values, axes = torch.linalg.eigh(scaled @ scaled.T)
    turn = torch.linalg.qr(
        torch.randn(len(axes), len(axes), generator=torch.Generator().manual_seed(0), dtype=torch.double)
    )[0]
    return (axes * values.clamp(min=0).sqrt() @ turn).float()


def read_by_probes(
    numbers: Mapping[tuple[int, str], Float[Tensor, "samples _"]],
    labels: Int[Tensor, "places samples"],
    folds: Int[Tensor, "samples"],
    asked: Bool[Tensor, "samples"] | None = None,
    classes: int = CLASSES,
) -> SecretReading:
    """What probes read of the samples that are asked about: in each fold, that which did best on its inner fold.

    Args:
        asked: all by default.
    """
    asked = torch.ones_like(folds, dtype=torch.bool) if asked is None else asked
    several = len({one.shape for one in numbers.values()}) == 1
    groups = [[*numbers.values()]] if several else [[one] for one in numbers.values()]
    results = joined([calibrated_tasks(torch.stack(group), [labels], folds, classes)[0] for group in groups])
    right, bits = torch.zeros(2, *labels.shape)
    picks = results.inner_accuracy.argmax(0)
    for fold, best in enumerate(picks.tolist()):
        here = folds == fold
        right[:, here] = results.predicted[best][:, here].eq(labels[:, here]).float()
        bits[:, here] = results.information[best][:, here].float()
    tested = [int(picks[fold]) for fold in folds[asked].unique().tolist()]
    shares = (right[:, asked].mean(0), right[:, asked].amin(0))
    digits, whole = (estimate(share.double().numpy(), within=SHARE) for share in shares)
    site = list(numbers)[max(tested, key=tested.count)]
    held = float(results.base_bits[:, asked].mean())
    return SecretReading(digits, whole, estimate(bits[:, asked].mean(0).double().numpy()), site, held, classes=classes)


def reading_from_others(
    model: Model,
    way: Way,
    case: HiddenSecret,
    caches: Sequence[KVCache],
    secrets: Sequence[str],
    conversations: int,
    rng: np.random.Generator,
) -> SecretReading | None:
    """What probes read that have never seen this conversation: they learn from others, each with a code of its own,
    that forgot it in the same way.

    They read, in one part of one layer, the average over the segment after what was forgotten, as it is or less that of
    the same text read anew, which anyone has who has the text that stays. The control reads what was forgotten itself,
    with everything in view: the easier task.

    None where secrets are not digits alone, or no segment comes after.
    """
    length, order = len(case.secret), case.chat.segments
    last = max(order.index(name) for name in case.hide) == len(order) - 1
    if last or not all(secret.isascii() and secret.isdecimal() for secret in secrets):
        return None
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
    left, told = _Pooled(model), _Pooled(model)
    for other in Bar(others, desc="Other conversations forget", unit="conversation"):
        left.add(
            forgotten(model, way, other, other.secret), WAYS["restart in place"](model, other.chat, other.hide), other
        )
        told.add(WAYS[NOTHING](model, other.chat, other.hide), None, other)
    restart = WAYS["restart in place"](model, case.chat, case.hide)
    for cache, secret in zip(caches, secrets, strict=True):
        left.add(cache, restart, case)
        told.add(WAYS[NOTHING](model, case.said(secret), case.hide), None, case)
    read, control = (read_by_probes(pooled.stacked, labels, folds, folds == 0) for pooled in (left, told))
    return replace(read, control=control.digits)


class _Pooled:
    """Averages over slots, of each layer and part, of one conversation after another."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._numbers: dict[tuple[int, str], list[Tensor]] = {}

    def add(self, cache: KVCache, restart: KVCache | None, case: HiddenSecret) -> None:
        """Of the segment after those that were forgotten; of these themselves where there is no restart."""
        for layer in range(cache.n_layers):
            for name, mean in _means(self._model, cache, case, layer, itself=restart is None).items():
                self._numbers.setdefault((layer, name), []).append(mean)
                if restart is not None:
                    less = mean - _means(self._model, restart, case, layer, itself=False)[name]
                    self._numbers.setdefault((layer, f"{name} less restart"), []).append(less)

    @property
    def stacked(self) -> dict[tuple[int, str], Float[Tensor, "samples numbers"]]:
        """Of all conversations, by layer and part."""
        return {site: torch.stack(means) for site, means in self._numbers.items()}


def _means(
    model: Model, cache: KVCache, case: HiddenSecret, layer: int, itself: bool
) -> dict[str, Float[Tensor, "numbers"]]:
    parts, ledger = cache.layers[layer], cache.ledger
    if recurrent(parts):
        return {STATE: state_of(model, cache, layer)[0].flatten()}
    order = case.chat.segments
    first = max(order.index(name) for name in case.hide)
    wanted = case.hide if itself else order[first + 1 : first + 2]
    chosen = ledger.in_segments([name for name in wanted if name in ledger.names])[0] & ledger.live_somewhere[0]
    return {name: tensor[0][:, chosen].float().mean(1).flatten().cpu() for name, tensor in parts.items()}
