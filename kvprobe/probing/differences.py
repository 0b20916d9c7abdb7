"""What hidden text changed: features less those of the same slots computed again without it.

Anyone who has the visible text can compute the restart, so such a probe needs nothing of a conversation that a stranger would not
have (unlike the paired split, which needs other secrets of the very conversation). It takes away all that the conversation itself
puts into a slot. Its restart floor is what it says of no difference at all, the same in every conversation.
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
    """Features less their restart; what is no larger than round-off, relative to the size of the features, is zero, since
    standardising would make it as loud as all else."""
    changed = features - restart
    size = features.square().mean(-1, keepdim=True).sqrt()
    return torch.where(changed.abs() > VARIANCE_FLOOR * size, changed, 0.0)


def nothing(features: Features) -> Features:
    """The restart floor of features that are differences: no difference at all, at one site."""
    return replace(
        features,
        tensors={"v": torch.zeros(1, 1, 1)},
        sites={"v": (Site(0, None, "mean"),)},
        rows=np.zeros(len(features.contexts), dtype=np.int64),
    )


def less_restart(features: Features, restart: Features) -> Features:
    """Features of the same samples and sites less those of their restart.

    Raises:
        UserError: the two have other sites or samples.
    """
    if features.sites != restart.sites or not torch.equal(features.labels, restart.labels):
        raise UserError(
            "Features and restart are of other sites or samples; read both from the same design and segment."
        )
    own, other = torch.from_numpy(features.rows), torch.from_numpy(restart.rows)
    changed = {
        family: difference(tensor[own], restart.tensors[family][other]) for family, tensor in features.tensors.items()
    }
    return replace(features, tensors=changed, rows=np.arange(len(features.contexts)))
