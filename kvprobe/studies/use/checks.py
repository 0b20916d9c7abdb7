"""The manipulation check of an erasure: what probes still read once a concept was erased.

Two probes read each conversation that the eraser was not fitted on: one that was trained on other conversations as they
are (what it reads is what was erased), and one trained anew on erased features, tested on other conversations of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.erasing.subspace import Eraser
from kvprobe.probing.ridge import ridge_probes

INTACT = "intact"
SAME, ANEW = "same probe", "trained anew"
FOLDS = 3


@dataclass(frozen=True)
class Samples:
    """What probes read, centred in each conversation, so that they are paired probes.

    Attributes:
        conversations: the number of each sample's.
    """

    features: Float[Tensor, "probes samples width"]
    labels: Int[Tensor, "targets samples"]
    conversations: Int[Tensor, "samples"]

    @property
    def size(self) -> Float[Tensor, "probes"]:
        """Against which a probe tells what varies from round-off."""
        return self.features.square().mean((1, 2)).sqrt()


def still_read(
    tested: Samples, trained: Samples, erasers: Mapping[str, Eraser], classes: int
) -> Iterator[tuple[str, str, Float[Tensor, "conversations probes"]]]:
    """The state of the features (`intact`, or the name of an eraser), the probe (`same probe`, `trained anew`), and its
    accuracy in each tested conversation, mean over targets.

    Args:
        trained: of other conversations, on which the erasers were fitted.
    """
    homes = tested.conversations
    # The other conversations train: they are every fold but the first.
    folds = torch.cat([torch.zeros_like(homes), 1 + trained.conversations % (FOLDS - 1)])
    labels = torch.cat([tested.labels, trained.labels], 1)
    states = {name: tested.features - eraser.inside(tested.features) for name, eraser in erasers.items()}
    for state, seen in {INTACT: tested.features, **states}.items():
        anew = ridge_probes(seen, tested.labels, homes % FOLDS, classes, size=tested.size)
        both = torch.cat([seen, trained.features], 1)
        same = ridge_probes(both, labels, folds, classes, size=trained.size)
        for probe, result in ((ANEW, anew), (SAME, same)):
            hits = result.predicted[:, :, : len(homes)].eq(tested.labels).float().mean(1)
            yield state, probe, torch.stack([hits[:, homes == home].mean(1) for home in homes.unique()])
