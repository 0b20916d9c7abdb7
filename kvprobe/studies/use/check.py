"""The manipulation check: what probes still read of a place once the code was erased from it.

Two probes read each half's conversations, whose erasers come from the other half: the one that was trained on the other
half as it is (what it reads is what was erased), and one trained anew on the erased features of conversations of the
same half, tested on others of them. Features are centred in their conversation throughout, so that both are paired
probes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.probing.ridge import ridge_probes
from kvprobe.progress import Bar
from kvprobe.studies.use.fit import DIGITS, INLP, LEACE, RANDOM_0, Erasers, conversations, features, labels, roles
from kvprobe.studies.use.read import PARTS, PLACES

INTACT = "intact"
SAME, ANEW = "same probe", "trained anew"
FOLDS = 3


def check(reads: Sequence[Mapping[str, Tensor]], erasers: tuple[Erasers, Erasers]) -> pd.DataFrame:
    """One row per place, part, layer, conversation, state of the features and probe: `accuracy` per digit.

    Of a code slot the digit in it is read; of other places, all five.
    """
    accuracies: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    sites = [
        (half, place, role, part) for half in (0, 1) for place in PLACES for role in roles(place) for part in PARTS
    ]
    for half, place, role, part in Bar(sites, desc="Probing what was erased", unit="site"):
        tested, other = reads[half::2], reads[1 - half :: 2]
        intact, answers, homes = features(tested, place, role, part), labels(tested, role), conversations(tested)
        trained, known, their = features(other, place, role, part), labels(other, role), conversations(other)
        if role is not None:
            answers, known = answers[-1:], known[-1:]
        states = {INTACT: intact}
        for name in (LEACE, RANDOM_0, INLP):
            eraser = erasers[1 - half][place, role, part, name]
            states[name] = intact - eraser.inside(intact)
        for state, seen in states.items():
            anew = ridge_probes(seen, answers, homes % FOLDS, DIGITS, size=_size(intact)).predicted
            # The other half trains: it is every fold but the first.
            folds = torch.cat([torch.zeros_like(homes), 1 + their % (FOLDS - 1)])
            every, right = torch.cat([seen, trained], 1), torch.cat([answers, known], 1)
            same = ridge_probes(every, right, folds, DIGITS, size=_size(trained)).predicted[:, :, : len(homes)]
            for probe, predicted in ((ANEW, anew), (SAME, same)):
                hits = predicted.eq(answers).float().mean(1)
                accuracies[place, part, state, probe, half].append(
                    torch.stack([hits[:, homes == home].mean(1) for home in homes.unique()])
                )
    tables = [
        pd.DataFrame(
            {
                **dict(zip(("place", "part", "state", "probe"), site, strict=True)),
                "context": 2 * home + half,
                "layer": range(len(accuracy)),
                "accuracy": accuracy.tolist(),
            }
        )
        for (*site, half), roles_found in accuracies.items()
        for home, accuracy in enumerate(torch.stack(roles_found).mean(0))
    ]
    return pd.concat(tables, ignore_index=True)


def _size(features: Float[Tensor, "layers samples width"]) -> Float[Tensor, "layers"]:
    """Against which a probe tells what varies from round-off."""
    return features.square().mean((1, 2)).sqrt()
