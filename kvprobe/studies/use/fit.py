"""Erasers of the code for each place, fitted on one half of the conversations, and random ones beside them.

A code slot has an eraser of its own, of the digits up to its own, since it cannot know the later ones; all slots of
another place share one, of all five digits, for which every slot is a sample. What covaries with the digits is the same
for slots as for their mean, so that the mean over a place is guarded with its slots; only the metric of least change
differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.erasing import Eraser, inlp, leace_of, random_eraser
from kvprobe.probing.gram import Moments, one_hot_answers
from kvprobe.studies.use.read import PARTS, PLACES
from kvprobe.tasks.passcode import CODE_LENGTH

SHRINKAGE = 0.1
"""Without it, random subspaces would be drawn along directions that hardly vary in the conversations of the fit, and
move features of others by many times their variance."""
DIGITS = 10
LEACE, INLP, RANDOM = "leace", "inlp", "random"
RANDOM_0 = f"{RANDOM} 0"
"""The first of the random subspaces."""

Reads = Sequence[Mapping[str, Tensor]]
"""What `read_turn` gave for each conversation of a half."""


def roles(place: str) -> tuple[int | None, ...]:
    """Which slots of a place have an eraser of their own: those of each digit, or (None) all together."""
    return tuple(range(CODE_LENGTH)) if place == "code" else (None,)


Erasers = Mapping[tuple[str, int | None, str, str], Eraser]
"""Those of K or of V, all layers, by place, role, part and name: `leace`, `inlp`, `random 0`, `random 1` …"""


def fit(half: Reads, randoms: int, rng: np.random.Generator) -> Erasers:
    """Fit all erasers of a half."""
    erasers = {}
    for place in PLACES:
        for role in roles(place):
            for part in PARTS:
                closed, iterated = _fit_site(half, place, role, part)
                drawn = {name: random_eraser(closed, rng) for name in random_names(randoms)}
                by_name = {LEACE: closed, INLP: iterated} | drawn
                erasers |= {(place, role, part, name): eraser for name, eraser in by_name.items()}
    return erasers


def random_names(randoms: int) -> list[str]:
    return [f"{RANDOM} {draw}" for draw in range(randoms)]


def labels(half: Reads, role: int | None) -> Int[Tensor, "targets samples"]:
    """The digits that a slot can know, of all conversations: those up to its own."""
    digits = torch.cat([read["digits"] for read in half], 1)
    return digits if role is None else digits[: role + 1]


def features(half: Reads, place: str, role: int | None, part: str) -> Float[Tensor, "layers samples width"]:
    """What the slot of one digit holds, or a place on average over its slots; of all conversations, centred in each."""
    every = torch.cat([read[f"{place}.{part}"] for read in half], 1)
    return every if role is None else every[:, :, role]


def conversations(half: Reads) -> Int[Tensor, "samples"]:
    """The conversation of each sample, by its number in the half."""
    return torch.arange(len(half)).repeat_interleave(torch.tensor([read["digits"].shape[1] for read in half]))


def _fit_site(half: Reads, place: str, role: int | None, part: str) -> tuple[Eraser, Eraser]:
    vectors, answers = features(half, place, role, part), labels(half, role)
    moments = Moments.of(vectors.double(), one_hot_answers(answers, DIGITS, torch.float64))
    if role is None:
        gram = torch.stack([read[f"{place}.gram.{part}"].double() for read in half]).sum(0)
        moments = replace(moments, gram=gram)
    # The last third of the conversations says when enough was erased.
    held_out = conversations(half) >= len(half) - max(1, len(half) // 3)
    return leace_of(moments, SHRINKAGE), inlp(vectors, answers, DIGITS, held_out)
