"""Policies at work on a model: reading while attention is observed, letting a policy act, recomputing slots."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.ledger import COLUMNS, PADDING, Ledger
from kvprobe.cache.parts import heads_apart
from kvprobe.cache.recurrence import timeless
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.errors import UserError, warn
from kvprobe.inference.forward import extend, new_slots, one_row_each, prove_reading
from kvprobe.inference.readable import readable_runs, refuse_unreadable
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.policies.attention import Attention, Digest
from kvprobe.policies.policy import Policy, Scene, acting, settle
from kvprobe.policies.prune_tools import PruneToolResults
from kvprobe.text.tokens import Tokens

CHUNK = 256
"""Queries whose attention is computed at a time."""


@dataclass(frozen=True, repr=False)
class Snapshot(Brief):
    """What a cache held at one step.

    Attributes:
        step: tokens generated so far.
        ledger: which slots, at which positions, live in which layers and heads.
        nbytes: bytes of its K and V tensors.
        footprint: bytes that its live slots need; see `KVCache.footprint`.
        policies: the policy of each row, with shares of its prompt as slots.
    """

    step: int
    ledger: Ledger
    nbytes: int
    footprint: int
    policies: tuple[str, ...]

    @classmethod
    def of(cls, step: int, scene: Scene, policy: Policy) -> "Snapshot":
        policies = tuple(str(policy.at(prompt)) for prompt in scene.sized.prompts or ())
        return cls(step, scene.cache.ledger, scene.cache.nbytes, scene.cache.footprint, policies)


def sample_numbers(samples: Sequence[int] | None) -> tuple[int, ...] | None:
    """The rows' sample numbers, for `Scene.samples`.

    Raises:
        UserError: something else than whole numbers from 0 on.
    """
    if samples is not None and min(samples, default=-1) < 0:
        raise UserError(f"samples is {str(samples)[:40]}; give a list of whole numbers from 0 on, one per row.")
    return None if samples is None else tuple(samples)


def lane_for(lanes: Lanes, lane: Lane | Literal["auto"], *, watched: bool = False) -> Lane:
    """The lane to read on: the plain one, unless attention is watched which only the hooked one shows."""
    if lane != "auto":
        return lane
    return "hooked" if watched and not lanes.shows_attention else "plain"


def watch(
    lanes: Lanes,
    past: Scene | None,
    tokens: Sequence[Tokens],
    queries: int = 0,
    logits: int = 1,
    lane: Lane | Literal["auto"] = "auto",
) -> tuple[Scene, Float[Tensor, "batch last vocab"]]:
    """Read tokens and record what their queries attend to.

    On the plain lane fused attention runs unchanged, and its weights are computed beside it, in fp32.

    Args:
        past: the cache and the record so far; without a record, its slots count as never attended to.
        queries: how many of the last queries to record one by one.
        lane: `auto` is plain, unless only the hooked one shows this model's attention.
    """
    lane = lane_for(lanes, lane, watched=True)
    refuse_unreadable(lanes, past and past.cache, tokens, "hooked")  # scores take memory on either lane
    shape, kv_heads = lanes.geometry, heads_apart(lanes.geometry.layers)
    before = one_row_each(lanes, past and past.cache, len(tokens))
    new = new_slots(tokens, lanes.device)
    ledger = new if before is None else before.ledger.read_on(new)
    digests: dict[int, list[Digest]] = {source: [] for source in shape.sources}

    def observe(layer: int, pattern: Tensor) -> None:
        digests[shape.reads[layer]].append(Digest.of(pattern, kv_heads, new.padding, queries))

    def compute(inputs: Attending) -> None:
        by_group: list[Tensor] = []
        for start in range(0, new.slots, CHUNK):
            piece = slice(start, start + CHUNK)
            weights = inputs.at(piece).weights(seen[inputs.layer][:, :, piece])
            by_group.append(torch.unflatten(weights, 1, (kv_heads, -1)).mean(2))
        observe(inputs.layer, torch.cat(by_group, 2))

    prove_reading(lanes, before, tokens, lane)
    if lane == "plain":
        by_source = visible_by_layer(ledger, new.slots, shape.reaches)
        seen = {layer: by_source[source] for layer, source in shape.reads.items()}
        observing = lanes.observing_attention(compute)
    else:
        observing = lanes.hooked.observing_patterns(observe)
    with observing:
        cache, scores = extend(lanes, before, tokens, lane, logits, chunk=new.slots)
    record = past.attention if past is not None else None
    if record is None:
        slots = 0 if past is None else past.cache.slots
        record = Attention.none(len(digests), len(tokens), kv_heads, slots, queries, lanes.device)
    if record.recent.shape[3] != queries:
        raise UserError(
            f"The record so far holds the last {record.recent.shape[3]} queries, but queries is {queries}; give the "
            "same number as before."
        )
    record = record.fork(len(tokens))
    record = record.after([Digest.mean(readers) for readers in digests.values()], new.padding)
    return scene_after(past, cache, record), scores


def scene_after(past: Scene | None, cache: KVCache, record: Attention | None) -> Scene:
    """The scene after more was read; what is known of a single row before holds for all that continue it."""
    if past is None:
        return Scene(cache, record)
    known = {name: getattr(past, name) for name in ("samples", "prompts")}
    for_each = {name: rows and rows * (cache.batch // len(rows)) for name, rows in known.items()}
    return replace(past, cache=cache, attention=record, **for_each)


def read_for(
    lanes: Lanes,
    observes: int | None,
    past: Scene | None,
    tokens: Sequence[Tokens],
    lane: Lane | Literal["auto"] = "auto",
) -> tuple[Scene, Float[Tensor, "batch 1 vocab"]]:
    """Read tokens, and record attention if a policy needs it: of so many last queries one by one; see `Policy`."""
    if observes is not None:
        return watch(lanes, past, tokens, observes, lane=lane)
    cache, scores = extend(lanes, past and past.cache, tokens, lane_for(lanes, lane))
    return scene_after(past, cache, None), scores


def apply(
    lanes: Lanes,
    policy: Policy,
    scene: Scene,
    step: int = 0,
    lane: Lane | Literal["auto"] = "auto",
    parts: Iterable[Policy] | None = None,
) -> Scene:
    """Let the parts of a policy act that are due after `step` generated tokens (all are at 0, a cut).

    Args:
        parts: or let these act.

    Raises:
        UserError: see `Policy.act`; the model's keys cannot be rotated; or a cache whose layers or heads keep different
            slots is to be recomputed.
    """

    def read(rows: Sequence[Tokens]) -> KVCache:
        return extend(lanes, None, rows, lane_for(lanes, lane))[0]

    scene = scene.sized
    for part in acting(policy, step) if parts is None else parts:
        if part.mode == "contiguous" and part.provenance == "retained":
            _ = lanes.rotaries  # refuses learned positions before anything is done
        if isinstance(part, PruneToolResults) and part.placeholder is not None:
            acted = _with_placeholders(lanes, part, scene)
        else:
            acted = part.act(scene)
        if part.provenance == "recomputed":
            acted = recomputed(read, scene.cache.ledger, acted)
        if part.every is None and _same(scene, acted):
            warn(
                f"{part} acts once and has changed nothing: what it drops is not live in this cache, or all of it fits "
                "into the budget."
            )
        scene = acted
    return scene


def _same(before: Scene, after: Scene) -> bool:
    """Whether a policy left everything as it was."""
    pairs = [
        (getattr(before.cache.ledger, name), getattr(after.cache.ledger, name)) for name in (*COLUMNS, "following")
    ]
    tensors = zip(before.cache.tensors, after.cache.tensors, strict=True)
    return (
        all(torch.equal(old, new) for old, new in pairs)
        and torch.equal(before.live, after.live)
        and all(old is new for old, new in tensors)
    )


def read_in_chunks(
    lanes: Lanes,
    tokens: Sequence[Tokens],
    policy: Policy,
    chunk: int,
    lane: Lane | Literal["auto"] = "auto",
    samples: tuple[int, ...] | None = None,
) -> tuple[Scene, Float[Tensor, "batch last vocab"]]:
    """Read tokens `chunk` at a time, as a stream that is longer than the cache; the policy acts after each chunk.

    Policies that act only after the prompt wait for its end.

    Raises:
        UserError: rows of unequal length, which do not end together.
    """
    readable_runs(lanes, tokens)
    if len({len(row) for row in tokens}) != 1:
        raise UserError("Reading in chunks needs rows of equal length; read them one by one.")
    scene: Scene | None = None
    for start in range(0, len(tokens[0]), chunk):
        pieces = [row[start : start + chunk] for row in tokens]
        if scene is not None:
            # After a policy closed gaps, the next tokens stand earlier.
            following = entries(scene.cache.ledger.following, int)
            pieces = [
                piece.shifted(position + row.positions[start] - row[:start].following)
                for piece, row, position in zip(pieces, tokens, following, strict=True)
            ]
        scene, scores = read_for(lanes, policy.observes, scene, pieces, lane)
        scene = replace(scene, samples=samples, prompts=tuple(map(len, tokens)))
        if start + chunk >= len(tokens[0]):
            return apply(lanes, policy, scene, lane=lane), scores
        scene = apply(lanes, policy, scene, lane=lane, parts=[part for part in policy.parts if part.every is not None])
    raise AssertionError("every row has a token")


def recomputed(read: Callable[[Sequence[Tokens]], KVCache], before: Ledger, scene: Scene) -> Scene:
    """The slots of the scene, read again from their tokens at their present positions.

    Args:
        before: the ledger before the policy acted.

    Raises:
        UserError: layers or heads keep different slots.
    """
    ledger = scene.cache.ledger
    if not ledger.uniform:
        raise UserError(
            "Layers or heads keep different slots, and a recomputed cache has all slots in all of them; "
            "use provenance='retained', or a policy that keeps the same slots everywhere."
        )
    rows: list[Tokens] = []
    for row in range(ledger.batch):
        tokens = tokens_at(ledger, row, ledger.live_somewhere[row].nonzero()[:, 0])
        change = _first_change(before, ledger, row)
        rows.append(replace(tokens, recomputed=tuple(old or at >= change for at, old in enumerate(tokens.recomputed))))
    cache = read(rows)
    # The names of removed segments stay known, as in a masked cache.
    renamed = replace(cache.ledger, segments=cache.ledger.numbered(ledger.names), names=ledger.names)
    return replace(scene, cache=replace(cache, ledger=renamed), attention=None)


def _first_change(before: Ledger, after: Ledger, row: int) -> int:
    """How many of a row's first live slots are unchanged, with none missing between them, now or before."""
    old, new = (
        torch.stack([ledger.origins[row, ledger.live_somewhere[row]], ledger.tokens[row, ledger.live_somewhere[row]]])
        for ledger in (before, after)
    )
    shorter = min(old.shape[1], new.shape[1])
    without_gaps = old[0, :shorter] == torch.arange(shorter, device=old.device)
    same = (old[:, :shorter] == new[:, :shorter]).all(0) & without_gaps
    return int(same.long().cumprod(0).sum())


def tokens_at(ledger: Ledger, row: int, index: Int[Tensor, "slots"]) -> Tokens:
    """These slots of a row as tokens to be read again at their positions."""
    return Tokens(
        ids=entries(ledger.tokens[row, index], int),
        positions=entries(ledger.positions[row, index], int),
        segments=tuple(ledger.names[segment] for segment in entries(ledger.segments[row, index], int)),
        parts=(None,) * len(index),
        recomputed=entries(ledger.recomputed[row, index], bool),
        delimiters=entries(ledger.delimiters[row, index], bool),
        end=int(ledger.following[row]),
    )


def _with_placeholders(lanes: Lanes, policy: PruneToolResults, scene: Scene) -> Scene:
    """The scene with the placeholder's tokens in place of each pruned text."""
    if lanes.tokenizer is None:
        raise UserError("A placeholder is text, but the model has no tokenizer; give one to `load`.")
    assert policy.placeholder is not None
    ids = lanes.tokenizer(policy.placeholder, add_special_tokens=False)["input_ids"]
    names = policy.pruned(scene.cache.ledger, 0)
    for row in range(1, scene.cache.batch):
        if policy.pruned(scene.cache.ledger, row) != names:
            raise UserError("Rows hold different tool results; prune rows of different conversations one by one.")
    for name in names:
        ledger = scene.cache.ledger
        text = ledger.in_segments([name]) & ~ledger.delimiters & ledger.live_somewhere
        if policy.mode == "gapped" and len(ids) > int(text.sum(1).min()):
            raise UserError(
                f"The placeholder has {len(ids)} tokens and does not fit the positions of {name!r}; "
                f"shorten it, or use mode='contiguous'."
            )
        scene = _replaced(lanes, scene, text, ids, name)
    return settle(scene, scene.live, policy.mode)


def _replaced(lanes: Lanes, scene: Scene, text: Bool[Tensor, "batch slots"], ids: Sequence[int], name: str) -> Scene:
    """The cache with `ids`, read after the slots before them, in place of the slots in `text`."""
    first = text.int().argmax(1)
    index = torch.arange(text.shape[1], device=text.device)
    starts = scene.cache.ledger.positions.gather(1, first[:, None])
    # States do not decay over text whose place is taken.
    taken = text & (scene.cache.ledger.positions < starts + len(ids))
    cache = replace(scene.cache, layers=tuple(timeless(layer, taken) for layer in scene.cache.layers))
    # Nor do they decay over padding, and the new slots come before what is later.
    later = index >= first[:, None]
    segments, live = cache.ledger.segments.masked_fill(later, PADDING), cache.ledger.live & ~later[None, :, None, :]
    before = replace(cache, ledger=replace(cache.ledger, segments=segments, live=live))
    longer, _ = extend(lanes, before, [Tokens.of(ids, name, start) for start in entries(starts[:, 0], int)])
    # All slots that were live, except the text, are live again; then the new slots move to where the text began.
    removed = torch.nn.functional.pad(text, (0, len(ids)))
    live = torch.nn.functional.pad(cache.ledger.live, (0, len(ids)), value=True) & ~removed[None, :, None, :]
    segments = torch.cat([cache.ledger.segments, longer.ledger.segments[:, cache.slots :]], 1)
    ledger = replace(longer.ledger, segments=segments, live=live, following=cache.ledger.following)
    key = torch.cat([index.expand(cache.batch, -1) * 2, (first * 2 - 1)[:, None].expand(-1, len(ids))], 1)
    order = key.argsort(dim=1, stable=True)
    moved = replace(longer, ledger=ledger).take(order, torch.zeros_like(order, dtype=torch.bool))
    return replace(scene, cache=moved, attention=None)
