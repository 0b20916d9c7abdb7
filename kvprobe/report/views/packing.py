"""Attention weights as text in a page, layer by layer; the browser unpacks a layer when it is chosen.

A weight w is stored in one byte as round(255 √w), so that small weights keep their precision. The error of what is
shown is at most 0.004, and at most √w / 255 + 1/260,000; weights below 1/260,100 become zero. A query's row ends at its
own slot. The norms of values are stored in the same way, as shares of the largest in the layer; a byte of 0 is a slot
that the head may not see. Layers are deflated, in base 64.
"""

import base64
import binascii
import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.report.views.grids import MOST_IN_A_LINE

MOST_WEIGHTS = 9_000_000
"""In a view: 30 layers of 9 heads and 256 tokens. They take at most 12 MB, and about 6 MB for trained models."""


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
    return [_packed(_levels(layer[:, visible])) for layer in values]


def pack_values(norms: Float[Tensor, "layers heads slots"], live: Bool[Tensor, "layers heads slots"]) -> list[str]:
    """Norms of values as `AttentionView` holds them: 0 where the head may not see the slot, and more elsewhere."""
    packed = []
    for layer, seen in zip(norms.float().cpu().numpy(), live.cpu().numpy(), strict=True):
        levels = _levels(layer / (layer.max() or 1)).clip(1)
        packed.append(_packed(levels * seen))
    return packed


def unpacked(packed: str, expected: int) -> UInt8[np.ndarray, "levels"]:
    """A layer's levels; of any other text, no more bytes are unpacked than the levels would take.

    Raises:
        UserError: the text is not that many packed levels.
    """
    unpack = zlib.decompressobj()
    try:
        levels = unpack.decompress(base64.b64decode(packed, validate=True), expected + 1)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise UserError("The text of a layer is not packed weights; make the view from patterns again.") from error
    if len(levels) != expected or not unpack.eof:
        raise UserError(
            f"The packed weights of a layer are not {expected:,}; pack one for each head, query and visible slot."
        )
    return np.frombuffer(levels, np.uint8)


def refuse_sizes(layers: int, heads: int, queries: Sequence[int], slots: int, readings: int = 1) -> None:
    """Refuse sizes that no page can show, before anything is computed.

    Args:
        readings: how many patterns of these sizes the view compares.

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
    count = readings * layers * heads * sum(query + 1 for query in queries)
    if slots > MOST_IN_A_LINE or count > MOST_WEIGHTS:
        raise UserError(
            f"There are {slots:,} tokens and {count:,} weights; a page holds at most {MOST_IN_A_LINE:,} tokens and "
            f"{MOST_WEIGHTS:,} weights, so give fewer layers or queries."
        )


def _levels(shares: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    return np.rint(255 * np.sqrt(shares.clip(0, 1))).astype(np.uint8)


def _packed(levels: UInt8[np.ndarray, "..."]) -> str:
    return base64.b64encode(zlib.compress(levels.tobytes())).decode()
