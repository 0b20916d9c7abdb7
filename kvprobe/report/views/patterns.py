"""Attention views: one reading of a text or two, head by head, with what changed between them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from markupsafe import Markup, escape
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.report.document import AttentionView
from kvprobe.report.views.component import component, figure
from kvprobe.report.views.packing import pack, pack_values, refuse_sizes, unpacked
from kvprobe.text.tokens import token_texts

if TYPE_CHECKING:
    from kvprobe.attention import Patterns
    from kvprobe.text.transcript import Transcript

OFF_FIRST = "mean attention on other slots than the first"
MOVED = "attention moved to other slots, or lost: half the sum of |after − before|, mean over queries"


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
        index: a number beside each head, such as how much damage it passes on; NaN for no number. By default the mean
            attention on other slots than the first. The head in which it is largest is shown first.
        index_name: what that number is.

    Raises:
        UserError: a weight is not between 0 and 1 or is on a later slot, a slot does not exist, sizes do not agree, or
            there is more than a page holds.
    """
    n_layers, n_heads, n_queries, n_slots = weights.shape
    rows = list(range(n_slots - n_queries, n_slots) if queries is None else queries)
    numbers = range(n_layers) if layers is None else layers
    packed = pack(weights, rows)
    if index is None:
        index, index_name = weights[..., 1:].sum(-1).mean(-1), OFF_FIRST
    view = AttentionView(
        caption,
        list(tokens),
        [f"layer {layer}" for layer in numbers],
        [f"head {head}" for head in range(n_heads)],
        rows,
        packed,
        list(masked),
        list(damaged),
        [[None if math.isnan(value) else value for value in layer] for layer in index.tolist()],
        index_name,
    )
    attention_view(view)
    return view


def patterns_view(
    patterns: "Patterns",
    after: "Patterns | None" = None,
    *,
    chat: "Transcript | None" = None,
    caption: str = "",
    damaged: Sequence[int] = (),
    index: Float[np.ndarray | Tensor, "layers heads"] | None = None,
    index_name: str = "",
) -> AttentionView:
    """Patterns as a report or a page shows them, alone or before and `after` an operation on the cache.

    Slots that are masked in every layer and head, or evicted, are crossed out. Layers that do not attend are named.

    Args:
        after: the same queries after slots were masked, evicted or damaged.
        chat: the conversation, whose roles are shown beside the names of its segments.
        damaged: slots that are marked.
        index: a number beside each head; NaN for no number. By default how much attention moved, or without `after` the
            mean attention on other slots than the first. The head in which it is largest is shown first.
        index_name: what that number is.

    Raises:
        UserError: the two are not of the same layers and queries of one text, or see `heads_view`.
    """
    ledger = patterns.cache.ledger
    ids, queries = ledger.tokens[0].tolist(), patterns.queries.tolist()
    roles = {message.segment: message.role for message in chat.messages} if chat else {}
    labels = [f"{name} · {roles[name]}" if name in roles else name for name in ledger.names]
    n_layers, n_heads = patterns.weights.shape[:2]
    refuse_sizes(n_layers, n_heads, queries, ledger.slots, 1 if after is None else 2)
    live = patterns.live
    values = pack_values(patterns.value_norms, live)
    packed_after: list[str] = []
    values_after: list[str] = []
    if after is not None:
        weights, norms, live = _on_slots_before(patterns, after)
        if index is None:
            index, index_name = (weights - patterns.weights).abs().sum(-1).mean(-1) / 2, MOVED
        packed_after, values_after = pack(weights, queries), pack_values(norms, live)
    view = heads_view(
        patterns.weights,
        token_texts(ids, patterns.tokenizer) or list(map(str, ids)),
        f"{caption} {patterns.unseen}".strip(),
        queries=queries,
        layers=patterns.layers,
        masked=(~live.any(0).any(0)).nonzero()[:, 0].tolist(),
        damaged=damaged,
        index=index,
        index_name=index_name,
    )
    # A negative number is padding.
    segments = [labels[number] if number >= 0 else "" for number in ledger.segments[0].tolist()]
    return replace(view, segments=segments, values=values, after=packed_after, values_after=values_after)


def _on_slots_before(
    before: "Patterns", after: "Patterns"
) -> tuple[
    Float[Tensor, "layers heads queries slots"], Float[Tensor, "layers heads slots"], Bool[Tensor, "layers heads slots"]
]:
    """Weights, norms of values and liveness after, on the slots before; nothing on slots that are gone."""
    from kvprobe.attention.alignment import aligned

    places = aligned(before.cache.ledger, after.cache.ledger)
    if places is None or before.layers != after.layers or not torch.equal(places[after.queries], before.queries):
        raise UserError(
            "The two patterns are not of the same layers and queries of one text; read the same text with the same "
            "settings, before and after an operation on the cache."
        )
    weights, norms = torch.zeros_like(before.weights), torch.zeros_like(before.value_norms)
    live = torch.zeros_like(before.live)
    weights[..., places], norms[..., places], live[..., places] = after.weights, after.value_norms, after.live
    return weights, norms, live


def attention_view(data: AttentionView) -> str:
    """The attention of a layer and head that the reader chooses: maps, and the text, coloured by one query's attention.

    Raises:
        UserError: sizes do not agree, weights were not packed for them, a slot does not exist, or there is too much.
    """
    slots, shape = len(data.tokens), (len(data.layers), len(data.heads))
    refuse_sizes(*shape, data.queries, slots, 2 if data.after else 1)
    for name, marked in (("masked", data.masked), ("damaged", data.damaged)):
        if not all(0 <= slot < slots for slot in marked):
            raise UserError(f"A {name} slot is not among the {slots} tokens; count slots from 0.")
    if data.index is not None:
        if len(data.index) != shape[0] or any(len(layer) != shape[1] for layer in data.index):
            raise UserError(f"There are {shape[0]} layers of {shape[1]} heads; give the index as [layers][heads].")
        if not all(value is None or math.isfinite(value) for layer in data.index for value in layer):
            raise UserError("The index of a head is not finite; give None for no number.")
    if data.segments and len(data.segments) != slots:
        raise UserError(f"There are {slots} tokens, but {len(data.segments)} segments; give one for each token.")
    if data.after and not (data.values and data.values_after):
        raise UserError("A view of two patterns needs the norms of both; make it with `views.patterns_view`.")
    readings = {"weights": data.weights, "values": data.values, "after": data.after, "valuesAfter": data.values_after}
    readings = {name: texts for name, texts in readings.items() if texts or name == "weights"}
    levels = {name: _checked(texts, name, data) for name, texts in readings.items()}
    props = {
        "tokens": list(data.tokens),
        "segments": list(data.segments),
        "layers": list(data.layers),
        "heads": list(data.heads),
        "queries": list(data.queries),
        "masked": list(data.masked),
        "damaged": list(data.damaged),
        "index": data.index and [[value and float(f"{value:.3g}") for value in layer] for layer in data.index],
        "indexName": data.index_name,
        "readings": list(readings),
    }
    packed = [text for texts in readings.values() for text in texts]
    return figure(data.caption, component("AttentionView", props, _words(data, levels["weights"]), packed))


def _checked(texts: Sequence[str], name: str, data: AttentionView) -> list[UInt8[np.ndarray, "levels"]]:
    """The levels of each layer, if they are of its sizes."""
    if len(texts) != len(data.layers):
        raise UserError(
            f"There are {len(data.layers)} layers, but packed weights for {len(texts)}; pack the weights of each layer."
        )
    of_head = len(data.tokens) if name.startswith("values") else sum(query + 1 for query in data.queries)
    return [unpacked(text, len(data.heads) * of_head) for text in texts]


def _words(data: AttentionView, layers: Sequence[UInt8[np.ndarray, "weights"]]) -> Markup:
    """The text, the three heads with the largest index, and those in which the last query attends most to one slot
    other than the first."""
    written = []
    for slot, token in enumerate(data.tokens):
        shown = Markup("<mark>{}</mark>").format(token) if slot in data.damaged else escape(token)
        written.append(Markup("<s>{}</s>").format(shown) if slot in data.masked else shown)
    last = data.queries[-1]
    ranked, largest = [], []
    for layer, levels, index in zip(data.layers, layers, data.index or [[]] * len(layers), strict=True):
        ranked += [
            (abs(value), f"{layer}, {head}: {value:.2f}")
            for head, value in zip(data.heads, index, strict=False)
            if value
        ]
        rows = levels.reshape(len(data.heads), -1)[:, -(last + 1) :]
        for head, row in zip(data.heads, rows[:, 1:], strict=True):
            if row.size and row.max():
                slot, level = 1 + int(row.argmax()), int(row.max())
                sentence = f"{layer}, {head}: {(level / 255) ** 2:.2f} on slot {slot} {data.tokens[slot]!r}"
                largest.append((level, sentence))
    if ranked:
        written.append(escape(f"\nLargest, {data.index_name}: {_first(ranked)}."))
    if largest:
        asked = f"Slot {last} {data.tokens[last]!r}"
        written.append(escape(f"\n{asked} attends most, except to slot 0, in {_first(largest)}."))
    return Markup("").join(written)


def _first(sentences: Sequence[tuple[int | float, str]]) -> str:
    """The three with the largest numbers."""
    return "; ".join(sentence for _, sentence in sorted(sentences, key=lambda pair: -pair[0])[:3])
