"""The gate: what kvprobe relies on is proved on the model at hand, on a few tokens, before any number is taken from it.

A library's model may swallow `position_ids`, count positions by slots, look ahead, or lose a mask on its way to a layer,
without an error. Each check below compares two computations that agree only if the model does what kvprobe takes for
granted; one that fails refuses the model, or the lane, in a sentence that names what was found.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvprobe.cache.ledger import PADDING, Ledger
from kvprobe.errors import UserError
from kvprobe.models.attending import Attending
from kvprobe.models.unproved import Lane, UnprovedLanes

_LENGTH, _CUT = 12, 8
_LOUD = 30.0

Check = tuple[bool, str]
Reading = Float[Tensor, "batch queries vocab"]


@dataclass(frozen=True)
class _Held:
    """What was read so far: the ledger, and keys and values per layer."""

    ledger: Ledger
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def prove_plain(lanes: UnprovedLanes) -> bool:
    """Prove on a few tokens that the model can be read as kvprobe reads: causal, at given positions, past hidden slots.

    Returns whether its KV heads can be masked apart from one another.

    Raises:
        UserError: it cannot be read so; the sentence says in what it fails.
    """
    name, by_head = type(lanes.plain).__name__, False
    try:
        with torch.no_grad():
            refusal = next((sentence for holds, sentence in _plain_checks(lanes) if not holds), None)
            by_head = refusal is None and _heads_apart(lanes)
    except Exception as error:  # a model of another kind may fail in any way, always for the same reason
        message = " ".join(str(error).split())[:200]
        raise UserError(
            f"{name} cannot be read with positions and masks of kvprobe's making ({type(error).__name__}: {message})."
        ) from error
    if refusal is not None:
        raise UserError(f"{name} {refusal}")
    return by_head


def prove_hooked(lanes: UnprovedLanes, by_head: bool) -> None:
    """Prove on a few tokens that the hooked lane computes what the plain one does, masks and gaps included.

    Args:
        by_head: whether KV heads can be masked apart, as `prove_plain` found.

    Raises:
        UserError: it does not; only the plain lane can be trusted.
    """
    name = type(lanes.plain).__name__
    try:
        with torch.no_grad():
            readings = [(_gapped(lanes, lane, by_head), *_whole(lanes, lane)) for lane in ("plain", "hooked")]
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise UserError(
            f"TransformerLens cannot run {name} with positions and masks of kvprobe's making ({type(error).__name__}: "
            f"{message}); use lane='plain', which captures K and V as stored."
        ) from error
    (gapped, whole, held), (gapped_too, whole_too, held_too) = readings
    worst = max(
        _apart(gapped_too, gapped),
        _apart(whole_too, whole),
        *(_apart(one, other) for one, other in zip(held_too.keys, held.keys, strict=True)),
        *(_apart(one, other) for one, other in zip(held_too.values, held.values, strict=True)),
    )
    if not worst <= _allowed(lanes, hooked=True):
        raise UserError(
            f"TransformerLens computes something else than {name} itself (off by {worst:.1e} of what it should be), so its "
            f"hooks cannot be trusted; use lane='plain', which captures K and V as stored, and policies without scores."
        )


def prove_attention(lanes: UnprovedLanes) -> None:
    """Prove on a few tokens that softmax over scaled scores, with softcap and sinks where it has some, is all of the model's
    attention, so that it can be computed again, replaced, and patched.

    Raises:
        UserError: it is not, or the model does not take its attention from transformers' registry.
    """
    ids = _ids(lanes)
    ledger, worst = _ledger(ids), [0.0]
    masks = lanes.masks(ledger, _LENGTH)

    def compare(given: Attending, computed: Float[Tensor, "rows queries heads d_value"]) -> None:
        worst.append(_apart(_standard(given, masks[given.layer]).transpose(1, 2), computed))

    with torch.no_grad(), lanes.observing_attention_unproved(compare):
        lanes.unproved(ids, ledger, _empty(lanes), masked=True)
    if not max(worst) <= _allowed(lanes):
        raise UserError(
            f"{type(lanes.plain).__name__} attends otherwise than by a softmax over scaled scores (off by {max(worst):.1e}), so its "
            f"attention can be neither shown nor replaced on the plain lane; patch with KVCache.patch, one cell at a time."
        )


def _standard(
    given: Attending, mask: Float[Tensor, "rows heads_or_1 queries slots"]
) -> Float[Tensor, "rows heads queries d_value"]:
    """What a layer that attends with this gives out, by the book."""
    groups = given.query.shape[1] // given.key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1).float() for tensor in (given.key, given.value))
    scores = given.query.float() @ key.transpose(2, 3) * given.scale
    if given.softcap is not None:
        scores = (scores / given.softcap).tanh() * given.softcap
    scores = scores + mask.float()
    if given.sinks is not None:
        own = given.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, own], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def _plain_checks(lanes: UnprovedLanes) -> Iterator[Check]:
    """Each check in turn: whether it holds, and the rest of the sentence that says what does not."""
    ids = _ids(lanes)
    native = lanes.native(ids)
    yield (
        bool(native.isfinite().all()),
        ("computes logits that are not finite on a few tokens; its weights are damaged, or its dtype is too narrow."),
    )
    changed = ids.clone()
    changed[:, -1] = ids[:, 0]
    early = slice(None, _LENGTH - 1)
    ahead = _apart(lanes.native(changed)[:, early], native[:, early])
    yield (
        ahead <= _allowed(lanes),
        ("lets tokens attend to later ones, so it has no cache that could be continued; kvprobe reads causal models."),
    )

    whole, held = _whole(lanes)
    yield (
        _apart(whole, native) <= _allowed(lanes),
        (
            "computes other logits at the positions 0, 1, … given to it than by its own count, so it counts from elsewhere, or "
            "reads otherwise with a cache; kvprobe cannot place its tokens."
        ),
    )
    last = lanes.unproved(
        ids, _ledger(ids), _empty(lanes), logits_to_keep=torch.tensor([_LENGTH - 1], device=ids.device)
    )
    yield (
        last.shape[1] == 1 and _apart(last, whole[:, -1:]) <= _allowed(lanes),
        ("does not return the logits of the one token that was asked for."),
    )
    explicit = lanes.unproved(ids, _ledger(ids), _empty(lanes), masked=True)
    yield (
        _apart(explicit, native) <= _allowed(lanes),
        (
            f"computes other logits under an explicit mask of who may attend to whom than under its own (off by "
            f"{_apart(explicit, native):.1e}); kvprobe cannot hide slots from it."
        ),
    )

    places = torch.arange(_LENGTH, device=ids.device)[None]
    spaced = lanes.unproved(ids, _ledger(ids, places + _gap(lanes) * (places >= _CUT)), _empty(lanes), masked=True)
    # A model built by hand may have no use for positions; then they may not matter by any count, slots included.
    deaf = torch.equal(spaced[:, _CUT:], explicit[:, _CUT:])
    leak, effect = _masks_reach(lanes, _first(held, _CUT), ids[:, _CUT:], 1)
    yield (
        leak <= _allowed(lanes, effect),
        f"lets what hidden slots hold reach its logits (off by {leak:.1e}), so masks do not reach every layer.",
    )
    yield from _masking_is_eviction(lanes, ids, held, native, deaf)
    yield from _rows_are_alone(lanes, ids)


def _masks_reach(
    lanes: UnprovedLanes, held: _Held, rest: Int[Tensor, "1 queries"], kv_heads: int
) -> tuple[float, float]:
    """How much of what hidden slots hold reaches the logits, and how much it would if they were not hidden: in each layer
    and KV head (or in all heads alike, if `kv_heads` is 1) other slots are hidden, and there K and V are made loud."""
    drawn = torch.rand(
        lanes.geometry.n_layers, 1, kv_heads, held.ledger.slots, generator=torch.Generator().manual_seed(0)
    )
    hidden = (drawn < 0.5).to(rest.device)

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
    return _apart(struck, quiet), _apart(seen, quiet)


def _heads_apart(lanes: UnprovedLanes) -> bool:
    """Whether masks that differ between KV heads reach the heads that they are meant for."""
    _, held = _whole(lanes)
    try:
        leak, effect = _masks_reach(lanes, _first(held, _CUT), _ids(lanes)[:, _CUT:], lanes.geometry.n_kv_heads)
    except (ValueError, RuntimeError, TypeError):  # a shape that the model does not take
        return False
    return leak <= _allowed(lanes, effect)


def _masking_is_eviction(
    lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"], held: _Held, native: Reading, deaf: bool
) -> Iterator[Check]:
    """Reading on past hidden slots equals reading on where they are gone, and past all slots equals reading at once."""
    before, rest = _first(held, _CUT), ids[:, _CUT:]
    apart = _apart(_after(lanes, before, rest), native[:, _CUT:])
    yield (
        apart <= _allowed(lanes),
        (f"computes other logits with a cache than at once (off by {apart:.1e}); its cache cannot be edited."),
    )
    # Slots near the end go, and what follows stands further on, so that counting slots is not counting positions.
    stays = torch.tensor([slot not in (_CUT - 4, _CUT - 3, _CUT - 2) for slot in range(_CUT)], device=ids.device)
    masked = replace(before, ledger=replace(before.ledger, live=stays[None, None, None]))
    evicted = _Held(
        before.ledger.take(
            stays.nonzero()[:, 0][None], torch.zeros(1, int(stays.sum()), dtype=torch.bool, device=ids.device)
        ),
        tuple(keys[:, :, stays] for keys in before.keys),
        tuple(values[:, :, stays] for values in before.values),
    )
    gap = _gap(lanes)
    hidden, gone = _after(lanes, masked, rest, gap), _after(lanes, evicted, rest, gap)
    apart, effect = _apart(gone, hidden), _apart(_after(lanes, before, rest, gap), hidden)
    yield (
        apart <= _allowed(lanes, effect),
        f"{'takes no notice of position_ids, and ' if deaf else ''}computes other logits after slots were evicted than after they "
        f"were masked at the same positions (off by {apart:.1e}), so it places tokens by slots; kvprobe cannot edit its cache.",
    )


def _rows_are_alone(lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"]) -> Iterator[Check]:
    """A short row beside a long one, padded, reads on as it does alone."""
    short = _CUT - 3
    rows = torch.cat([ids[:, :_CUT], ids[:, :_CUT].flip(1)])
    padding = torch.zeros_like(rows, dtype=torch.bool)
    padding[1, short:] = True
    places = torch.arange(_CUT, device=ids.device).expand(2, -1).masked_fill(padding, 0)
    ledger = _ledger(rows, places)
    ledger = replace(
        ledger,
        segments=ledger.segments.masked_fill(padding, PADDING),
        live=~padding[None, :, None, :],
        following=(~padding).sum(1),
    )
    together = _grown(lanes, None, rows, ledger)[1]
    alone = _grown(lanes, None, rows[1:, :short], _ledger(rows[1:, :short]))[1]
    rest = ids[:, _CUT:]
    beside = _after(lanes, together, rest.expand(2, -1))[1:]
    apart = _apart(beside, _after(lanes, alone, rest))
    yield (
        apart <= _allowed(lanes),
        (
            f"computes other logits for a row beside a longer one than for the row alone (off by {apart:.1e}); kvprobe reads "
            f"many conditions as rows of one batch."
        ),
    )


def _gapped(lanes: UnprovedLanes, lane: Lane, by_head: bool) -> Reading:
    """Reading on in a lane past slots that are hidden in some layers and heads, after a gap."""
    shape, ids = lanes.geometry, _ids(lanes)
    _, held = _whole(lanes, lane)
    before, heads = _first(held, _CUT), shape.n_kv_heads if by_head else 1
    drawn = torch.rand(shape.n_layers, 1, heads, _CUT, generator=torch.Generator().manual_seed(2))
    masked = replace(before, ledger=replace(before.ledger, live=(drawn < 0.6).to(ids.device)))
    return _after(lanes, masked, ids[:, _CUT:], _gap(lanes), lane)


def _whole(lanes: UnprovedLanes, lane: Lane = "plain") -> tuple[Reading, _Held]:
    ids = _ids(lanes)
    return _grown(lanes, None, ids, _ledger(ids), lane)


def _after(
    lanes: UnprovedLanes, held: _Held, ids: Int[Tensor, "batch queries"], gap: int = 0, lane: Lane = "plain"
) -> Reading:
    """The logits of tokens read after what is held, at the positions that follow, `gap` further on."""
    places = held.ledger.following[:, None] + gap + torch.arange(ids.shape[1], device=ids.device)
    return _grown(lanes, held, ids, held.ledger.append(_ledger(ids, places)), lane)[0]


def _grown(
    lanes: UnprovedLanes, held: _Held | None, ids: Int[Tensor, "batch queries"], ledger: Ledger, lane: Lane = "plain"
) -> tuple[Reading, _Held]:
    past = _empty(lanes)
    layers: Any = past.layers
    if held is not None:
        for layer, keys, values in zip(layers, held.keys, held.values, strict=True):
            layer.update(keys, values)
    logits = lanes.unproved(ids, ledger, past, lane)
    return logits, _Held(ledger, tuple(layer.keys for layer in layers), tuple(layer.values for layer in layers))


def _first(held: _Held, slots: int) -> _Held:
    """The first slots of what is held, as if no more had been read."""
    ids = held.ledger.tokens[:, :slots]
    return _Held(
        _ledger(ids),
        tuple(keys[:, :, :slots] for keys in held.keys),
        tuple(values[:, :, :slots] for values in held.values),
    )


def _empty(lanes: UnprovedLanes) -> DynamicCache:
    past = DynamicCache()
    past.layers = [DynamicLayer() for _ in range(lanes.geometry.n_layers)]  # pyright: ignore[reportAttributeAccessIssue]
    return past


def _ledger(ids: Int[Tensor, "batch slots"], places: Int[Tensor, "batch slots"] | None = None) -> Ledger:
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
    """Positions to leave out: a few, yet so that the shortest window still reaches back over them."""
    return min(5, max(1, min((window for window in lanes.geometry.windows if window is not None), default=16) - 3))


def _ids(lanes: UnprovedLanes) -> Int[Tensor, "1 queries"]:
    """A few different tokens, spread over the vocabulary."""
    vocabulary = lanes.plain.get_input_embeddings().num_embeddings
    spread = (torch.arange(_LENGTH) * 2 + 1) * vocabulary // (2 * _LENGTH)
    return spread[None].to(lanes.device)


def _allowed(lanes: UnprovedLanes, effect: float = torch.inf, hooked: bool = False) -> float:
    """Up to where two readings are the same: rounding, and well below what a mistake would change."""
    if lanes.dtype not in (torch.float32, torch.float64):
        return 0.1
    return max(2e-6, min(2e-4 if hooked else 1e-4, 0.05 * effect))


def _apart(found: Tensor, expected: Tensor) -> float:
    """How far two tensors are apart, relative to how far the expected one varies; NaN counts as infinitely far."""
    if torch.equal(found, expected):
        return 0.0
    expected = expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    apart = float((found.double() - expected).norm() / spread) if bool(spread > 0) else torch.inf
    return torch.inf if apart != apart else apart
