"""What may have happened to damaged slots: each hypothesis makes their content from the reference's.

The hypothesis that leaves least unexplained wins, and how much the second best leaves is the control: a copy of other
slots, a rotation or a factor that explains nearly all of a difference is no accident where everything else fails.
"""

from collections.abc import Callable, Iterator

import torch
from einops import rearrange
from torch import Tensor

from kvprobe.cache.parts import KV, ROTATED, WRITES
from kvprobe.detection.bits import flips, rounded
from kvprobe.detection.copies import copied, misread
from kvprobe.detection.damaged import FOREIGN, Damaged, Explanation, Kind, slots_in_words
from kvprobe.detection.rotations import shifted

UNKNOWN = 0.5
"""Score of what is not explained: a hypothesis must leave less."""
NOTHING = Explanation("unknown", 1.0, "No hypothesis explains it.", UNKNOWN - 1.0)
GUESSED = ("stale", "foreign prefix", "other weights", "unknown")
"""Kinds that are left where no hypothesis makes the content from the reference's."""
_SMALL = 0.2
"""Relative distance of a difference that numerics could make."""
_LEAST_SLOTS = 8
_SHARED = 4
"""First slots that texts of one chat template have in common."""
_PLAUSIBLE = 3.0
_ALIKE = 0.05
"""Variance of rows, as a share of the reference's, below which they are too much alike for a text's."""
_MATCHED = 0.9
"""Share of channels that must be another channel each, where all are in another order."""


def explanations(damaged: Damaged) -> list[Explanation]:
    """The hypotheses that apply, the best first."""
    broken = list(_not_finite(damaged))
    if broken:
        return broken
    found = [explanation for hypothesis in HYPOTHESES for explanation in hypothesis(damaged)]
    return sorted(found, key=lambda one: one.score)


def _not_finite(damaged: Damaged) -> Iterator[Explanation]:
    for side, where in enumerate(("", " in the reference")):
        bad = {part: int((~damaged.vectors(part)[side].isfinite()).sum()) for part in damaged.parts}
        if not any(bad.values()):
            continue
        if not side and sum(bad.values()) <= 4:
            yield from flips(damaged)
        count = ", ".join(f"{number} of {part}" for part, number in bad.items() if number)
        yield Explanation("not finite", 0.0, f"NaN or infinity{where}: {count}.", cost=0.02)


def _zeroed(damaged: Damaged) -> Iterator[Explanation]:
    zeros = {part: torch.zeros_like(damaged.vectors(part)[0]) for part in damaged.parts}
    if all(not bool(damaged.vectors(part)[0].any()) for part in damaged.parts):
        lost = set(damaged.parts) <= set(WRITES)
        kind: Kind = "state lost" if lost else "zeroed"
        what = "these tokens wrote nothing to the state" if lost else "all of their numbers are zero"
        yield Explanation(kind, damaged.unexplained(zeros), f"{_parts(damaged)}: {what}.")


def _scaled(damaged: Damaged) -> Iterator[Explanation]:
    """One factor for a part, for each head, for each vector, or for each channel."""
    pooled = {part: _ratio(*damaged.vectors(part)) for part in damaged.parts}
    guess = {part: damaged.vectors(part)[1] * factor for part, factor in pooled.items()}
    values = {part: float(factor) for part, factor in pooled.items()}
    if all(abs(factor) > 1e-6 for factor in values.values()):
        words = " and ".join(f"{part} is {factor:.4g} times what it should be" for part, factor in values.items())
        doubled = set(damaged.parts) <= set(WRITES) and all(abs(one - 2) < 0.1 for one in values.values())
        yield Explanation(
            "state doubled" if doubled else "scale error",
            damaged.unexplained(guess),
            words + ".",
            0.002,
            {"factor": next(iter(values.values()))},
        )
    for name, cost, by in (("head", 0.004, _by_head), ("slot", 0.01, _by_vector), ("channel", 0.01, _by_channel)):
        factors = {part: by(damaged, part) for part in damaged.parts}
        if any(factor is None for factor in factors.values()):
            continue
        guess = {part: damaged.vectors(part)[1] * factor for part, factor in factors.items() if factor is not None}
        every = torch.cat([factor.flatten() for factor in factors.values() if factor is not None])
        low, high = every.quantile(0.05), every.quantile(0.95)
        yield Explanation(
            "scale error",
            damaged.unexplained(guess),
            f"Each {name} of {_parts(damaged)} is a multiple of what it should be, with factors of its own, {low:.3g} "
            f"to {high:.3g}: scales of others were used.",
            cost,
            {"factor": float(every.median())},
        )


def _ratio(held: Tensor, right: Tensor, axis: int | None = None) -> Tensor:
    """The factor by which the second is nearest to the first."""
    held, right = held.double(), right.double()  # a flipped bit may make numbers of 1e38
    if axis is None:
        return ((held * right).sum() / right.square().sum().clamp(min=1e-30)).float()
    return ((held * right).sum(axis, keepdim=True) / right.square().sum(axis, keepdim=True).clamp(min=1e-30)).float()


def _by_head(damaged: Damaged, part: str) -> Tensor | None:
    heads = damaged.places[part].nonzero()[:, 0]
    if len(heads.unique()) < 2:
        return None
    held, right = damaged.vectors(part)
    factors = torch.ones(len(heads), 1)
    for head in heads.unique().tolist():
        factors[heads == head] = _ratio(held[heads == head], right[heads == head])
    return factors


def _by_vector(damaged: Damaged, part: str) -> Tensor | None:
    held, right = damaged.vectors(part)
    return None if held.shape[1] < _LEAST_SLOTS else _ratio(held, right, 1)


def _by_channel(damaged: Damaged, part: str) -> Tensor | None:
    heads = damaged.places[part].nonzero()[:, 0]
    held, right = damaged.vectors(part)
    factors = torch.ones_like(held)
    for head in heads.unique().tolist():
        some = heads == head
        if int(some.sum()) < _LEAST_SLOTS:
            return None
        factors[some] = _ratio(held[some], right[some], 0)
    return factors


def _swapped(damaged: Damaged) -> Iterator[Explanation]:
    """K where V belongs, V where K belongs, or both."""
    if not set(KV) <= set(damaged.right) or damaged.right["K"].shape != damaged.right["V"].shape:
        return
    slots = damaged.slots
    right = {part: damaged.rows(part, slots)[1] for part in KV}
    keys, values = right["K"], right["V"]
    for guess, words in (
        ({"K": values, "V": keys}, "K holds V, and V holds K"),
        ({"K": values, "V": values}, "K holds V, as where their pages share memory"),
        ({"K": keys, "V": keys}, "V holds K, as where their pages share memory"),
    ):
        whole = {part: torch.where(_struck_heads(damaged, slots), guess[part], right[part]) for part in KV}
        yield Explanation("K and V swapped", damaged.unexplained_blocks(whole, slots), words + ".", 0.001)


def _struck_heads(damaged: Damaged, slots: Tensor) -> Tensor:
    return torch.stack([damaged.places[part] for part in KV]).any(0)[:, slots, None]


def _reordered(damaged: Damaged) -> Iterator[Explanation]:
    """Channels in another order: that of another rotary layout, or any; and heads in another order."""
    rotated = [part for part in damaged.parts if part in ROTATED]
    if rotated and set(rotated) == set(damaged.parts):
        for pattern, words in (
            ("n (half pair) -> n (pair half)", "half a key apart where they are read side by side"),
            ("n (pair half) -> n (half pair)", "side by side where they are read half a key apart"),
        ):
            guess = {part: rearrange(damaged.vectors(part)[1], pattern, half=2) for part in rotated}
            yield Explanation(
                "channel order", damaged.unexplained(guess), f"Rotary pairs of {_parts(damaged)} lie {words}.", 0.001
            )
    guess = {part: _matched(*damaged.vectors(part)) for part in damaged.parts}
    if all(one is not None for one in guess.values()):
        yield Explanation(
            "channel order",
            damaged.unexplained({part: one for part, one in guess.items() if one is not None}),
            f"The numbers of {_parts(damaged)} are those of the reference in another order.",
            0.02,
        )
    heads = {part: damaged.right[part].shape[0] for part in damaged.parts}
    if min(heads.values()) > 1:
        slots = damaged.slots
        whole = {part: _matched_heads(damaged, part, slots) for part in damaged.parts}
        yield Explanation(
            "channel order",
            damaged.unexplained_blocks(whole, slots),
            f"Heads of {_parts(damaged)} changed places.",
            0.01,
        )


def _matched(held: Tensor, right: Tensor) -> Tensor | None:
    """The reference's vectors with their channels in the order that is nearest; None if there are too few vectors."""
    if len(held) < _LEAST_SLOTS:
        return None
    order = torch.cdist(held.T, right.T).argmin(1)
    return right[:, order] if len(order.unique()) > _MATCHED * len(order) else None


def _matched_heads(damaged: Damaged, part: str, slots: Tensor) -> Tensor:
    held, right = damaged.rows(part, slots)
    nearest = torch.cdist(held.flatten(1), right.flatten(1)).argmin(1)
    return right[nearest]


def _foreign(damaged: Damaged) -> Iterator[Explanation]:
    """Rows that could be this model's, and are none of the reference's."""
    off = min(float((held - right).norm() / right.norm().clamp(min=1e-30)) for held, right in _pairs(damaged))
    if off < _SMALL or not all(_plausible(damaged, part) for part in damaged.parts):
        return
    block, slots = damaged.block, damaged.slots
    begin, end = (
        [int(some[place]) for some in (slots[slots // block == number] for number in (slots // block).unique())]
        for place in (0, -1)
    )
    ends = all(last % block == block - 1 or last == damaged.count - 1 for last in end)
    within = begin[0] % block and (begin[0] >= block or begin[0] > _SHARED)
    if ends and (within if len(begin) == 1 else any(first % block for first in begin[1:])):
        yield Explanation(
            "stale",
            1.0,
            f"Slots {slots_in_words(slots)}, from the middle of a block to its end, hold rows that this model could "
            "have written, of no slot of the reference: what the block held before.",
            FOREIGN - 1.0,
        )
    else:
        yield Explanation(
            "foreign prefix",
            1.0,
            f"Slots {slots_in_words(slots)} hold rows that this model could have written, of no slot of the reference: "
            "another text's, or noise of the reference's mean and spread.",
            FOREIGN - 1.0,
        )


def _pairs(damaged: Damaged) -> Iterator[tuple[Tensor, Tensor]]:
    return (damaged.vectors(part) for part in damaged.parts)


def _plausible(damaged: Damaged, part: str) -> bool:
    """Whether damaged vectors deviate from the mean of sound ones, channel by channel, about as far as these do, and
    are not all about the same."""
    for head in damaged.heads(part).tolist():
        every = damaged.right[part][head].float()
        centre, spread = every.mean(0), every.var(0, correction=0).clamp(min=1e-12)
        rows = damaged.held[part][head][damaged.places[part][head]].float()
        usual, found = (((some - centre).square() / spread).mean(1) for some in (every, rows))
        if len(rows) >= _LEAST_SLOTS and float((rows.var(0, correction=0) / spread).mean()) < _ALIKE:
            return False
        if not usual.quantile(0.02) / _PLAUSIBLE < found.median() < usual.quantile(0.98) * _PLAUSIBLE:
            return False
    return True


def _unexplained(_: Damaged) -> Iterator[Explanation]:
    yield NOTHING


def _parts(damaged: Damaged) -> str:
    return " and ".join(damaged.parts)


HYPOTHESES: tuple[Callable[[Damaged], Iterator[Explanation]], ...] = (
    _zeroed,
    _scaled,
    _swapped,
    misread,
    copied,
    shifted,
    _reordered,
    flips,
    rounded,
    _foreign,
    _unexplained,
)
"""All of them."""
