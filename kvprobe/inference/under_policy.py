"""Policies at work on a model: reading under a policy, watching attention for it, computing again what it restarts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import Ledger
from kvprobe.checks import require_whole
from kvprobe.errors import UserError
from kvprobe.inference.forward import extend, new_slots
from kvprobe.inference.readable import refuse_unknown_lane, refuse_unreadable
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.policies.attention import Attention, Digest
from kvprobe.policies.policy import Policy, Scene, acting, settle
from kvprobe.policies.prune_tools import PruneToolResults
from kvprobe.text.transcript import Tokens


@dataclass(frozen=True)
class Snapshot:
    """What a cache held at one moment.

    Attributes:
        step: tokens generated so far.
        ledger: which slots, at which positions, live in which layers and heads.
        nbytes: of the K and V tensors held.
        footprint: what the live slots would take; see `KVCache.footprint`.
    """

    step: int
    ledger: Ledger
    nbytes: int
    footprint: int

    @classmethod
    def of(cls, step: int, cache: KVCache) -> "Snapshot":
        return cls(step, cache.ledger, cache.nbytes, cache.footprint)


def lane_for(policy: Policy | None, lane: Lane | Literal["auto"]) -> Lane:
    """The lane to read on: the plain one, unless the policy needs attention scores.

    Raises:
        UserError: the plain lane was asked for by name, and cannot answer.
    """
    refuse_unknown_lane(lane, (*get_args(Lane), "auto"))
    if policy is not None and not isinstance(policy, Policy):
        raise UserError(f"{str(policy)[:40]!r} is no policy; give one of kv.policies.")
    needs = policy is not None and policy.observes is not None
    if needs and lane == "plain":
        raise UserError(
            f"{policy} needs attention scores, and the plain lane's fused attention has none; use lane='hooked' or "
            "'auto'."
        )
    if lane == "auto":
        return "hooked" if needs else "plain"
    return lane


def watch(
    lanes: Lanes,
    past: Scene | None,
    tokens: Sequence[Tokens],
    queries: int = 0,
    logits: int = 1,
) -> tuple[Scene, Float[Tensor, "batch kept vocab"]]:
    """Read tokens on the hooked lane and record what their queries attend to.

    Args:
        past: what was watched so far; a cache that was read unwatched counts as never attended to.
        queries: how many of the last queries to remember one by one.
    """
    refuse_unreadable(lanes, past and past.cache, tokens, "hooked")
    require_whole("Watching", "queries", queries, 0)
    shape = lanes.geometry
    padding = new_slots(tokens, lanes.device).padding
    digests: dict[int, Digest] = {}

    def observe(layer: int, pattern: Tensor) -> None:
        digests[layer] = Digest.of(pattern, shape.n_kv_heads, padding, queries)

    with lanes.hooked.observing_patterns(observe):
        cache, scores = extend(lanes, past and past.cache, tokens, "hooked", logits)
    record = past.attention if past is not None else None
    if record is None:
        slots = 0 if past is None else past.cache.slots
        record = Attention.none(shape.n_layers, len(tokens), shape.n_kv_heads, slots, queries, lanes.device)
    if record.recent.shape[3] != queries:
        raise UserError(
            f"What was watched so far remembers the last {record.recent.shape[3]} queries, but now {queries} are asked "
            f"for; watch on with as many as before."
        )
    record = record.fork(len(tokens))
    record = record.after([digests[layer] for layer in range(shape.n_layers)], padding)
    return Scene(cache, record, past and past.samples), scores


def read(
    lanes: Lanes,
    past: Scene | None,
    tokens: Sequence[Tokens],
    policy: Policy | None = None,
    lane: Lane | Literal["auto"] = "auto",
    logits: int = 1,
) -> tuple[Scene, Float[Tensor, "batch kept vocab"]]:
    """Read tokens, watching attention if the policy needs it. The policy does not act yet."""
    lane = lane_for(policy, lane)
    if policy is not None and policy.observes is not None:
        return watch(lanes, past, tokens, policy.observes, logits)
    cache, scores = extend(lanes, past and past.cache, tokens, lane, logits)
    return Scene(cache, samples=past and past.samples), scores


def apply(
    lanes: Lanes,
    policy: Policy,
    scene: Scene,
    step: int = 0,
    lane: Lane | Literal["auto"] = "auto",
    parts: Iterable[Policy] | None = None,
) -> Scene:
    """Let the parts of a policy act that are due after `step` generated tokens (at a cut: 0, when all are).

    Args:
        parts: or, let these act.

    Raises:
        UserError: see `Policy.act`; or the model's keys cannot be turned, or a cache is to be computed again of which
            layers or heads keep different slots.
    """
    for part in acting(policy, step) if parts is None else parts:
        if part.law == "contiguous" and part.provenance == "retained":
            _ = lanes.rotaries  # refuses learned positions before anything is done
        if isinstance(part, PruneToolResults) and part.placeholder is not None:
            acted = _with_placeholders(lanes, part, scene)
        else:
            acted = part.act(scene)
        if part.provenance == "recomputed":
            acted = _computed_again(lanes, scene.cache.ledger, acted, lane_for(part, lane))
        scene = acted
    return scene


def read_in_chunks(
    lanes: Lanes,
    tokens: Sequence[Tokens],
    policy: Policy,
    chunk: int,
    lane: Lane | Literal["auto"] = "auto",
    samples: tuple[int, ...] | None = None,
) -> tuple[Scene, Float[Tensor, "batch kept vocab"]]:
    """Read tokens `chunk` at a time, the policy acting after each: a stream that never fits into the cache whole. Policies
    that act after the prompt only wait for its end.

    Raises:
        UserError: rows of unequal length, which would not end together.
    """
    require_whole("Reading", "chunk", chunk, 1)
    if len({len(row) for row in tokens}) != 1:
        raise UserError("Reading in chunks needs rows of equal length; read them one by one.")
    scene: Scene | None = None
    for start in range(0, len(tokens[0]), chunk):
        pieces = [row[start : start + chunk] for row in tokens]
        if scene is not None:
            # A policy that closes gaps has moved what comes next.
            following = scene.cache.ledger.following.tolist()
            pieces = [
                piece.shifted(position + row.positions[start] - row[:start].following)
                for piece, row, position in zip(pieces, tokens, following, strict=True)
            ]
        scene, scores = read(lanes, scene, pieces, policy, lane)
        scene = replace(scene, samples=samples)
        if start + chunk >= len(tokens[0]):
            return apply(lanes, policy, scene, lane=lane), scores
        scene = apply(lanes, policy, scene, lane=lane, parts=[part for part in policy.parts if part.every is not None])
    raise UserError("There is nothing to read: give at least one token for each row.")


def _computed_again(lanes: Lanes, before: Ledger, scene: Scene, lane: Lane) -> Scene:
    """The slots of the scene read anew from their tokens, at the positions that they have now."""
    ledger = scene.cache.ledger
    if not ledger.uniform:
        raise UserError(
            "Layers or heads keep different slots, and a cache computed again has all slots in all of them; "
            "use provenance='retained', or a policy that keeps the same slots everywhere."
        )
    rows = []
    for row in range(ledger.batch):
        tokens = tokens_at(ledger, row, ledger.kept[row].nonzero()[:, 0])
        change = _first_change(before, ledger, row)
        rows.append(replace(tokens, recomputed=tuple(old or at >= change for at, old in enumerate(tokens.recomputed))))
    cache, _ = extend(lanes, None, rows, lane)
    # Segments that went keep their names, as in a cache that was masked.
    again = replace(cache.ledger, segments=cache.ledger.numbered(ledger.names), names=ledger.names)
    return Scene(replace(cache, ledger=again), None, scene.samples)


def _first_change(before: Ledger, after: Ledger, row: int) -> int:
    """How many of a row's live slots, from the first on, are those that stood there before, with nothing missing
    between them: not now, and not from an earlier eviction."""
    was, now = (
        torch.stack([ledger.origins[row, ledger.kept[row]], ledger.tokens[row, ledger.kept[row]]])
        for ledger in (before, after)
    )
    shorter = min(was.shape[1], now.shape[1])
    whole = was[0, :shorter] == torch.arange(shorter, device=was.device)
    same = (was[:, :shorter] == now[:, :shorter]).all(0) & whole
    return int(same.long().cumprod(0).sum())


def tokens_at(ledger: Ledger, row: int, index: Int[Tensor, "slots"]) -> Tokens:
    """These slots of a row as tokens to be read again, and what comes next where it was."""
    return Tokens(
        ids=tuple(ledger.tokens[row, index].tolist()),
        positions=tuple(ledger.positions[row, index].tolist()),
        segments=tuple(ledger.names[segment] for segment in ledger.segments[row, index].tolist()),
        parts=(None,) * len(index),
        recomputed=tuple(ledger.recomputed[row, index].tolist()),
        delimiters=tuple(ledger.delimiters[row, index].tolist()),
        end=int(ledger.following[row]),
    )


def _with_placeholders(lanes: Lanes, policy: PruneToolResults, scene: Scene) -> Scene:
    """The scene with the placeholder's tokens, read where they stand, in place of each pruned text."""
    if lanes.tokenizer is None:
        raise UserError("A placeholder is text, and the model has no tokenizer; give one to `load`.")
    assert policy.placeholder is not None
    ids = lanes.tokenizer(policy.placeholder, add_special_tokens=False)["input_ids"]
    names = [
        name
        for name in policy.pruned(scene.cache.ledger.names)
        if bool(
            (scene.cache.ledger.in_segments([name]) & ~scene.cache.ledger.delimiters & scene.cache.ledger.kept).any()
        )
    ]
    for name in names:
        ledger = scene.cache.ledger
        text = ledger.in_segments([name]) & ~ledger.delimiters & ledger.kept
        if not bool(text.any(1).all()):
            raise UserError(f"Only some rows hold {name!r}; prune rows of different conversations one by one.")
        if policy.law == "gapped" and len(ids) > int(text.sum(1).min()):
            raise UserError(
                f"The placeholder has {len(ids)} tokens and does not fit the positions of {name!r}; "
                f"shorten it, or use law='contiguous'."
            )
        scene = _replaced(lanes, scene, text, ids, name)
    return settle(scene, scene.live, policy.law)


def _replaced(lanes: Lanes, scene: Scene, text: Bool[Tensor, "batch slots"], ids: Sequence[int], name: str) -> Scene:
    """The cache with `ids`, seen from what stands before, in place of the slots in `text`."""
    cache = scene.cache
    first = text.int().argmax(1)
    index = torch.arange(cache.slots, device=text.device)
    starts = cache.ledger.positions.gather(1, first[:, None])[:, 0].tolist()
    before = cache.mask(slots=index >= first[:, None])
    longer, _ = extend(lanes, before, [Tokens.of(ids, name, start) for start in starts])
    # Back to what was live, less the text; then the new slots move to where the text began.
    dead = torch.nn.functional.pad(text, (0, len(ids)))
    was = torch.nn.functional.pad(cache.ledger.live, (0, len(ids)), value=True)
    ledger = replace(longer.ledger, live=was & ~dead[None, :, None, :], following=cache.ledger.following)
    key = torch.cat([index.expand(cache.batch, -1) * 2, (first * 2 - 1)[:, None].expand(-1, len(ids))], 1)
    order = key.argsort(dim=1, stable=True)
    moved = replace(longer, ledger=ledger).take(order, torch.zeros_like(order, dtype=torch.bool))
    return Scene(moved, None, scene.samples)
