"""What a model answers about a code while cells of its cache hold something else."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.outcomes import divergence, use_measurements
from kvprobe.models.lanes import Lanes
from kvprobe.patching.grid import Cell
from kvprobe.patching.reader import Reader
from kvprobe.text.tokens import Tokens


def code_answers(
    lanes: Lanes,
    base: KVCache,
    donor: KVCache,
    contents: Mapping[str, KVCache],
    cells: Sequence[Cell],
    suffix: Tokens,
    codes: Int[Tensor, "codes code_tokens"],
) -> pd.DataFrame:
    """Every cell is a row of one pass over the suffix; see `kvprobe.patching.reader`.

    Args:
        base, donor: as the suffix sees them, of one row; the donor was read with another code.
        contents: what cells hold, by `Cell.content`; each on the base's slots.
        suffix: ends with all of the code's tokens but the last.
        codes: token ids of the base's code, of the donor's, and of others that the base's is held against.

    Returns:
        One row per cell, with its labels and `part`: `margin` of the base's code over the others and `intact_margin`,
        in nats over all its tokens; `kl` from the unedited cache's distribution of the first token; `right`, the share
        of tokens that are likeliest, the true ones before them given, and `said`, whether all are, so that the reply in
        greedy decoding holds the code; and `difference`, the logit of the base's first token less that of the donor's,
        with `intact_difference` and `donor_difference`.
    """
    kept = codes.shape[1]
    order = sorted(cells, key=lambda cell: cell.layers[0])
    clean, *patched = Reader(lanes, base, contents, suffix).passes(order, kept)
    logits = torch.cat([clean, Reader(lanes, donor, {}, suffix).logits([], kept), *patched])
    said = use_measurements([logits], codes, [0] * len(logits))
    margin, right = said["margin"][:, 0].sum(1), said["correct"][:, 0]
    kl, _ = divergence(clean[:, 0].expand(len(logits), -1), logits[:, 0])
    difference = logits[:, 0, codes[0, 0]].float() - logits[:, 0, codes[1, 0]].float()
    return pd.DataFrame(
        {
            **cell.labels,
            "part": cell.part,
            "margin": float(margin[row]),
            "intact_margin": float(margin[0]),
            "kl": float(kl[row]),
            "right": float(right[row].float().mean()),
            "said": bool(right[row].all()),
            "intact_said": bool(right[0].all()),
            "difference": float(difference[row]),
            "intact_difference": float(difference[0]),
            "donor_difference": float(difference[1]),
        }
        for row, cell in enumerate(order, start=2)
    )
