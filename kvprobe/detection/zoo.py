"""A zoo of real cache bugs: what public reports describe, as faults to plant in any cache.

Each bug has the address of its report, what happened there, and how large it was. `plant` writes one into a cache, as
large as it was reported or as large as is asked for, at random places that a seed decides, and says where it struck.
Reports whose cache was right after all are in the zoo too, as benign: what detects the others must not report these.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import KV
from kvprobe.detection.reports import REPORTS, Report
from kvprobe.errors import UserError
from kvprobe.faults import (
    BitFlips,
    ChannelOrder,
    Draws,
    Fault,
    FaultContext,
    ForeignBlock,
    ForeignScales,
    Fp8Scale,
    Gaussian,
    Misread,
    NotANumber,
    OverlappingKV,
    PositionShift,
    Scope,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.faults.scope import Part, Parts
from kvprobe.names import unknown

BLOCK = 16
"""Slots in a block."""
DONOR = "distractor"
"""The donor of a fault context from which bugs take another request's rows."""
ROUNDING = 0.02
"""Of its norm: by no more than this do a row and that of the same text in another request differ."""
_PLACE = 71

Make = Callable[[Scope], Fault]


def _fault(kind: Callable[..., Fault], *settings: object) -> Make:
    return lambda scope: kind(*settings, scope=scope)


def _of(part: Parts, kind: Callable[..., Fault], *settings: object) -> Make:
    """A fault of K alone, or of V; of all that is stored, where that is neither."""
    return lambda scope: kind(*settings, scope=replace(scope, parts=part if scope.parts == "kv" else scope.parts))


def _flip(field: Literal["sign", "exponent", "mantissa"], part: Parts) -> Make:
    one = partial(BitFlips, field=field)
    return lambda scope: _of(part, one, "bf16")(replace(scope, unit="number", count=1))


def _last_places(scope: Scope) -> Fault:
    """Half of all numbers are off by the last place of bfloat16."""
    return BitFlips("bf16", 0, scope=replace(scope, unit="number", rate=0.5))


FOREIGN, STALE, ROWS = (_fault(kind) for kind in (ForeignBlock, StaleBlock, partial(WrongPointers, "repeated")))
PACKED = (_fault(Misread, "head slot part", "part slot head"),)
SHIFTS = tuple(_fault(PositionShift, by) for by in (16, -3, 100, 1, -40, 7))
FACTORS = tuple(_fault(Fp8Scale, factor) for factor in (2.0, 0.25, 8.0, 0.5, 25.0, 1.5))
FLIPS = tuple(_flip(field, part) for field in ("exponent", "sign", "mantissa") for part in ("k", "v"))

MAKERS: Mapping[str, tuple[Make, ...]] = {
    "lmcache-4463": (_fault(Misread, "slot head part", "slot part head"),),
    "lmcache-4247": (ROWS,),
    "dynamo-14416": PACKED,
    "vllm-52617": PACKED,
    "tt-vllm-415": (ROWS,),
    "sglang-22819": (STALE,),
    "transformers-47433": (STALE,),
    "atom-2154": (_fault(Zeros),),
    "vllm-49716": (_fault(ForeignScales),),
    "vllm-50702": (_fault(ForeignScales),),
    "sglang-17839": (ROWS,),
    "sglang-19107": (ROWS,),
    "vllm-27547": (ROWS,),
    "vllm-51837": (_fault(OverlappingKV, "v"), _fault(OverlappingKV, "k")),
    "vllm-45357": (FOREIGN,),
    "vllm-30931": (FOREIGN,),
    "vllm-44701": (FOREIGN,),
    "lmcache-3301": (FOREIGN,),
    "llama-cpp-3825": SHIFTS,
    "sglang-20705": FACTORS,
    "flash-attention-1745": (_fault(NotANumber), _fault(NotANumber, float("inf"))),
    "vllm-53856": (_of("v", NotANumber),),
    "bit-flips": FLIPS,
    "channel-order": (_fault(ChannelOrder),),
    "history-swap": (FOREIGN,),
    "injected-keys": (_of("k", Gaussian, "head"),),
    "tpu-inference-3369": (),
    "vllm-39146": (_last_places,),
    "vllm-13133": (_fault(Fp8Scale, 1.0),),
}
"""By name, the fault of each bug at a scope; where a bug has a setting, such as how far positions are off, one for each
of several values. With none, nothing is written."""

ZOO: Mapping[str, Report] = {name: REPORTS[name] for name in MAKERS}


@dataclass(frozen=True, eq=False)
class Planted:
    """A cache with a bug in it.

    Attributes:
        cache: the damaged cache; the same as before where the bug writes nothing.
        name: of the bug.
        report: of it.
        fault: what was written; None where nothing was.
        layers: in which some bit differs now.
        slots: of which some bit differs now.
    """

    cache: KVCache
    name: str
    report: Report
    fault: Fault | None
    layers: tuple[int, ...]
    slots: tuple[int, ...]


@checked_arguments
def plant(
    name: str,
    cache: KVCache,
    context: FaultContext | None = None,
    *,
    blocks: AtLeastOne | None = None,
    layers: AtLeastOne | None = None,
    variant: AtLeastZero | None = None,
    draws: Draws | None = None,
) -> Planted:
    """A bug of the zoo in a cache of one row.

    It strikes a run of consecutive blocks of 16 slots in a run of consecutive layers, drawn at random; a prefix from
    the first block on, and what was read last up to the last slot.

    Args:
        context: what a bug may need beside the cache: a donor named `distractor`, for the rows of another request, and
            the rotary embedding of each layer, for positions. `kvprobe.inference.sweep.prepare` makes one.
        blocks: how many; as large a share as was reported by default. More than there are means all.
        layers: how many, likewise.
        variant: which of the bug's settings, counted over and over; drawn at random by default.
        draws: seed 0 by default.

    Raises:
        UserError: there is no such bug, the cache has several rows or too few slots, the bug needs what the context or
            the cache lacks, it changes no bit of this cache, or the other request's rows are of the same text.
    """
    if name not in MAKERS:
        raise UserError(unknown("bug", name, MAKERS))
    if cache.batch != 1:
        raise UserError(f"A bug is planted in a cache of one row, and this has {cache.batch}; take one with rows([0]).")
    report, makers = REPORTS[name], MAKERS[name]
    if not makers:
        return Planted(cache, name, report, None, (), ())
    draws = draws or Draws()
    first, second, third = (float(drawn) for drawn in draws.uniform((3,), _PLACE))
    part, able = _struck_part(cache, states=report.states, keys=report.kind == "position shift")
    run = _count(layers, report.layers, len(able))
    start = int(first * (len(able) - run + 1))
    scope = Scope(
        layers=able[start : start + run], slots=_slots(cache.slots, report, blocks, second), parts=part, unit="slot"
    )
    fault = makers[int(third * len(makers)) if variant is None else variant % len(makers)](scope)
    context = context or FaultContext(cache)
    damaged = cache.corrupt(fault, draws=[draws], contexts=[context])
    struck = [_differs(one, other, cache.slots) for one, other in zip(cache.layers, damaged.layers, strict=True)]
    hit = tuple(number for number, slots in enumerate(struck) if bool(slots.any()))
    if not hit:
        raise UserError(f"{name} changes no bit of this cache ({fault}); plant another bug, or in another cache.")
    if report.kind in ("foreign prefix", "stale") and _apart(cache, damaged) < ROUNDING:
        raise UserError(
            f"{name} puts rows of another request into this cache that are the same but for rounding, since both texts "
            f"are alike there ({fault}); draw another place, or give another donor."
        )
    where = torch.stack(struck).any(0).nonzero()[:, 0]
    return Planted(damaged, name, report, fault, hit, entries(where, int))


def _count(asked: int | None, share: float, available: int) -> int:
    return min(available, asked or max(1, round(share * available)))


def _slots(slots: int, report: Report, blocks: int | None, uniform: float) -> range:
    """A run of blocks: whole ones, and what follows them where it is the last."""
    available = slots // BLOCK
    if not available:
        raise UserError(f"The cache has {slots} slots; bugs strike blocks of {BLOCK}, so read a longer text.")
    run = _count(blocks, report.blocks, available)
    if report.place == "last":
        return range((available - run) * BLOCK, slots)
    start = 0 if report.place == "first" else int(uniform * (available - run + 1))
    return range(start * BLOCK, (start + run) * BLOCK)


def _struck_part(cache: KVCache, states: bool, keys: bool) -> tuple[Parts | Part, list[int]]:
    """What the bug strikes in this cache, and the layers that store it.

    A lost state is that whose tokens wrote nothing. Where no layer keeps a state, K and V are struck instead; and where
    no layer stores these, the latent, or its rotated key where `keys`.
    """
    parts: tuple[tuple[Part, str], ...] = (("step", "step"), ("gain", "gain"), ("conv", "conv")) if states else ()
    for part, stored in parts:
        if able := [number for number, layer in enumerate(cache.layers) if stored in layer]:
            return part, able
    if able := [number for number, layer in enumerate(cache.layers) if set(KV) <= set(layer)]:
        return ("k" if keys else "kv"), able
    able = [number for number, layer in enumerate(cache.layers) if "latent" in layer]
    if not able:
        raise UserError("No layer of this cache attends to slots; plant a bug of states, such as atom-2154.")
    return ("rope" if keys else "latent"), able


def _differs(one: Layer, other: Layer, slots: int) -> Bool[Tensor, "slots"]:
    """Per slot of a layer of one row, whether a number differs; NaN is NaN."""
    differs = torch.zeros(slots, dtype=torch.bool)
    for name, was in one.items():
        now = other[name]
        differs |= ((was != now) & ~(was.isnan() & now.isnan())).any(-1).any(1)[0].cpu()
    return differs


def _apart(cache: KVCache, damaged: KVCache) -> float:
    """The largest distance of a row of a part from what it was, relative to its norm."""
    return max(
        float(((now - was).norm(dim=-1) / was.norm(dim=-1).clamp_min(1e-30)).max())
        for was, now in zip(cache.tensors, damaged.tensors, strict=True)
        if was is not now
    )
