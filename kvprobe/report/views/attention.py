"""Attention views: weights packed into a page layer by layer, which the browser unpacks when their layer is chosen.

A weight w is stored in one byte as round(255 √w), so that small weights keep their precision. The error of what is
shown is at most 0.004, and at most √w / 255 + 1/260,000; weights below 1/260,100 become zero. A query's row ends at its
own slot. Layers are deflated, in base 64.
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
from kvprobe.text.tokens import token_texts

if TYPE_CHECKING:
    from kvprobe.attention import Patterns

MOST_WEIGHTS = 9_000_000
"""On a page: 30 layers of 9 heads and 256 tokens. They take at most 12 MB, and about 6 MB for trained models."""


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
        masked, damaged: slots that are crossed out, and slots that are marked.
        index: a number beside each head, such as how much damage it passes on; NaN for no number.
        index_name: what that number is.

    Raises:
        UserError: a weight is not between 0 and 1 or is on a later slot, a slot does not exist, sizes do not agree, or
            there is more than a page holds.
    """
    n_layers, n_heads, n_queries, n_slots = weights.shape
    rows = range(n_slots - n_queries, n_slots) if queries is None else queries
    numbers = range(n_layers) if layers is None else layers
    values = None if index is None else index.tolist()
    view = AttentionView(
        caption,
        list(tokens),
        [f"layer {layer}" for layer in numbers],
        [f"head {head}" for head in range(n_heads)],
        list(rows),
        pack(weights, list(rows)),
        list(masked),
        list(damaged),
        values and [[None if math.isnan(value) else value for value in layer] for layer in values],
        index_name,
    )
    attention_view(view)
    return view


def patterns_view(
    patterns: "Patterns",
    tokenizer: Any,
    caption: str = "",
    *,
    damaged: Sequence[int] = (),
    index: Float[np.ndarray | Tensor, "layers heads"] | None = None,
    index_name: str = "",
) -> AttentionView:
    """Patterns as a report or a page shows them; slots that are masked in every layer and head are crossed out.

    Args:
        damaged, index, index_name: as `heads_view` takes them.
    """
    ledger = patterns.cache.ledger
    tokens = token_texts(ledger.tokens[0].tolist(), tokenizer)
    masked = (~ledger.live_somewhere[0]).nonzero()[:, 0].tolist()
    queries, layers = patterns.queries.tolist(), patterns.layers
    return heads_view(
        patterns.weights,
        tokens,
        caption,
        queries=queries,
        layers=layers,
        masked=masked,
        damaged=damaged,
        index=index,
        index_name=index_name,
    )


def pack(weights: Float[Tensor, "layers heads queries slots"], queries: Sequence[int]) -> list[str]:
    """Attention weights as `AttentionView` holds them.

    Raises:
        UserError: a row's slot does not exist, or a weight is not between 0 and 1 or is on a slot after its query.
    """
    n_layers, n_heads, n_queries, n_slots = weights.shape
    refuse_sizes(n_layers, n_heads, queries, n_slots)
    if len(queries) != n_queries:
        raise UserError(f"There are {n_queries} rows of weights but {len(queries)} queries; give the slot of each row.")
    values = weights.detach().float().cpu().numpy()
    if not ((values >= 0) & (values <= 1 + 1e-4)).all():
        raise UserError("A weight is not between 0 and 1; give attention after its softmax.")
    visible = np.arange(n_slots) <= np.array(queries)[:, None]
    if (values * ~visible).any():
        raise UserError("A weight is on a slot after its query; give `queries` as the slots of the rows.")
    return [base64.b64encode(zlib.compress(_levels(layer[:, visible]).tobytes())).decode() for layer in values]


def attention_view(data: AttentionView) -> str:
    """The pattern of a layer and head that the reader chooses, and the text, coloured by one token's attention.

    CircuitsVis' `AttentionPattern` draws a pattern of all queries; a pattern of some is drawn as a map. The coloured
    token is the one under the mouse or the arrow keys.

    Raises:
        UserError: sizes do not agree, weights were not packed for them, a slot does not exist, or there is too much.
    """
    slots = len(data.tokens)
    refuse_sizes(len(data.layers), len(data.heads), data.queries, slots)
    for name, marked in (("masked", data.masked), ("damaged", data.damaged)):
        if not all(0 <= slot < slots for slot in marked):
            raise UserError(f"A {name} slot is not among the {slots} tokens; count slots from 0.")
    shape = (len(data.layers), len(data.heads))
    if data.index is not None:
        if len(data.index) != shape[0] or any(len(layer) != shape[1] for layer in data.index):
            raise UserError(f"There are {shape[0]} layers of {shape[1]} heads; give the index as [layers][heads].")
        if not all(value is None or math.isfinite(value) for layer in data.index for value in layer):
            raise UserError("The index of a head is not finite; give None for no number.")
    if len(data.weights) != shape[0]:
        raise UserError(
            f"There are {shape[0]} layers, but packed weights for {len(data.weights)}; pack the weights of each layer."
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
    """Refuse sizes that no page can show, before anything is computed.

    Raises:
        UserError: a size is 0, the queries are not slots in order, or there is more than a page holds.
    """
    if not layers * heads * len(queries) * slots:
        raise UserError(
            f"There are {layers} layers, {heads} heads, {len(queries)} queries and {slots} tokens; "
            "give at least one of each."
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
    """A layer's levels; of any other text, no more bytes are unpacked than the levels would take."""
    unpack = zlib.decompressobj()
    try:
        levels = unpack.decompress(base64.b64decode(packed, validate=True), expected + 1)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise UserError("The text of a layer is not packed weights; pack them with `views.attention.pack`.") from error
    if len(levels) != expected or not unpack.eof:
        raise UserError(
            f"The packed weights of a layer are not {expected:,}; pack one for each head, query and visible slot."
        )
    return np.frombuffer(levels, np.uint8)


def _words(data: AttentionView, layers: Sequence[UInt8[np.ndarray, "weights"]]) -> Markup:
    """The text, and the three heads in which the last query attends most to one slot other than the first."""
    written = []
    for slot, token in enumerate(data.tokens):
        shown = Markup("<mark>{}</mark>").format(token) if slot in data.damaged else escape(token)
        written.append(Markup("<s>{}</s>").format(shown) if slot in data.masked else shown)
    last = data.queries[-1]
    largest = []
    for layer, levels in zip(data.layers, layers, strict=True):
        rows = levels.reshape(len(data.heads), -1)[:, -(last + 1) :]
        for head, row in zip(data.heads, rows[:, 1:], strict=True):
            if row.size and row.max():
                slot, level = 1 + int(row.argmax()), int(row.max())
                sentence = f"{layer}, {head}: {(level / 255) ** 2:.2f} on slot {slot} {data.tokens[slot]!r}"
                largest.append((level, sentence))
    most = "; ".join(sentence for _, sentence in sorted(largest, key=lambda pair: -pair[0])[:3])
    summary = f"\nSlot {last} {data.tokens[last]!r} attends most, except to slot 0, in {most}." if most else ""
    return Markup("").join([*written, escape(summary)])
