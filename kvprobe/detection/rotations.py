"""Keys rotated to other positions than they claim, and by how many."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.parts import ROTATED
from kvprobe.cache.rotary import Layout, Rotary, Rotation
from kvprobe.detection.damaged import Damaged, Explanation

BASES = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
"""Bases of rotary embeddings of public models, tried where the model is not at hand."""
FARTHEST = 4096
"""Positions that are tried in either direction, and as many as there are slots."""


def shifted(damaged: Damaged) -> Iterator[Explanation]:
    """Keys of tokens that stood so many positions further on; or at one position, or rotated twice."""
    parts = [part for part in damaged.parts if part in ROTATED]
    if not parts or set(parts) != set(damaged.parts):
        return
    part = parts[0]
    held, right = damaged.vectors(part)
    where = damaged.places[part].nonzero()[:, 1]
    positions = damaged.positions[where]
    known = [damaged.rotary] if damaged.rotary is not None else list(usual(right.shape[1]))
    best: Explanation | None = None
    for rotary in known:
        for shift, words in (
            *((by, "") for by in _shifts(held, right, rotary, max(FARTHEST, 2 * damaged.count))),
            (-positions, "as if all stood at position 0: they were not rotated"),
            (positions, "as if rotated twice"),
        ):
            if isinstance(shift, int) and shift == 0:
                continue
            guess = _moved(right, rotary, positions, positions + shift)
            found = Explanation(
                "position shift",
                damaged.unexplained({part: guess}),
                f"{part} is rotated {words}."
                if words
                else f"{part} is rotated as if its tokens stood {abs(int(shift))} positions "
                f"{'further on' if int(shift) > 0 else 'earlier'}.",
                0.003 if damaged.rotary is not None else 0.006,
                {"shift": shift} if isinstance(shift, int) else {},
            )
            if best is None or found.score < best.score:
                best = found
    if best is not None:
        yield best


def usual(numbers: int) -> Iterator[Rotary]:
    """Rotary embeddings that a key of so many numbers may have."""
    pairs = numbers // 2
    layouts: Sequence[Layout] = ("half", "interleaved")
    for base in BASES:
        frequencies = base ** -(torch.arange(pairs).float() / max(1, pairs))
        yield from (Rotary(frequencies, layout) for layout in layouts)


def _shifts(
    held: Float[Tensor, "damaged d"], right: Float[Tensor, "damaged d"], rotary: Rotary, farthest: int
) -> list[int]:
    """The shift that fits the angles between all pairs best."""
    one, other = _pairs(held, rotary), _pairs(right, rotary)
    turned = (one * other.conj()).sum(0)
    shifts = torch.arange(-farthest, farthest + 1)
    angles = shifts[:, None].double() * rotary.frequencies.double()
    fit = (turned.real * angles.cos() + turned.imag * angles.sin()).sum(1)
    return [int(shifts[fit.argmax()])]


def _pairs(keys: Float[Tensor, "damaged d"], rotary: Rotary) -> Tensor:
    """The pairs of numbers as complex ones."""
    pairs = len(rotary.frequencies)
    keys = keys[:, -2 * pairs :] if rotary.last else keys[:, : 2 * pairs]
    keys = keys.double()
    one, other = (keys[:, :pairs], keys[:, pairs:]) if rotary.layout == "half" else (keys[:, 0::2], keys[:, 1::2])
    return torch.complex(one, other)


def _moved(
    keys: Float[Tensor, "damaged d"], rotary: Rotary, origins: Int[Tensor, "damaged"], positions: Int[Tensor, "damaged"]
) -> Float[Tensor, "damaged d"]:
    return Rotation.between(rotary, origins[None], positions[None]).of(keys[None, None])[0, 0]
