"""From features to a `Probing`: probes at every site under the three splits, with every floor and control. There is no
way to ask for less."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import AtLeastZero, Within, checked_arguments
from kvprobe.errors import UserError
from kvprobe.probing.claims import CONTROL, FLOOR, Probing, doubts
from kvprobe.probing.controls import hash_control, lookup, permuted_within
from kvprobe.probing.curves import chosen_curves
from kvprobe.probing.description import description
from kvprobe.probing.features import Features
from kvprobe.probing.fits import chosen, fit_tasks, permuted_scores
from kvprobe.probing.permutation import p_values, step_down
from kvprobe.probing.splits import SPLITS, Split, fold_numbers
from kvprobe.probing.tables import floor_table, site_table, sparse_table, summary_table
from kvprobe.progress import Bar

CONTROLS = 4
"""The least number of control tasks; each place of a target has its own."""

_TABLES = ("table", "summary", "floors", "codelength", "sparse")


@checked_arguments
def probe_features(
    features: Features,
    floors: Mapping[str, Features],
    *,
    folds: Annotated[int, Within(3)] = 5,
    permutations: AtLeastZero = 99,
    rng: np.random.Generator,
    note: str = "Fitting probes",
) -> Probing:
    """Fit and test probes at every site under the three splits.

    With one context there is only the random split and no hash control, which would merely rename the labels.

    Args:
        floors: features of the same samples, by name (`restart`, `embedding`, `random model`); a leak is measured
            against `restart`.
        permutations: of labels within context; no p can be below 1 / (permutations + 1), and 0 leaves p-values out.
        rng: of folds, control labels and permutations.

    Raises:
        UserError: features of which none varies, fewer contexts than folds, or what
            `check_problem` refuses.
    """
    from scipy.stats import false_discovery_control  # slow to import

    _check(features, permutations)
    single = len(np.unique(features.contexts)) == 1
    splits: tuple[Split, ...] = ("random",) if single else SPLITS
    # With one context only samples can be left out, and the claim is about that context alone.
    clusters = np.arange(len(features.contexts)) if single else features.contexts
    # The same for all splits, so that one family-wise level holds over them.
    orders = permuted_within(features.contexts, permutations, rng)
    own_sites = sum(map(len, features.sites.values()))
    floor_sites = sum(len(sites) for floor in floors.values() for sites in floor.sites.values())
    probes = own_sites * (2 + (permutations > 0)) + floor_sites
    with Bar(total=probes * len(splits), desc=note, unit="probe") as bar:
        shared = _Shared(folds, orders, clusters, rng, bar.update)
        parts, scores = zip(*(_under(split, features, floors, shared) for split in splits), strict=True)
    tables: dict[str, Any] = {
        name: pd.concat([getattr(part, name) for part in parts], ignore_index=True) for name in _TABLES
    }
    if permutations:
        joined = np.concatenate(scores, 1)
        p = p_values(joined)
        tables["table"] = tables["table"].assign(
            permuted=joined[1:].mean(0) / features.labels.numel(),
            p=p,
            p_family=step_down(joined),
            q=false_discovery_control(p),
        )
    return Probing(
        features.target,
        **tables,
        picks={split: picks for part in parts for split, picks in part.picks.items()},
        right={reading: hits for part in parts for reading, hits in part.right.items()},
        clusters=clusters,
        warnings=tuple(doubts(features.labels.numpy(), clusters, features.target, tables["summary"], permutations)),
    )


@dataclass(frozen=True)
class _Shared:
    """What is the same under all splits."""

    folds: int
    orders: Int[np.ndarray, "permutations samples"]
    clusters: Int[np.ndarray, "samples"]
    rng: np.random.Generator
    done: Callable[[int], object]


def _under(
    split: Split, features: Features, floors: Mapping[str, Features], shared: _Shared
) -> tuple[Probing, Float[np.ndarray, "assignments sites"]]:
    """Everything under one split except p-values, and the scores that p-values are made of."""
    labels, classes = features.labels, len(features.target.classes)
    rng, done, clusters = shared.rng, shared.done, shared.clusters
    fold = fold_numbers(split, features.contexts, shared.folds, rng)
    control_labels = control_tasks(features, rng) if len(set(features.contexts)) > 1 else None

    tasks = [labels] if control_labels is None else [labels, control_labels]
    fits, *memorised = fit_tasks(features, split, fold, tasks, done=done)
    control = None if control_labels is None else (memorised[0], control_labels)
    others = {name: fit_tasks(floor, split, fold, [labels], done=done)[0] for name, floor in floors.items()}
    table = site_table(split, features, fits, clusters, floor=others.get(FLOOR), control=control)
    scores = (
        permuted_scores(features, split, fold, shared.orders, done=done) if len(shared.orders) else np.empty((0, 0))
    )

    best = chosen(fits, fold)
    readings = {"retained": (best, labels)} | {name: (chosen(other, fold), labels) for name, other in others.items()}
    if control is not None:
        readings[CONTROL] = chosen(control[0], fold), control[1]
    right = {name: read.predicted.eq(answers) for name, (read, answers) in readings.items()}
    keys = {"context": features.contexts.tolist(), "text": features.texts, "majority": [0] * len(fold)}
    for name, key in keys.items():
        if key is not None:
            right[name] = lookup(key, labels, fold, classes).eq(labels)
    bits = {name: read.information for name, (read, _) in readings.items()}

    family, site = best.usual
    seen = features.at(family, site, split)
    codes = description(seen, labels, features.contexts, classes, split=split, rng=rng)
    # From a stream of its own: how much is drawn depends on the sites chosen, and later folds must not.
    curves = chosen_curves(features, split, fold, best.picks, rng.spawn(1)[0])
    part = Probing(
        features.target,
        table,
        summary_table(split, right, bits, clusters),
        floor_table(split, others, labels, clusters),
        codes.drop(columns="probe").assign(split=split, family=family, **site._asdict()),
        sparse_table(split, curves, clusters),
        {split: best.picks},
        {(split, name): hits.numpy() for name, hits in right.items()},
        clusters,
    )
    return part, scores


def control_tasks(features: Features, rng: np.random.Generator) -> Int[Tensor, "tasks samples"]:
    """Labels of several hash control tasks, since a single draw may be a lucky one; each has at least two classes."""
    labels, classes = features.labels, len(features.target.classes)
    tasks: list[Tensor] = []
    while sum(map(len, tasks)) < CONTROLS:
        drawn = hash_control(labels, features.contexts.tolist(), classes, int(rng.integers(2**31)))
        tasks.append(drawn[[len(row.unique()) > 1 for row in drawn]])
    return torch.cat(tasks)


def _check(features: Features, permutations: int) -> None:
    labels, contexts = features.labels, features.contexts
    if all(not bool(tensor.std(0, correction=0).any()) for tensor in features.tensors.values()):
        raise UserError(
            "Every feature at every site is constant over the samples, so there is nothing to read; check that the "
            "conversations differ before the segment that is read."
        )
    for target, row in enumerate(labels):
        if bool((row == row[0]).all()):
            raise UserError(
                f"Target {target} has the one class {int(row[0])} in all samples; a probe needs at least two."
            )
    by_context = [labels[:, contexts == context] for context in set(contexts)]
    if permutations and all(bool((rows == rows[:, :1]).all()) for rows in by_context):
        raise UserError(
            "Every context has the same labels for all its samples, so a probe could infer labels from the context "
            "and no permutation within it shows that; cross contexts with labels, or give permutations=0 to go "
            "without."
        )
