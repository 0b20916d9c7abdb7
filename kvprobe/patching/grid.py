"""The grid: which K and V each cell of a sweep swaps, and which heads and tokens read them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Literal, get_args

import torch

from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import INDEX, KV, LATENT, WRITES
from kvprobe.checks import is_whole, names_of
from kvprobe.errors import UserError
from kvprobe.faults.scope import bands
from kvprobe.models.lens import Family, hook_name, sites_of
from kvprobe.names import unknown

Part = Literal["K", "V", "KV"]
LATENT_PARTS = (*LATENT, "latent+rope")
"""What a cell can swap of latent attention: the latent, the rotated key, or both."""
_SEEN = {"K": "K", "V": "V", "latent": "KV", "rope": "K"}
"""In K of the heads, in V, or in both each part is seen."""
_SEVERAL = {"KV": KV, "writes": WRITES}
AXES = ("layer", "band", "slot", "segment", "head", "query_head", "query")
"""Layers one by one or in bands; slots one by one or by segment; KV heads, which hold K and V; query heads and tokens
of the suffix, which read them. An axis that a grid does not name is taken whole."""
BANDS = 4
"""Bands into which the layers are cut where the grid does not say."""
ACTIVATIONS: tuple[Family, ...] = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
"""What `reads="total"` can swap beside K and V."""

_PARTS: dict[Family, str] = {"k": "K", "v": "V", **{family: family for family in ACTIVATIONS}}

Over = Sequence[str] | Mapping[str, Iterable[object] | None]


@dataclass(frozen=True, repr=False)
class Cell(Brief):
    """One patched run.

    Attributes:
        layers: where K or V (or an activation) is swapped.
        slots: of the base, at which it is swapped.
        part: what is swapped: one of `parts_of`, or an activation of `ACTIVATIONS`.
        kv_heads: whose K or V is swapped; None for all.
        query_heads: that read what was swapped, while others read the base's; None for all.
        queries: tokens of the suffix that read it; None for all.
        content: what is written: `full` (the donor's), or with a subspace `along` (only the donor's part in it) or
            `rest` (only that outside).
        labels: where the cell stands in its grid.
    """

    layers: tuple[int, ...]
    slots: tuple[int, ...]
    part: str
    kv_heads: tuple[int, ...] | None = None
    query_heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    content: str = "full"
    labels: Mapping[str, int | float | str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Bounds:
    """How many of each there are to choose from."""

    layers: int
    kv_heads: int
    query_heads: int
    queries: int


def grid(base: KVCache, bounds: Bounds, over: Over, parts: Sequence[str] | None, contents: Sequence[str]) -> list[Cell]:
    """All cells of the product of these axes, in the order in which they are named, parts innermost.

    Parts that are named by hooks name their layers, which are then the axis `layer`. A cell means the layers that store
    its part; where none does, there is no cell.

    Args:
        parts: all by default, but not each of those that a token writes.

    Raises:
        UserError: an axis, layer, slot, segment, head or part that does not exist; or two axes for the same thing.
    """
    asked: dict[str, Iterable[object] | None] = dict(over) if isinstance(over, Mapping) else dict.fromkeys(over)
    _refuse_axes(asked)
    parts = [part for part in parts_of(base) if part not in WRITES] if parts is None else parts
    _refuse_parts(parts, base)
    hooked = hooked_parts(parts)
    if hooked is not None:
        if "band" in asked or asked.get("layer") is not None:
            raise UserError("Hook names name their layers; leave the axis 'band' and the values of 'layer' out.")
        asked = {"layer": None, **asked}
        asked["layer"] = list(dict.fromkeys(layer for layer, _ in hooked))
        parts = list(dict.fromkeys(part for _, part in hooked))
    axes = {axis: _values(axis, chosen, base, bounds) for axis, chosen in asked.items()}
    everywhere = {"layers": tuple(range(bounds.layers)), "slots": _live(base)}
    stored = {part: storing(base, everywhere["layers"], part) for part in parts}
    cells = []
    for picks in product(*axes.values()):
        labels = {axis: label for axis, (label, _) in zip(axes, picks, strict=True)}
        what: dict[str, tuple[int, ...]] = everywhere | {
            _FIELDS[axis]: value for axis, (_, value) in zip(axes, picks, strict=True)
        }
        cells += [
            Cell(**{**what, "layers": layers}, part=part, content=content, labels=labels)
            for part, content in product(parts, contents)
            if (layers := tuple(layer for layer in what["layers"] if layer in stored[part]))
            and (hooked is None or (*layers, part) in hooked)
        ]
    if not cells:
        raise UserError(
            f"The grid has no cell; give each axis at least one value, and layers that store {', '.join(parts)}."
        )
    return cells


@cache
def stored_parts(part: str) -> tuple[str, ...]:
    """The parts of a layer that a cell swaps, by their names in a cache."""
    return tuple(name for one in part.split("+") for name in _SEVERAL.get(one, (one,)))


def storing(base: KVCache, layers: Iterable[int], part: str) -> tuple[int, ...]:
    """Those of these layers that store something of what a cell swaps."""
    names = stored_parts(part)
    return tuple(at for at in layers if part in ACTIVATIONS or any(name in base.layers[at] for name in names))


@cache
def seen_in(part: str) -> str:
    """In which of K and V of the heads a part is seen; in neither what tokens wrote, or keys of an index."""
    seen = {letter for name in stored_parts(part) for letter in _SEEN.get(name, "")}
    return "".join(sorted(seen))


def hooked_parts(names: Sequence[str]) -> list[tuple[int, str]] | None:
    """The layer and part that each of these hooks of TransformerLens stands for; None where none names a hook.

    Raises:
        UserError: a hook shows nothing that a cell can swap; or see `kvprobe.models.lens.sites_of`.
    """
    sites = sites_of(names)
    for family, layer in sites or ():
        if family not in _PARTS:
            raise UserError(
                f"What the hook {hook_name(family, layer)!r} shows is not kept, so nothing can be swapped there; swap "
                f"keys as they are stored, {hook_name('k', layer)!r}."
            )
    return None if sites is None else [(layer, _PARTS[family]) for family, layer in sites]


def even_bands(layers: int) -> list[range]:
    """The layers in `BANDS` bands as equal as can be, or one by one where there are fewer layers."""
    return bands(layers, min(BANDS, layers))


def _refuse_axes(asked: Collection[str]) -> None:
    for axis in asked:
        if axis not in AXES:
            raise UserError(unknown("axis", axis, AXES))
    for one, other in (("layer", "band"), ("slot", "segment")):
        if one in asked and other in asked:
            raise UserError(f"A grid goes over {one}s or over {other}s, not over both; leave one of them out.")


def parts_of(base: KVCache) -> tuple[str, ...]:
    """The parts of a cache that a cell can swap."""
    stored = dict.fromkeys(name for layer in base.layers for name in layer)
    slots: list[str] = [*(LATENT_PARTS if LATENT[0] in stored else get_args(Part) if KV[0] in stored else ())]
    if INDEX in stored:
        slots += [INDEX, f"{slots[-1]}+{INDEX}"]
    writes = [name for name in WRITES if name in stored]
    both = [f"{slots[-1]}+writes"] if slots else []
    return (*slots, "writes", *both, *writes) if writes else tuple(slots)


def _refuse_parts(parts: Sequence[str], base: KVCache) -> None:
    known, hooked = (*parts_of(base), *ACTIVATIONS), hooked_parts(parts)
    for part in parts if hooked is None else [part for _, part in hooked]:
        if part not in known:
            raise UserError(unknown("part", part, known))
    if not parts:
        raise UserError("There is no part to swap; give K, V, or KV.")


_FIELDS = {
    "layer": "layers",
    "band": "layers",
    "slot": "slots",
    "segment": "slots",
    "head": "kv_heads",
    "query_head": "query_heads",
    "query": "queries",
}

Value = tuple[int | str, tuple[int, ...]]
"""A label and the layers, slots, heads or tokens that it stands for."""


def _values(axis: str, chosen: Iterable[object] | None, base: KVCache, bounds: Bounds) -> list[Value]:
    match axis:
        case "layer":
            return _singles("layer", chosen, range(bounds.layers))
        case "head":
            return _singles("KV head", chosen, range(bounds.kv_heads))
        case "query_head":
            return _singles("query head", chosen, range(bounds.query_heads))
        case "query":
            return _singles("suffix token", chosen, range(bounds.queries))
        case "band":
            return [_band(band, bounds.layers) for band in (even_bands(bounds.layers) if chosen is None else chosen)]
        case "slot":
            return _slots(base, chosen)
        case _:
            return _segments(base, chosen)


def _slots(base: KVCache, chosen: Iterable[object] | None) -> list[Value]:
    if chosen is None:
        return [(slot, (slot,)) for slot in _live(base)]
    slots = _singles("slot", chosen, range(base.slots))
    for _, (slot,) in slots:
        if base.ledger.padding[0, slot]:
            raise UserError(f"Slot {slot} of the base is padding and holds no token; choose another.")
    return slots


def _segments(base: KVCache, chosen: Iterable[object] | None) -> list[Value]:
    """The slots of each segment; where none is chosen, of those with a slot that some layer and head may see."""
    ledger = base.ledger
    if chosen is None:
        live = torch.tensor(_live(base), dtype=torch.long)
        numbers = dict.fromkeys(ledger.segments[0].cpu()[live].tolist())
        chosen = [ledger.names[number] for number in numbers]
    segments = []
    for name in names_of(chosen):
        slots = (ledger.in_segments([name])[0] & ~ledger.padding[0]).nonzero()[:, 0].tolist()
        if not slots:
            raise UserError(f"Segment {name!r} has no slot left in the base; choose another.")
        segments.append((name, tuple(slots)))
    return segments


def _live(base: KVCache) -> tuple[int, ...]:
    """Slots that some layer and head may see."""
    return tuple((base.ledger.live_somewhere[0] & ~base.ledger.padding[0]).nonzero()[:, 0].tolist())


def _band(band: object, layers: int) -> Value:
    if not isinstance(band, Iterable):
        raise UserError(f"A band is a range of layers; got {band!r}, so write it as in range(0, 8).")
    members = tuple(sorted({layer for _, (layer,) in _singles("layer", band, range(layers))}))
    if not members:
        raise UserError("A band has no layer; give each at least one, as in range(0, 8).")
    adjacent = members == tuple(range(members[0], members[-1] + 1))
    return (f"{members[0]}–{members[-1]}" if adjacent else "+".join(map(str, members))), members


def _singles(kind: str, chosen: Iterable[object] | None, allowed: range) -> list[Value]:
    """Each of the chosen numbers by itself, or all that are allowed."""
    singles: list[Value] = []
    for number in allowed if chosen is None else chosen:
        if not is_whole(number) or number not in allowed:
            raise UserError(f"There is no {kind} {number}; there are {kind}s 0 to {allowed.stop - 1}.")
        singles.append((int(number), (int(number),)))
    return singles
