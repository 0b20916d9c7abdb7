"""Slots without tokens: a few K and V fitted so that later queries read what they read of a whole span.

Attention matching (arXiv 2602.16284), head by head. Keys are chosen among the span's own, those that reference queries
attend to most. In the paper a bias on its score lets each of them stand for several, which a cache cannot hold: here
the keys themselves move, by a few Gauss-Newton steps, until the slots together weigh what the span weighs. Values are
then the least-squares solution for the attention output itself, beside everything else that the queries see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.cache.cache import KVCache, Slots
from kvprobe.cache.ledger import NO_TOKEN, OWN
from kvprobe.cache.parts import KV
from kvprobe.editing.queries import HeadQueries, Readings
from kvprobe.editing.splicing import one_row, refuse_quantised
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.rows import Readable
from kvprobe.inference.under_policy import tokens_at
from kvprobe.text.tokens import Tokens

RIDGE = 1e-3
"""How strongly values are drawn to those of the span."""
DAMPING, STEPS = 1.0, 4
"""How strongly keys are drawn to those of the span in each step, and how many there are; chosen on one text."""
MOST_QUERIES = 1024
"""Of a head; of more, so many are used, evenly spread."""


@checked_arguments
def match_attention(
    model: Model,
    cache: KVCache,
    *segments: str,
    slots: Slots | None = None,
    keep: AtLeastOne,
    queries: Readable | None = None,
) -> KVCache:
    """The cache with a span replaced by a few fitted slots, from which later queries read nearly what they read of it.

    Fitted slots have no token (`ledger.fitted`) and stand at the last positions of the span. Nothing else changes.
    With as many as the span has, the cache is itself. There is no inverse: keep the cache.

    Args:
        cache: of one row.
        segments, slots: the span, as for `KVCache.mask`.
        keep: how many slots stand for it.
        queries: texts whose queries, read after the cache, are matched, each by itself; by default the span's own
            tokens are read once more, as in the paper.

    Raises:
        UserError: several rows, quantised slots; a span that is hidden or shorter than `keep`; layers that store
            something else than K and V; a cache that is not finite; or no queries.
    """
    span = spanned(cache, segments, slots, keep)
    cache.refuse_nonfinite()
    if queries is None:
        cache.ledger.refuse_fitted("Reading the span once more")
        again = tokens_at(cache.ledger, 0, torch.tensor(span, device=cache.ledger.tokens.device))
        runs = [Tokens.of(again.ids, "queries", int(cache.ledger.following[0]))]
    else:
        runs = model.tokens_after(cache, queries, "queries")
    places = span[len(span) - keep :]
    read = Readings.of(model, cache, runs)
    layers: list[Mapping[str, Tensor]] = []
    for number, layer in enumerate(cache.layers):
        heads = [fit_head(asked, keep) for asked in read.heads(number, span, places)] if layer else []
        layers.append(
            {part: torch.stack(tensors)[None] for part, tensors in zip(KV, zip(*heads, strict=True), strict=False)}
        )
    edited = with_fitted(cache, layers, span, places)
    edited.refuse_nonfinite()
    return edited


@checked_arguments
def attention_error(model: Model, cache: KVCache, edited: KVCache, text: Readable) -> Float[Tensor, "layers"]:
    """How far the queries of a text read otherwise from an edited cache, in each layer that attends.

    The queries are those of the text when it is read after the cache. The error is the length of the difference of
    attention outputs, relative to that of the outputs, over all queries and heads of a layer.

    Args:
        edited: at the same positions.

    Raises:
        UserError: several rows, other positions, layers that store something else than K and V, an edited cache that
            is not finite, or no text.
    """
    one_row(edited)
    edited.refuse_nonfinite()
    if not torch.equal(cache.ledger.following, edited.ledger.following):
        raise UserError("The edited cache ends at another position, where queries would be others; do not reindex it.")
    return Readings.of(model, cache, model.tokens_after(cache, text)).errors(edited)


def spanned(cache: KVCache, segments: Sequence[str], slots: Slots | None, keep: int) -> list[int]:
    """The slots of a span for which `keep` others are to stand.

    Raises:
        UserError: several rows, quantised slots, slots that are hidden, or fewer than `keep`.
    """
    refuse_quantised(cache)
    one_row(cache)
    chosen = cache.chosen(segments, slots)[0].nonzero()[:, 0].tolist()
    if hidden := [slot for slot in chosen if not bool(cache.ledger.live[:, 0, :, slot].all())]:
        raise UserError(f"Slot {hidden[0]} of the span is hidden, in some layers or heads at least; leave it out.")
    if len(chosen) < keep:
        raise UserError(f"The span has {len(chosen)} slots, for which {keep} were to stand; keep at most as many.")
    return chosen


def with_fitted(
    cache: KVCache, layers: Sequence[Mapping[str, Tensor]], span: Sequence[int], places: Sequence[int]
) -> KVCache:
    """The cache with fitted parts of slots at these places of a span, of which the others are gone.

    Args:
        layers: for each, the parts that were fitted: of the slots at these places, rotated to their positions.
    """
    ledger, at = cache.ledger, list(places)
    changed = {name: getattr(ledger, name).clone() for name in ("tokens", "makers", "delimiters", "origins")}
    for name, entry in {"tokens": NO_TOKEN, "makers": OWN, "delimiters": False}.items():
        changed[name][:, at] = entry
    changed["origins"][:, at] = ledger.positions[:, at]
    fitted: list[Mapping[str, Tensor]] = []
    for layer, parts in zip(cache.layers, layers, strict=True):
        place = torch.tensor(at, device=ledger.tokens.device)
        fitted.append(
            {**layer, **{name: layer[name].index_copy(2, place, parts[name].to(layer[name])) for name in parts}}
        )
    ledger = replace(ledger, **changed)
    stays = torch.ones_like(ledger.padding)
    stays[:, [slot for slot in span if slot not in places]] = False
    return replace(cache, layers=tuple(fitted), ledger=ledger).take(*ledger.order(stays))


def fit_head(asked: HeadQueries, keep: int) -> tuple[Float[Tensor, "kept d_head"], Float[Tensor, "kept d_value"]]:
    """Keys and values of one head that stand for its span."""
    asked = asked.some(MOST_QUERIES)
    shares, left = asked.shares(asked.key, asked.seen)
    target = shares @ asked.value + left * asked.output_of_rest
    strongest = shares.square().mean(0).argsort(descending=True, stable=True)[:keep].sort().values
    key, value = asked.key[strongest], asked.value[strongest]
    wanted, weight = asked.log_mass(asked.key, asked.seen)[0], shares.sum(1)
    for _ in range(STEPS):
        key = key + _towards(asked, key, wanted, weight)
    kept, left = asked.shares(key, asked.seen_kept)
    missing = target - left * asked.output_of_rest - kept @ value
    return key, value + _ridge(kept.T @ kept, kept.T @ missing, RIDGE)


def _towards(
    asked: HeadQueries,
    key: Float[Tensor, "kept d_head"],
    wanted: Float[Tensor, "queries"],
    weight: Float[Tensor, "queries"],
) -> Float[Tensor, "kept d_head"]:
    """A Gauss-Newton step of the keys, after which slots weigh more nearly what they should, in the mean of weighted
    squares of logarithms. It is solved for the queries, of which the step is a sum."""
    mass, within = asked.log_mass(key, asked.seen_kept)
    missing = torch.where(weight > 0, wanted - mass, 0).nan_to_num(0, 0, 0)
    slopes, query = weight[:, None] * within, asked.query * asked.scale
    square = (slopes @ slopes.T) * (query @ query.T)
    return (slopes * _ridge(square, (weight * missing)[:, None], DAMPING)).T @ query


def _ridge(square: Float[Tensor, "d d"], right: Float[Tensor, "d n"], pull: float) -> Float[Tensor, "d n"]:
    """The solution of normal equations, drawn to zero by so much of their mean square."""
    pull *= float(square.diagonal().mean().clamp(min=1e-12))
    return torch.linalg.solve(square + pull * torch.eye(len(square)).to(square), right)
