"""Attention views: weights packed into a page layer by layer, which the browser unpacks when their layer is chosen.

A weight w is one byte, round(255 √w), so that a small weight keeps its size: what is shown is off by at most 0.004, and by at
most √w / 255 + 1/260,000; below 1/260,100 it is nothing. A query's row ends at its own slot. Layers are deflated, in base 64.
"""

import base64
import binascii
import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup, escape
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.report.document import AttentionView
from kvprobe.report.views.component import component, figure
from kvprobe.report.views.grids import MOST_IN_A_LINE

if TYPE_CHECKING:
    from kvprobe.attention import Patterns

MOST_WEIGHTS = 9_000_000
"""On a page: 30 layers of 9 heads and 256 tokens, which take up to 12 MB and of trained models some 6."""


def heads_view(
    weights: Float[Tensor, "layers heads queries slots"],
    tokens: Sequence[str],
    caption: str = "",
    *,
    queries: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    masked: Sequence[int] = (),
    damaged: Sequence[int] = (),
    index: Float[np.ndarray | Tensor, "layers heads"] | None = None,
    index_name: str = "",
) -> AttentionView:
    """Attention weights as a report or a page shows them.

    Args:
        tokens: the text of every slot.
        queries: the slots that the rows of `weights` are of; the last ones by default.
        layers: their numbers; 0, 1, … by default.
        masked, damaged: slots that are struck through, and slots that are marked.
        index: a number beside each head, such as how much of a damage it passes on; NaN where there is none.
        index_name: what that number is.

    Raises:
        UserError: a weight that is no share of attention or lies on a later slot, a slot that there is not, sizes that do not
            agree, or more than a page holds.
    """
    n_layers, n_heads, n_queries, n_slots = weights.shape
    rows = range(n_slots - n_queries, n_slots) if queries is None else queries
    numbers = range(n_layers) if layers is None else layers
    beside = None if index is None else index.tolist()
    view = AttentionView(
        caption,
        list(tokens),
        [f"layer {layer}" for layer in numbers],
        [f"head {head}" for head in range(n_heads)],
        list(rows),
        pack(weights, list(rows)),
        list(masked),
        list(damaged),
        beside and [[None if math.isnan(value) else value for value in layer] for layer in beside],
        index_name,
    )
    attention_view(view)
    return view


def patterns_view(patterns: "Patterns", tokenizer: Any, caption: str = "", **settings: Any) -> AttentionView:
    """Patterns as a report or a page shows them, with slots struck through that no layer and head may see any more.

    Args:
        settings: `damaged`, `index` and `index_name` of `heads_view`.
    """
    ledger = patterns.cache.ledger
    tokens = [tokenizer.decode([token]) for token in ledger.tokens[0].tolist()]
    masked = (~ledger.kept[0]).nonzero()[:, 0].tolist()
    queries, layers = patterns.queries.tolist(), patterns.layers
    return heads_view(patterns.weights, tokens, caption, queries=queries, layers=layers, masked=masked, **settings)


def pack(weights: Float[Tensor, "layers heads queries slots"], queries: Sequence[int]) -> list[str]:
    """Attention weights as `AttentionView` holds them.

    Raises:
        UserError: a row is not of a slot that there is, or a weight is not from 0 to 1 or lies after its query.
    """
    n_layers, n_heads, n_queries, n_slots = weights.shape
    refuse_sizes(n_layers, n_heads, queries, n_slots)
    if len(queries) != n_queries:
        raise UserError(f"There are {n_queries} rows of weights but {len(queries)} queries; name the slot of each row.")
    values = weights.detach().float().cpu().numpy()
    if not ((values >= 0) & (values <= 1 + 1e-4)).all():
        raise UserError("A weight is not from 0 to 1; give attention after its softmax.")
    seen = np.arange(n_slots) <= np.array(queries)[:, None]
    if (values * ~seen).any():
        raise UserError("A weight lies on a slot after its query; give `queries` as the slots that the rows are of.")
    return [base64.b64encode(zlib.compress(_levels(layer[:, seen]).tobytes())).decode() for layer in values]


def attention_view(data: AttentionView) -> str:
    """Layer and head to choose, the head's pattern by CircuitsVis' `AttentionPattern` (of chosen queries alone, as a map), and
    the text coloured by what the token under the mouse or the arrow keys attends to.

    Raises:
        UserError: sizes that do not agree, weights that were not packed for them, a slot that there is not, or too much.
    """
    slots = len(data.tokens)
    refuse_sizes(len(data.layers), len(data.heads), data.queries, slots)
    for name, marked in (("masked", data.masked), ("damaged", data.damaged)):
        if not all(0 <= slot < slots for slot in marked):
            raise UserError(f"A {name} slot is not among the {slots} tokens; count them from 0.")
    shape = (len(data.layers), len(data.heads))
    if data.index is not None:
        if len(data.index) != shape[0] or any(len(layer) != shape[1] for layer in data.index):
            raise UserError(f"There are {shape[0]} layers of {shape[1]} heads; give the index as [layers][heads].")
        if not all(value is None or math.isfinite(value) for layer in data.index for value in layer):
            raise UserError("The index of a head is not finite; give None where there is none.")
    if len(data.weights) != shape[0]:
        raise UserError(
            f"There are {shape[0]} layers, but packed weights of {len(data.weights)}; pack those of each layer."
        )
    layers = [_unpacked(layer, shape[1] * sum(query + 1 for query in data.queries)) for layer in data.weights]
    props = {
        "tokens": list(data.tokens),
        "layers": list(data.layers),
        "heads": list(data.heads),
        "queries": list(data.queries),
        "masked": list(data.masked),
        "damaged": list(data.damaged),
        "index": data.index,
        "indexName": data.index_name,
    }
    return figure(data.caption, component("AttentionView", props, _words(data, layers), data.weights))


def refuse_sizes(layers: int, heads: int, queries: Sequence[int], slots: int) -> None:
    """Refuse sizes that no page can show, before anything of them is computed.

    Raises:
        UserError: none of something, queries that are not slots in order, or more than a page holds.
    """
    if not layers * heads * len(queries) * slots:
        raise UserError(
            f"There are {layers} layers, {heads} heads, {len(queries)} queries and {slots} tokens; give at least one of each."
        )
    if list(queries) != sorted(set(queries)) or not 0 <= queries[0] <= queries[-1] < slots:
        raise UserError(
            f"The queries are not slots of the {slots} tokens in order; give each slot once, counted from 0."
        )
    count = layers * heads * sum(query + 1 for query in queries)
    if slots > MOST_IN_A_LINE or count > MOST_WEIGHTS:
        raise UserError(
            f"There are {slots:,} tokens and {count:,} weights; a page holds at most {MOST_IN_A_LINE:,} tokens and "
            f"{MOST_WEIGHTS:,} weights, so give fewer layers or queries."
        )


def _levels(weights: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    return np.rint(255 * np.sqrt(weights.clip(0, 1))).astype(np.uint8)


def _unpacked(packed: str, expected: int) -> UInt8[np.ndarray, "weights"]:
    """A layer's levels; of text that is not theirs, no more than they take is ever unpacked."""
    unpack = zlib.decompressobj()
    try:
        levels = unpack.decompress(base64.b64decode(packed, validate=True), expected + 1)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise UserError(
            "The weights of a layer are not packed weights; pack them with `views.attention.pack`."
        ) from error
    if len(levels) != expected or not unpack.eof:
        raise UserError(
            f"The packed weights of a layer are not {expected:,}; pack them for the view's heads and queries."
        )
    return np.frombuffer(levels, np.uint8)


def _words(data: AttentionView, layers: Sequence[UInt8[np.ndarray, "weights"]]) -> Markup:
    """The text, and the three heads that pay most to one slot other than the first, from the last query."""
    written = []
    for slot, token in enumerate(data.tokens):
        shown = Markup("<mark>{}</mark>").format(token) if slot in data.damaged else escape(token)
        written.append(Markup("<s>{}</s>").format(shown) if slot in data.masked else shown)
    last = data.queries[-1]
    found = []
    for layer, levels in zip(data.layers, layers, strict=True):
        rows = levels.reshape(len(data.heads), -1)[:, -(last + 1) :]
        for head, row in zip(data.heads, rows[:, 1:], strict=True):
            if row.size and row.max():
                slot = 1 + int(row.argmax())
                found.append(
                    (
                        int(row.max()),
                        f"{layer}, {head}: {(row.max() / 255) ** 2:.2f} on slot {slot} {data.tokens[slot]!r}",
                    )
                )
    most = "; ".join(text for _, text in sorted(found, key=lambda each: -each[0])[:3])
    told = f"\nSlot {last} {data.tokens[last]!r} attends most, slot 0 aside, in {most}." if most else ""
    return Markup("").join([*written, escape(told)])
