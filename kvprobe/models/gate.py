"""The gate: it proves on a few tokens that a model does what kvprobe relies on, before any number is taken from it.

A library's model may ignore `position_ids`, count positions by slots, look ahead, or lose a mask on its way to a layer,
without an error. Each check compares two computations that agree only if the model does what kvprobe assumes. A failed
check refuses the model, or the lane, in one sentence that says what went wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvprobe.cache.ledger import PADDING, Ledger
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.errors import UserError
from kvprobe.models.attending import Attending
from kvprobe.models.geometry import embedded_tokens
from kvprobe.models.hf_cache import CacheLayer, past_key_values
from kvprobe.models.unproved import Lane, UnprovedLanes
from kvprobe.names import one_line

_LENGTH, _CUT = 12, 8
_LOUD = 30.0

Check = tuple[bool, str]
Reading = Float[Tensor, "batch queries vocab"]


@dataclass(frozen=True)
class _Held:
    """A cache: its ledger, and keys and values per layer."""

    ledger: Ledger
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def prove_plain(lanes: UnprovedLanes) -> bool:
    """Prove on a few tokens that the model is causal, places tokens at the positions given to it, and respects masks.

    Returns:
        Whether masks may differ between its KV heads.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    name, by_head = type(lanes.plain).__name__, False
    try:
        with torch.no_grad():
            refusal = next((sentence for holds, sentence in _plain_checks(lanes) if not holds), None)
            by_head = refusal is None and _heads_apart(lanes)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that kvprobe cannot read may fail in any way
        raise UserError(
            f"{name} cannot be read with positions and masks of kvprobe's making ({type(error).__name__}: "
            f"{one_line(error)})."
        ) from error
    if refusal is not None:
        raise UserError(f"{name} {refusal}")
    return by_head


def prove_hooked(lanes: UnprovedLanes, by_head: bool) -> None:
    """Prove on a few tokens that the hooked lane computes what the plain lane does, masks and gaps included.

    Args:
        by_head: whether masks may differ between KV heads, as `prove_plain` returned.

    Raises:
        UserError: it computes something else, so only the plain lane can be used.
    """
    name = type(lanes.plain).__name__
    try:
        with torch.no_grad():
            readings = [(_gapped(lanes, lane, by_head), *_whole(lanes, lane)) for lane in ("plain", "hooked")]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"TransformerLens cannot run {name} with positions and masks of kvprobe's making ({type(error).__name__}: "
            f"{one_line(error)}); use lane='plain', which captures K and V as stored."
        ) from error
    (gapped, whole, held), (gapped_too, whole_too, held_too) = readings
    worst = max(
        difference(gapped_too, gapped),
        difference(whole_too, whole),
        *(difference(one, other) for one, other in zip(held_too.keys, held.keys, strict=True)),
        *(difference(one, other) for one, other in zip(held_too.values, held.values, strict=True)),
    )
    if not worst <= allowed(lanes, hooked=True):
        raise UserError(
            f"TransformerLens computes something else than {name} itself (off by {worst:.1e} of what it should be), "
            "so its hooks cannot be trusted; use lane='plain', which captures K and V as stored, and policies "
            "without scores."
        )


def prove_attention(lanes: UnprovedLanes) -> None:
    """Prove on a few tokens that attention is a softmax over scaled scores, with softcap and sinks where there are any.

    Only then can attention be recomputed, replaced and patched.

    Raises:
        UserError: it is something else, or the model does not take its attention from transformers' registry.
    """
    ids = few_tokens(lanes)
    ledger, worst = fresh_ledger(ids), [0.0]
    seen = visible_by_layer(ledger, _LENGTH, lanes.geometry.windows)

    def compare(inputs: Attending, computed: Float[Tensor, "rows queries heads d_value"]) -> None:
        worst.append(difference(inputs.output(seen[inputs.layer]).transpose(1, 2), computed))

    with torch.no_grad(), lanes.observing_attention_unproved(compare):
        lanes.unproved(ids, ledger, empty_cache(lanes), masked=True)
    if not max(worst) <= allowed(lanes):
        raise UserError(
            f"{type(lanes.plain).__name__} attends otherwise than by a softmax over scaled scores (off by "
            f"{max(worst):.1e}), so its attention can be neither shown nor replaced on the plain lane; patch with "
            f"KVCache.patch, one cell at a time."
        )


def _plain_checks(lanes: UnprovedLanes) -> Iterator[Check]:
    """Each check in turn: whether it passes, and the sentence about a model that fails, without its subject."""
    ids = few_tokens(lanes)
    native = lanes.native(ids)
    yield (
        bool(native.isfinite().all()),
        ("computes logits that are not finite on a few tokens; its weights are damaged, or its dtype is too narrow."),
    )
    changed = ids.clone()
    changed[:, -1] = ids[:, 0]
    early = slice(None, _LENGTH - 1)
    ahead = difference(lanes.native(changed)[:, early], native[:, early])
    yield (
        ahead <= allowed(lanes),
        ("lets tokens attend to later ones, so it has no cache that could be continued; kvprobe reads causal models."),
    )

    whole, held = _whole(lanes)
    yield (
        difference(whole, native) <= allowed(lanes),
        (
            "computes other logits at the positions 0, 1, … given to it than by its own count, so it counts from "
            "elsewhere, or reads otherwise with a cache; kvprobe cannot place its tokens."
        ),
    )
    last = lanes.unproved(
        ids, fresh_ledger(ids), empty_cache(lanes), logits_to_keep=torch.tensor([_LENGTH - 1], device=ids.device)
    )
    yield (
        last.shape[1] == 1 and difference(last, whole[:, -1:]) <= allowed(lanes),
        ("does not return the logits of the one token that was asked for."),
    )
    explicit = lanes.unproved(ids, fresh_ledger(ids), empty_cache(lanes), masked=True)
    yield (
        difference(explicit, native) <= allowed(lanes),
        (
            f"computes other logits under an explicit mask of who may attend to whom than under its own (off by "
            f"{difference(explicit, native):.1e}); kvprobe cannot hide slots from it."
        ),
    )

    places = torch.arange(_LENGTH, device=ids.device)[None]
    spaced = lanes.unproved(
        ids, fresh_ledger(ids, places + _gap(lanes) * (places >= _CUT)), empty_cache(lanes), masked=True
    )
    # A model may ignore positions, if it does not count slots either.
    ignores_positions = torch.equal(spaced[:, _CUT:], explicit[:, _CUT:])
    leak, effect = _masks_reach(lanes, _first(held, _CUT), ids[:, _CUT:], 1)
    yield (
        leak <= allowed(lanes, effect),
        f"lets what hidden slots hold reach its logits (off by {leak:.1e}), so masks do not reach every layer.",
    )
    yield from _masking_is_eviction(lanes, ids, held, native, ignores_positions)
    yield from _rows_are_alone(lanes, ids)


def _masks_reach(
    lanes: UnprovedLanes, held: _Held, rest: Int[Tensor, "1 queries"], kv_heads: int
) -> tuple[float, float]:
    """How much of the content of hidden slots reaches the logits, and how much would reach them without masks.

    Each layer and KV head (or all heads alike, if `kv_heads` is 1) hides other slots, drawn at random. Loud noise
    replaces K and V there.
    """
    draws = torch.rand(
        lanes.geometry.n_layers, 1, kv_heads, held.ledger.slots, generator=torch.Generator().manual_seed(0)
    )
    hidden = (draws < 0.5).to(rest.device)

    def loud(tensor: Tensor, where: Bool[Tensor, "1 kv_heads slots"]) -> Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor)
        return torch.where(where[..., None], _LOUD * tensor.std() * noise, tensor)

    keys, values = (
        tuple(loud(tensor, hidden[layer]) for layer, tensor in enumerate(tensors))
        for tensors in (held.keys, held.values)
    )
    masked = replace(held.ledger, live=~hidden)
    quiet = _after(lanes, replace(held, ledger=masked), rest)
    struck, seen = (_after(lanes, _Held(ledger, keys, values), rest) for ledger in (masked, held.ledger))
    return difference(struck, quiet), difference(seen, quiet)


def _heads_apart(lanes: UnprovedLanes) -> bool:
    """Whether masks that differ between KV heads each reach their own head."""
    _, held = _whole(lanes)
    try:
        leak, effect = _masks_reach(lanes, _first(held, _CUT), few_tokens(lanes)[:, _CUT:], lanes.geometry.n_kv_heads)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (ValueError, RuntimeError, TypeError):  # a shape that the model does not take
        return False
    return leak <= allowed(lanes, effect)


def _masking_is_eviction(
    lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"], held: _Held, native: Reading, ignores_positions: bool
) -> Iterator[Check]:
    """Reading after masked slots equals reading after evicted ones, and reading with a cache equals reading at once."""
    before, rest = _first(held, _CUT), ids[:, _CUT:]
    apart = difference(_after(lanes, before, rest), native[:, _CUT:])
    yield (
        apart <= allowed(lanes),
        (f"computes other logits with a cache than at once (off by {apart:.1e}); its cache cannot be edited."),
    )
    # Evicted slots near the end and a gap before the new tokens make counted slots differ from positions.
    retained = torch.tensor([slot not in (_CUT - 4, _CUT - 3, _CUT - 2) for slot in range(_CUT)], device=ids.device)
    masked = replace(before, ledger=replace(before.ledger, live=retained[None, None, None]))
    evicted = _Held(
        before.ledger.take(
            retained.nonzero()[:, 0][None], torch.zeros(1, int(retained.sum()), dtype=torch.bool, device=ids.device)
        ),
        tuple(keys[:, :, retained] for keys in before.keys),
        tuple(values[:, :, retained] for values in before.values),
    )
    gap = _gap(lanes)
    hidden, gone = _after(lanes, masked, rest, gap), _after(lanes, evicted, rest, gap)
    apart, effect = difference(gone, hidden), difference(_after(lanes, before, rest, gap), hidden)
    yield (
        apart <= allowed(lanes, effect),
        f"{'ignores position_ids, and ' if ignores_positions else ''}computes other logits after slots were evicted "
        f"than after they were masked at the same positions (off by {apart:.1e}), so it places tokens by slots; "
        "kvprobe cannot edit its cache.",
    )


def _rows_are_alone(lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"]) -> Iterator[Check]:
    """A padded short row beside a long one computes what it computes alone."""
    short = _CUT - 3
    rows = torch.cat([ids[:, :_CUT], ids[:, :_CUT].flip(1)])
    padding = torch.zeros_like(rows, dtype=torch.bool)
    padding[1, short:] = True
    places = torch.arange(_CUT, device=ids.device).expand(2, -1).masked_fill(padding, 0)
    ledger = fresh_ledger(rows, places)
    ledger = replace(
        ledger,
        segments=ledger.segments.masked_fill(padding, PADDING),
        live=~padding[None, :, None, :],
        following=(~padding).sum(1),
    )
    together = _grown(lanes, None, rows, ledger)[1]
    alone = _grown(lanes, None, rows[1:, :short], fresh_ledger(rows[1:, :short]))[1]
    rest = ids[:, _CUT:]
    beside = _after(lanes, together, rest.expand(2, -1))[1:]
    apart = difference(beside, _after(lanes, alone, rest))
    yield (
        apart <= allowed(lanes),
        (
            f"computes other logits for a row beside a longer one than for the row alone (off by {apart:.1e}); kvprobe "
            f"reads many conditions as rows of one batch."
        ),
    )


def _gapped(lanes: UnprovedLanes, lane: Lane, by_head: bool) -> Reading:
    """The logits of a lane after a gap and after slots that are masked in some layers and heads."""
    shape, ids = lanes.geometry, few_tokens(lanes)
    _, held = _whole(lanes, lane)
    before, heads = _first(held, _CUT), shape.n_kv_heads if by_head else 1
    draws = torch.rand(shape.n_layers, 1, heads, _CUT, generator=torch.Generator().manual_seed(2))
    masked = replace(before, ledger=replace(before.ledger, live=(draws < 0.6).to(ids.device)))
    return _after(lanes, masked, ids[:, _CUT:], _gap(lanes), lane)


def _whole(lanes: UnprovedLanes, lane: Lane = "plain") -> tuple[Reading, _Held]:
    ids = few_tokens(lanes)
    return _grown(lanes, None, ids, fresh_ledger(ids), lane)


def _after(
    lanes: UnprovedLanes, held: _Held, ids: Int[Tensor, "batch queries"], gap: int = 0, lane: Lane = "plain"
) -> Reading:
    """The logits of tokens read after a cache, `gap` positions after its end."""
    places = held.ledger.following[:, None] + gap + torch.arange(ids.shape[1], device=ids.device)
    return _grown(lanes, held, ids, held.ledger.append(fresh_ledger(ids, places)), lane)[0]


def _grown(
    lanes: UnprovedLanes, held: _Held | None, ids: Int[Tensor, "batch queries"], ledger: Ledger, lane: Lane = "plain"
) -> tuple[Reading, _Held]:
    layers = [CacheLayer() for _ in range(lanes.geometry.n_layers)]
    if held is not None:
        for layer, keys, values in zip(layers, held.keys, held.values, strict=True):
            layer.update(keys, values)
    logits = lanes.unproved(ids, ledger, past_key_values(layers), lane)
    grown = [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]
    return logits, _Held(ledger, tuple(keys for keys, _ in grown), tuple(values for _, values in grown))


def _first(held: _Held, slots: int) -> _Held:
    """The first slots of a cache, as if no more had been read."""
    ids = held.ledger.tokens[:, :slots]
    return _Held(
        fresh_ledger(ids),
        tuple(keys[:, :, :slots] for keys in held.keys),
        tuple(values[:, :, :slots] for values in held.values),
    )


def empty_cache(lanes: UnprovedLanes) -> DynamicCache:
    return past_key_values([CacheLayer() for _ in range(lanes.geometry.n_layers)])


def fresh_ledger(ids: Int[Tensor, "batch slots"], places: Int[Tensor, "batch slots"] | None = None) -> Ledger:
    """A ledger of fresh tokens, all live, at these positions (0, 1, … by default)."""
    if places is None:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    places = places.expand_as(ids)
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    return Ledger(
        tokens=ids,
        positions=places,
        origins=places,
        segments=torch.zeros_like(ids),
        recomputed=nothing,
        delimiters=nothing,
        quantised=torch.full_like(ids, -1),
        live=~nothing[None, :, None, :],
        following=places[:, -1] + 1,
        names=("text",),
    )


def _gap(lanes: UnprovedLanes) -> int:
    """Positions to leave out: a few, but fewer than the shortest window spans."""
    return min(5, max(1, min((window for window in lanes.geometry.windows if window is not None), default=16) - 3))


def few_tokens(lanes: UnprovedLanes) -> Int[Tensor, "1 queries"]:
    """A few different tokens, spread over the vocabulary."""
    spread = (torch.arange(_LENGTH) * 2 + 1) * embedded_tokens(lanes.plain) // (2 * _LENGTH)
    return spread[None].to(lanes.device)


def allowed(lanes: UnprovedLanes, effect: float = torch.inf, hooked: bool = False) -> float:
    """The largest difference that counts as rounding: well below what a mistake would change."""
    if lanes.dtype not in (torch.float32, torch.float64):
        return 0.1
    return max(2e-6, min(2e-4 if hooked else 1e-4, 0.05 * effect))


def difference(actual: Tensor, expected: Tensor) -> float:
    """The difference of two tensors, relative to the spread of the expected one; NaN counts as infinite."""
    if torch.equal(actual, expected):
        return 0.0
    expected = expected.double()
    spread = torch.dist(expected, expected.mean(-1, keepdim=True))
    relative = float(torch.dist(actual.double(), expected) / spread) if bool(spread > 0) else torch.inf
    return torch.inf if relative != relative else relative
