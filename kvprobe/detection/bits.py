"""Differences of single numbers: a flipped bit, and numbers that were rounded."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.ledger import QuantisationFormat
from kvprobe.cache.precision import FP8, mantissas
from kvprobe.detection.damaged import Damaged, Explanation
from kvprobe.errors import UserError
from kvprobe.faults.bit_flips import LAYOUTS, flipped
from kvprobe.policies.codes import codes_of_keys, codes_of_values

MOST_FLIPS = 32
"""Numbers of a layer that may have flipped."""
GROUP = 32
"""Numbers that share a scale in llama.cpp's q8_0, of activations and of caches."""
_PER_VECTOR = 3
_LEVELS = 16
"""Numbers of 4 bits at one scale."""
_MOST_VECTORS, _FEWEST = 512, 8
"""Vectors in which steps are looked for; and of numbers that share one, in how many groups of how many each."""
_GROUPS, _BITS = (32, 16, 64, 128), range(8, 1, -1)


def flips(damaged: Damaged) -> Iterator[Explanation]:
    """A few numbers of which one bit is another."""
    changed: list[tuple[Tensor, Tensor]] = []
    for part in damaged.parts:
        held, right = damaged.vectors(part)
        heads = damaged.places[part].nonzero()[:, 0]
        off = (held - right).abs().nan_to_num(torch.inf, torch.inf)
        usual = damaged.noise[part][heads] * right.norm(dim=-1) / right.shape[1] ** 0.5
        beyond = off > torch.maximum(12 * usual[:, None], 0.05 * off.amax(1, keepdim=True))
        if int(beyond.sum(1).max()) > _PER_VECTOR:
            return
        changed.append((held[beyond], right[beyond]))
    now, was = (torch.cat([entry[place] for entry in changed]) for place in (0, 1))
    if not 0 < len(now) <= MOST_FLIPS:
        return
    best: tuple[float, str, Tensor] | None = None
    for name, layout in LAYOUTS.items():
        stored = now.to(layout.dtype)
        if not bool((stored.float().nan_to_num() == now.nan_to_num()).all()):
            continue
        bits = torch.arange(layout.bits).expand(len(now), -1)
        every = flipped(stored[:, None].expand_as(bits).contiguous(), bits).float()
        left = (every - was[:, None]).abs().nan_to_num(torch.inf, torch.inf)
        nearest, which = left.min(1)
        whole = (now - was).abs().double().nan_to_num(3e38, 3e38).clamp(min=1e-30)
        share = float((nearest.double() / whole).square().mean())
        # A number of bfloat16 is one of the others, too: the coarsest that explains it is taken.
        if best is None or share < 0.5 * best[0] - 1e-6 or (share < 2 * best[0] + 1e-6 and best[1] == "fp32"):
            best = share, name, which
    if best is None:
        return
    share, name, which = best
    layout = LAYOUTS[name]
    bit = int(which[0])
    field = layout.field_of(bit)
    yield Explanation(
        "bit flip",
        share,
        f"{len(now)} number{'s' if len(now) > 1 else ''} changed; one bit of {name} explains it: bit {bit} ({field}), "
        f"{float(was[0]):.4g} became {float(now[0]):.4g}.",
        0.001 if len(now) <= 2 else 0.01,
        {"bit": bit, "stored": name, "field": field},
    )


def rounded(damaged: Damaged) -> Iterator[Explanation]:
    """Numbers that were rounded to another precision."""
    for name, bits in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        guess = {part: damaged.vectors(part)[1].to(bits).float() for part in damaged.parts}
        yield Explanation(
            "numerics", damaged.unexplained(guess), f"Numbers are rounded to {name}.", 0.004, {"stored": name}
        )
    if all(_last_places(*damaged.vectors(part)) for part in damaged.parts):
        yield Explanation("numerics", 0.0, "No number is off by more than the last place of bfloat16.", 0.1)
    for words, scheme in _schemes():
        try:
            guess = {part: scheme(damaged, part) for part in damaged.parts}
        except (UserError, RuntimeError):
            continue
        yield Explanation("quantisation", damaged.unexplained(guess), f"Numbers are rounded to {words}.", 0.006)
    yield from _on_a_grid(damaged)


def _last_places(held: Float[Tensor, "damaged d"], right: Float[Tensor, "damaged d"]) -> bool:
    """Whether all but a few numbers are off by at most the last place of bfloat16."""
    return float(((held - right).abs() <= 2**-7 * 1.5 * right.abs()).float().mean()) > 0.99


def _schemes() -> Iterator[tuple[str, Callable[[Damaged, str], Tensor]]]:
    for most in (127, 7):
        yield f"{'8' if most == 127 else '4'} bits, a scale for each vector", _by_vector(most)
    yield "8 bits in groups of 32 (q8_0)", lambda damaged, part: in_q8(damaged.vectors(part)[1])
    for bits in _BITS:
        for group in _GROUPS:
            yield f"{bits} bits in groups of {group} channels", _by_group(bits, group)
        yield f"{bits} bits, keys by channel", _by_slots(bits)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        yield f"fp8 ({name})", _in_fp8(dtype, by_head=False)
        yield f"fp8 ({name}), a scale for each head", _in_fp8(dtype, by_head=True)


def _by_vector(most: int) -> Callable[[Damaged, str], Tensor]:
    def scheme(damaged: Damaged, part: str) -> Tensor:
        right = damaged.vectors(part)[1]
        scale = (right.abs().amax(-1, keepdim=True) / most).clamp(min=1e-30)
        return (right / scale).round() * scale

    return scheme


def _by_group(bits: int, group: int) -> Callable[[Damaged, str], Tensor]:
    def scheme(damaged: Damaged, part: str) -> Tensor:
        right = damaged.vectors(part)[1]
        if right.shape[1] < group and group != _GROUPS[0]:
            raise UserError("groups are wider than vectors")
        return codes_of_values(right[None, :, None], QuantisationFormat(bits, group)).numbers()[0, :, 0]

    return scheme


def _by_slots(bits: int) -> Callable[[Damaged, str], Tensor]:
    """KIVI: keys in groups of 32 slots that share a scale for each channel, values in groups of 32 channels."""

    def scheme(damaged: Damaged, part: str) -> Tensor:
        if part != "K":
            return _by_group(bits, 32)(damaged, part)
        group, where = 32, damaged.places[part]
        whole = (damaged.slots // group).unique()
        whole = whole[(whole + 1) * group <= damaged.count]
        slots = (whole[:, None] * group + torch.arange(group)).flatten()
        right = damaged.rows(part, slots)[1]
        codes = codes_of_keys(right.unflatten(1, (-1, group)), QuantisationFormat(bits, group))
        guess = torch.zeros(*where.shape, right.shape[2])
        guess[:, slots] = codes.numbers().view_as(right)
        return guess[where]

    return scheme


def _in_fp8(dtype: torch.dtype, by_head: bool) -> Callable[[Damaged, str], Tensor]:
    def scheme(damaged: Damaged, part: str) -> Tensor:
        limit, right = torch.finfo(dtype).max, damaged.vectors(part)[1]
        low, high = damaged.right[part].flatten(1).aminmax(dim=1)
        largest = torch.maximum(-low, high).float()
        if not by_head:
            largest = largest.max().expand_as(largest)
        scale = (largest / limit).clamp(min=1e-30)[damaged.places[part].nonzero()[:, 0], None]
        return (right / scale).clamp(-limit, limit).to(dtype).float() * scale

    return scheme


def _on_a_grid(damaged: Damaged) -> Iterator[Explanation]:
    """Numbers near the right ones that take few values, whatever the scales."""
    near, grids = 0.0, list[str]()
    for part in damaged.parts:
        held, right = damaged.vectors(part)
        near = max(near, float((held - right).norm() / right.norm().clamp(min=1e-30)))
        where = damaged.places[part].nonzero()
        grid = _grid_of(held) or _steps_of(held, where)
        if grid is None or _grid_of(right) is not None or _steps_of(right, where) is not None:
            return
        grids.append(grid)
    if near < 0.35 and grids:
        words = " and ".join(dict.fromkeys(grids))
        yield Explanation("quantisation", 0.05, f"Numbers are off by {near:.2g} of their size, and {words}.", 0.02)


def _grid_of(numbers: Float[Tensor, "damaged d"]) -> str | None:
    """How few different numbers there are, in words; None where they are many."""
    if 0 < (most := int(mantissas(numbers[:256]).max())) <= FP8:
        return f"those of a vector have at most {most} mantissas, as those of fp8 have at any scale"
    if numbers.shape[1] % 32:
        return None
    groups = numbers.unflatten(1, (-1, 32)).flatten(0, 1)[:256]
    most = max(len(group.unique()) for group in groups)
    return f"those of a group of 32 take at most {most} values" if most <= _LEVELS else None


def _steps_of(numbers: Float[Tensor, "damaged d"], where: Int[Tensor, "damaged 2"]) -> str | None:
    """Of what numbers are whole multiples in 8 bits, in words; None where there is no such step.

    Args:
        where: head and slot of each vector.
    """
    some = slice(None, None, -(-len(numbers) // _MOST_VECTORS))
    numbers, (heads, slots) = numbers[some], where[some].T[:, :, None]
    width = torch.arange(numbers.shape[1])
    for words, index in (
        ("for all", torch.zeros_like(heads)),
        ("for each head", heads),
        ("for each slot", slots),
        ("for each vector", torch.arange(len(heads))[:, None]),
        ("for each channel", heads * len(width) + width),
    ):
        ids = index.unique()
        groups = [numbers[(index == one).expand_as(numbers)] for one in ids[:: -(-len(ids) // _FEWEST)]]
        if min(map(len, groups)) >= _FEWEST and all(map(_in_steps, groups)):
            return f"they are whole multiples of a step {words}, in 8 bits"
    return None


def _in_steps(group: Float[Tensor, "numbers"]) -> bool:
    """Whether all numbers are multiples of the largest one's n-th part, for some n up to 127."""
    times = group / (group.abs().max().clamp(min=1e-30) / torch.arange(1, 128)[:, None])
    rounding = 2**-9 * times.abs() if bool((group.bfloat16() == group).all()) else 0.0
    return bool(((times - times.round()).abs() <= 1e-3 + rounding).all(1).any())


def in_q8(tensor: Tensor) -> Tensor:
    """Rounded to 8 bits, in groups of 32 numbers that share a scale."""
    if tensor.shape[-1] % GROUP:
        return tensor
    grouped = tensor.unflatten(-1, (-1, GROUP))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    return ((grouped / scale).round() * scale).nan_to_num(0.0).flatten(-2).to(tensor.dtype)
