"""What hidden text changed: features less those of the same slots computed again without it.

Anyone who has the visible text can compute the restart, so such a probe needs no other knowledge of the conversation
(unlike the paired split, which needs other secrets in the same conversation). Subtracting the restart removes all that
the conversation itself puts into a slot. The restart floor is the probe's reading of a zero difference, which is the
same in every conversation.
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.features import Features, Site
from kvprobe.probing.ridge import VARIANCE_FLOOR


def difference(features: Float[Tensor, "*rows dim"], restart: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Features less their restart; differences within round-off, relative to the size of the features, are set to zero,
    since standardising would amplify them."""
    changed = features - restart
    size = features.square().mean(-1, keepdim=True).sqrt()
    return torch.where(changed.abs() > VARIANCE_FLOOR * size, changed, 0.0)


def nothing(features: Features) -> Features:
    """The restart floor of features that are differences: zeros, at one site."""
    return replace(
        features,
        tensors={"v": torch.zeros(1, 1, 1)},
        sites={"v": (Site(0, None, "mean"),)},
        rows=np.zeros(len(features.contexts), dtype=np.int64),
    )


def less_restart(features: Features, restart: Features) -> Features:
    """Features of the same samples and sites less those of their restart.

    Raises:
        UserError: the two have different sites or samples.
    """
    if features.sites != restart.sites or not torch.equal(features.labels, restart.labels):
        raise UserError(
            "Features and restart have different sites or samples; read both from the same design and segment."
        )
    rows, restart_rows = torch.from_numpy(features.rows), torch.from_numpy(restart.rows)
    changed = {
        family: difference(tensor[rows], restart.tensors[family][restart_rows])
        for family, tensor in features.tensors.items()
    }
    return replace(features, tensors=changed, rows=np.arange(len(features.contexts)))
