"""Erasers for places of many conversations: fitted on some of them, and checked on others."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing.caches import interchange
from kvprobe.erasing.random_eraser import random_eraser
from kvprobe.erasing.subspace import Eraser
from kvprobe.progress import Bar
from kvprobe.studies.use.checks import still_read
from kvprobe.studies.use.variants import PARTS, VariantReads
from kvprobe.tidy import crossed

LEACE, INLP, RANDOM = "leace", "inlp", "random"
RANDOM_0 = f"{RANDOM} 0"
"""The first of the random subspaces."""

Places = Mapping[str, Sequence[int | None]]
"""By place, which of its slots have an eraser of their own; (None,) where all share one."""
Erasers = Mapping[tuple[str, int | None, str, str], Eraser]
"""Those of K or of V, all layers, by place, slot, part and name: `leace`, `inlp`, `random 0`, `random 1` …"""


def fit_places(
    variants: VariantReads, places: Places, classes: int, randoms: int, rng: np.random.Generator, shrinkage: float = 0.0
) -> Erasers:
    """All erasers of these conversations. That of a slot by itself is of the labels up to its own number, since a slot
    cannot know those of later ones.

    Args:
        randoms: random subspaces beside each of LEACE.
        shrinkage: see `leace_of`.
    """
    erasers: dict[tuple[str, int | None, str, str], Eraser] = {}
    for place, slot, part in sites(places):
        known = variants.labels if slot is None else variants.labels[: slot + 1]
        closed, iterated = variants.erasers(place, part, slot, known, classes, shrinkage)
        by_name = {LEACE: closed, INLP: iterated}
        by_name |= {f"{RANDOM} {draw}": random_eraser(closed, rng) for draw in range(randoms)}
        erasers |= {(place, slot, part, name): eraser for name, eraser in by_name.items()}
    return erasers


def check_places(
    tested: VariantReads, trained: VariantReads, erasers: Erasers, places: Places, classes: int, names: Sequence[str]
) -> pd.DataFrame:
    """What probes still read once erasers were at work (see `still_read`): one row per place, part, state of the
    features, probe, conversation (`context`) and layer, with the `accuracy` per label.

    Args:
        trained: the conversations on which the erasers were fitted.
        names: of the erasers to be checked.
    """
    accuracies: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for place, slot, part in Bar(list(sites(places)), desc="Probing what was erased", unit="site"):
        seen, known = (half.samples(place, part, slot) for half in (tested, trained))
        by_name = {name: erasers[place, slot, part, name] for name in names}
        for state, probe, accuracy in still_read(seen, known, by_name, classes):
            accuracies[place, part, state, probe].append(accuracy)
    tables = []
    for keys, by_slot in accuracies.items():
        accuracy = torch.stack(by_slot).mean(0).double().numpy()
        index = {"context": range(len(accuracy)), "layer": range(accuracy.shape[1])}
        about = dict(zip(("place", "part", "state", "probe"), keys, strict=True))
        tables.append(crossed(index, {"accuracy": accuracy}).assign(**about))
    return pd.concat(tables, ignore_index=True)


def interchange_place(
    base: KVCache,
    donor: KVCache,
    erasers: Erasers,
    places: Places,
    at: tuple[str, str],
    slots: Sequence[int],
    *,
    layers: Sequence[int],
    strength: float = 1.0,
) -> KVCache:
    """The base with what the donor holds at a place, inside the erasers of one name; see `interchange`.

    Args:
        at: the place, and the name of the erasers.
        slots: of the place.
        layers: in which K and V are exchanged.
    """
    place, name = at
    for slot in places[place]:
        own = {part: erasers[place, slot, part, name] for part in PARTS}
        along = {(layer, part): eraser.at(layer) for part, eraser in own.items() for layer in layers}
        where = slots if slot is None else slots[slot : slot + 1]
        base = interchange(base, donor, along, slots=where, strength=strength)
    return base


def eraser_sizes(erasers: Erasers) -> pd.DataFrame:
    """Of each eraser: its mean `rank` over layers, the `share` of the variance that it moves, and of how many
    dimensions (`width`)."""
    return pd.DataFrame(
        {"place": place, "slot": slot, "part": part, "name": name, "width": eraser.mean.shape[-1]}
        | {"rank": float(eraser.rank.double().mean()), "share": float(eraser.share.mean())}
        for (place, slot, part, name), eraser in erasers.items()
    )


def sites(places: Places) -> Iterator[tuple[str, int | None, str]]:
    """Where there is an eraser: place, slot and part."""
    return ((place, slot, part) for place, slots in places.items() for slot in slots for part in PARTS)
