"""From features to a claim: what can be read, beside everything that would be read without any leak.

An accuracy alone says little. Here it comes under three splits, beside the restart floor at the same tokens and positions,
a control task that can only be memorised, what the context or the text alone tells, and labels permuted within context;
in bits as well as in hits; and over all sites with family-wise p-values. There is no way to ask for less.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from kvprobe.errors import UserError
from kvprobe.models.lens import Family
from kvprobe.probing.calibration import Solver
from kvprobe.probing.controls import hash_control, lookup, permuted_within
from kvprobe.probing.curves import chosen_curves
from kvprobe.probing.description import description
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import Fits, chosen, fit_sites, permuted_scores
from kvprobe.probing.intervals import LEVEL, held_out, held_out_means
from kvprobe.probing.permutation import false_discovery_rate, p_values, paired_features, step_down
from kvprobe.probing.sparse import eta_squared
from kvprobe.probing.splits import SPLITS, Split, fold_numbers
from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED, Estimate
from kvprobe.tasks.designs import Target
from kvprobe.wording import percent, points

FLOOR = "restart"
"""The name of the floor that a leak is measured from."""

CONTROL = "hash control"

CONTROLS = 4
"""Control tasks that are drawn at least; each place of a target has its own."""


@dataclass(frozen=True)
class Probing:
    """What was read of a target, and what it is worth.

    Attributes:
        target: what was to be recovered.
        table: one row per split and site: `accuracy` (mean over places) and `bits` (told per label), each with `_low` and
            `_high`; `floor`, `leak` (accuracy − floor, with interval) and `leak_bits`, where there is a restart floor; `control`
            and `selectivity` (accuracy − hash control), where there is one; `eta_squared` (mean over dimensions); `permuted` (mean accuracy with
            labels permuted in context), `p`, and over all sites of all splits together `p_family` (step-down max-T) and `q`
            (Benjamini and Hochberg).
        summary: one row per split and reading, `retained` first, then each floor, the hash control, and what `context`, `text`
            and `majority` alone tell: `accuracy` and `bits` of the site chosen on inner folds, and `lead`, the accuracy of
            `retained` above it; all with intervals, and with the smallest and largest mean of a cluster; see `reading`.
        floors: per split and floor, its own accuracy at every site, with `low` and `high`.
        codelength: per split and place, bits per label by online coding from the site that most folds chose. All samples had a
            part in that choice, so of many sites it is flattered a little; compare accuracies for a claim.
        sparse: per split and k, accuracy from the k best dimensions of the site that each fold chose, and from k at random.
        picks: per split, the site that each test fold chose.
        right: per split and reading, which samples' places were read right by the chosen site.
        clusters: of each sample, what intervals leave out: its context, or itself where all samples share one.
        use: what the model itself says of the answer, a row per sample and arm; None if it was not asked.
    """

    target: Target
    table: pd.DataFrame
    summary: pd.DataFrame
    floors: pd.DataFrame
    codelength: pd.DataFrame
    sparse: pd.DataFrame
    picks: Mapping[str, tuple[tuple[Family, Site], ...]]
    right: Mapping[tuple[str, str], np.ndarray] = field(repr=False)
    clusters: Int[np.ndarray, "samples"] = field(repr=False)
    use: pd.DataFrame | None = None

    @property
    def chance(self) -> float:
        """Accuracy of a blind guess."""
        return self.target.chance

    def df(self) -> pd.DataFrame:
        """The table of all sites."""
        return self.table

    def readings(self, split: str) -> list[str]:
        """The readings of a split, `retained` first."""
        return [reading for own, reading in self.right if own == split]

    def reading(self, split: str, reading: str, name: str = "accuracy") -> Estimate:
        """`accuracy`, `bits` or `lead` of a row of the summary."""
        summary = self.summary
        row: Any = summary[(summary["split"] == split) & (summary["reading"] == reading)].iloc[0]
        ends = (float(row[f"{name}_{end}"]) for end in ("smallest", "largest"))
        return Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"], len(set(self.clusters.tolist())), *ends)

    def lead(self, split: str, over: str, comparisons: int = 1) -> Estimate:
        """How much more `retained` reads than another reading.

        Args:
            comparisons: how many of them a claim is picked from; see `kvprobe.stats.interval`.
        """
        own, other = (self.right[split, name].mean(0) for name in ("retained", over))
        return held_out(own - other, self.clusters, DIFFERENCE, comparisons)

    def confirmed(self, split: str) -> bool:
        """Whether labels permuted within contexts do worse at some site, family-wise; True if none were permuted."""
        own = self.table[self.table["split"] == split]
        return "p_family" not in own or bool(own["p_family"].min() <= LEVEL)

    def __str__(self) -> str:
        return "\n".join(claim(self, split) for split in self.picks)


def probe_features(
    features: Features,
    floors: Mapping[str, Features],
    *,
    folds: int = 5,
    solver: Solver = "ridge",
    permutations: int = 99,
    rng: np.random.Generator,
    note: str = "Fitting probes",
) -> Probing:
    """Fit and test probes at every site under the three splits; with one context, under the random split alone and without a
    hash control, which there would only give the labels other names.

    Args:
        floors: features of the same samples by what they are (`restart`, `embedding`, `random model`); `restart` is what a
            leak is measured from.
        permutations: of labels within context; no p can be below 1 / (permutations + 1), and 0 leaves p-values out.
        rng: of folds, control labels and permutations.

    Raises:
        UserError: features of which none varies, fewer contexts than folds, or what `check_problem` refuses.
    """
    _check(features, permutations)
    single = len(np.unique(features.contexts)) == 1
    splits: tuple[Split, ...] = ("random",) if single else SPLITS
    # With one context there is nothing to leave out but its samples, and no claim beyond it.
    clusters = np.arange(len(features.contexts)) if single else features.contexts
    # The same for all splits, so that one family-wise level holds over them.
    orders = permuted_within(features.contexts, permutations, rng)
    how = _How(folds, solver, orders, clusters)
    own = sum(map(len, features.sites.values()))
    probes = own * (2 + (permutations > 0)) + sum(
        len(sites) for each in floors.values() for sites in each.sites.values()
    )
    with tqdm(total=probes * len(splits), desc=note, unit="probe") as bar:
        parts, scores = zip(*(_under(split, features, floors, how, rng, bar.update) for split in splits), strict=True)
    table, summary, floor, codelength, sparse = (
        pd.concat([getattr(part, name) for part in parts], ignore_index=True)
        for name in ("table", "summary", "floors", "codelength", "sparse")
    )
    if permutations:
        found = np.concatenate(scores, 1)
        p = p_values(found)
        table = table.assign(
            permuted=found[1:].mean(0) / features.labels.numel(),
            p=p,
            p_family=step_down(found),
            q=false_discovery_rate(p),
        )
    return Probing(
        features.target,
        table,
        summary,
        floor,
        codelength,
        sparse,
        picks={split: picks for part in parts for split, picks in part.picks.items()},
        right={reading: hits for part in parts for reading, hits in part.right.items()},
        clusters=clusters,
    )


def claim(probing: Probing, split: str) -> str:
    """What was read under a split, above what, in a sentence.

    Intervals of the claim are so wide that those of all splits hold together, and it takes the permutation test as well:
    of labels that nothing tells, at most 5 % of probings claim anything.
    """
    readings = probing.readings(split)
    blind = [name for name in ("context", "text", "majority", "embedding") if name in readings]
    lead = FLOOR if FLOOR in readings else max(blind, key=lambda name: probing.reading(split, name).mean)
    above = probing.lead(split, lead, len(probing.picks))
    floor = f"{FLOOR} floor {percent(probing.reading(split, FLOOR))}, " if lead == FLOOR else ""
    selective = (
        f", with a selectivity of {points(probing.reading(split, CONTROL, 'lead'))}" if CONTROL in readings else ""
    )
    return (
        f"{split}: {_verdict(probing, split, above)} above the {lead}; a probe reads "
        f"{percent(probing.reading(split, 'retained'))} of {probing.target.name} ({floor}chance {probing.chance:.0%}), "
        f"{points(above)} above it{selective}."
    )


def _verdict(probing: Probing, split: str, above: Estimate) -> str:
    if not above.has_interval:
        return "undecided for want of contexts"
    if not above.above():
        return "not detected"
    return "decodable" if probing.confirmed(split) else "not confirmed (permuted labels are read as well)"


@dataclass(frozen=True)
class _How:
    """What is the same under all splits."""

    folds: int
    solver: Solver
    orders: Int[np.ndarray, "permutations samples"]
    clusters: Int[np.ndarray, "samples"]

    def interval(
        self,
        values: Float[np.ndarray, "*quantities samples"],
        name: str,
        within: tuple[float, float],
        low: str = "{}_low",
        high: str = "{}_high",
    ) -> dict[str, np.ndarray]:
        """Columns of a mean over samples and its interval."""
        found = held_out_means(values.astype(float), self.clusters, within)
        return dict(zip((name, low.format(name), high.format(name)), found, strict=True))


def _under(
    split: Split,
    features: Features,
    floors: Mapping[str, Features],
    how: _How,
    rng: np.random.Generator,
    done: Callable[[int], object],
) -> tuple[Probing, Float[np.ndarray, "assignments sites"]]:
    """Everything under one split but p-values, and the scores that they are made of."""
    labels, classes = features.labels, len(features.target.classes)
    fold = fold_numbers(split, features.contexts, how.folds, rng)
    drawn = _control_tasks(features, rng) if len(set(features.contexts)) > 1 else None
    fits = fit_sites(features, split, fold, solver=how.solver, done=done)
    control = None
    if drawn is not None:
        control = (fit_sites(features, split, fold, labels=drawn, solver=how.solver, done=done), drawn)
    others = {name: fit_sites(floor, split, fold, solver=how.solver, done=done) for name, floor in floors.items()}

    table = _site_table(split, features, fits, others.get(FLOOR), control, how)
    scores = permuted_scores(features, split, fold, how.orders, done=done) if len(how.orders) else np.empty((0, 0))

    best = chosen(fits, fold)
    right = {"retained": best.predicted.eq(labels)}
    bits = {"retained": best.information}
    for name, other in others.items():
        own = chosen(other, fold)
        right[name], bits[name] = own.predicted.eq(labels), own.information
    if control is not None:
        own = chosen(control[0], fold)
        right[CONTROL], bits[CONTROL] = own.predicted.eq(control[1]), own.information
    keys = {"context": features.contexts.tolist(), "text": features.texts, "majority": [0] * len(fold)}
    for name, key in keys.items():
        if key is not None:
            right[name] = lookup(key, labels, fold, classes).eq(labels)
    summary = [_summary_row(split, name, right, bits.get(name), how) for name in right]

    family, site = best.usual
    seen = features.at(family, site)
    seen = paired_features(seen, features.contexts) if split == "paired" else seen
    codes = description(seen, labels, features.contexts, classes, split=split, rng=rng).df()
    curves = chosen_curves(features, split, fold, best.picks, rng)
    sparse = [
        {"split": split, "k": k, **how.interval(hits, "accuracy", SHARE, "low", "high"), "random": blind.mean()}
        for k, (hits, blind) in curves.items()
    ]
    where = {"split": split, "family": family, **site._asdict()}
    part = Probing(
        features.target,
        table,
        pd.DataFrame(summary),
        _floor_table(split, others, labels, how),
        codes.drop(columns="probe").assign(**where),
        pd.DataFrame(sparse),
        {split: best.picks},
        {(split, name): hits.numpy() for name, hits in right.items()},
        how.clusters,
    )
    return part, scores


def _site_table(
    split: Split,
    features: Features,
    fits: Fits,
    floor: Fits | None,
    control: tuple[Fits, Int[Tensor, "targets samples"]] | None,
    how: _How,
) -> pd.DataFrame:
    """One row per site."""
    hits = _hits(fits, features.labels)
    columns: dict[str, Any] = {
        "split": split,
        **_site_columns(fits),
        **how.interval(hits, "accuracy", SHARE, "low", "high"),
        **how.interval(fits.information.double().numpy(), "bits", UNBOUNDED),
        "eta_squared": _eta_squared(features, split),
    }
    if control is not None:
        memorised = _hits(*control)
        columns |= {"control": memorised.mean(1), **how.interval(hits - memorised, "selectivity", DIFFERENCE)}
    if floor is not None and floor.sites == fits.sites:
        blind = _hits(floor, features.labels)
        columns |= {"floor": blind.mean(1), **how.interval(hits - blind, "leak", DIFFERENCE)}
        columns["leak_bits"] = (fits.information - floor.information).double().mean(1).numpy()
    return pd.DataFrame(columns)


def _control_tasks(features: Features, rng: np.random.Generator) -> Int[Tensor, "tasks samples"]:
    """Labels of the hash control tasks, several because one draw is itself a matter of luck; each of two classes at least."""
    labels, classes = features.labels, len(features.target.classes)
    tasks: list[Tensor] = []
    while sum(map(len, tasks)) < CONTROLS:
        drawn = hash_control(labels, features.contexts.tolist(), classes, int(rng.integers(2**31)))
        tasks.append(drawn[[len(each.unique()) > 1 for each in drawn]])
    return torch.cat(tasks)


def _floor_table(
    split: Split, floors: Mapping[str, Fits], labels: Int[Tensor, "targets samples"], how: _How
) -> pd.DataFrame:
    """One row per floor and site."""
    tables = [
        pd.DataFrame(
            {"split": split, "floor": name, **_site_columns(fits)}
            | how.interval(_hits(fits, labels), "accuracy", SHARE, "low", "high")
        )
        for name, fits in floors.items()
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _site_columns(fits: Fits) -> dict[str, Any]:
    return {
        "family": [family for family, _ in fits.sites],
        "layer": [site.layer for _, site in fits.sites],
        "head": pd.array([site.head for _, site in fits.sites], dtype="Int64"),
        "read": [site.read for _, site in fits.sites],
    }


def _summary_row(
    split: Split,
    name: str,
    right: Mapping[str, Bool[Tensor, "targets samples"]],
    bits: Float[Tensor, "samples"] | None,
    how: _How,
) -> dict[str, Any]:
    """One reading: its accuracy and bits, and how far `retained` is above it."""
    own, read = (right[each].double().mean(0).numpy() for each in (name, "retained"))
    found = {"accuracy": held_out(own, how.clusters, SHARE)}
    if bits is not None:
        found["bits"] = held_out(bits.double().numpy(), how.clusters)
    if name != "retained":
        found["lead"] = held_out(read - own, how.clusters, DIFFERENCE)
    row: dict[str, Any] = {"split": split, "reading": name}
    for column, value in found.items():
        row |= {column: value.mean}
        row |= {f"{column}_{end}": getattr(value, end) for end in ("low", "high", "smallest", "largest")}
    return row


def _eta_squared(features: Features, split: Split) -> Float[np.ndarray, "sites"]:
    """Share of variance between labels, mean over dimensions and places; for the paired split, of that within contexts."""
    contexts = features.contexts if split == "paired" else None
    found = [
        eta_squared(seen, features.labels, len(features.target.classes), contexts=contexts).mean((1, 2))
        for family in features.tensors
        for _, seen, _ in features.batches(family, "random")
    ]
    return torch.cat(found).double().cpu().numpy()


def _hits(fits: Fits, labels: Int[Tensor, "targets samples"]) -> Float[np.ndarray, "sites samples"]:
    return fits.predicted.eq(labels).double().mean(1).numpy()


def _check(features: Features, permutations: int) -> None:
    labels, contexts = features.labels, features.contexts
    if all(not bool(tensor.std(0, correction=0).any()) for tensor in features.tensors.values()):
        raise UserError(
            "Every feature at every site is constant over the samples, so there is nothing to read; check that the "
            "conversations differ before the segment that is read."
        )
    alike = [bool((labels[:, contexts == each] == labels[:, contexts == each][:, :1]).all()) for each in set(contexts)]
    if permutations and all(alike):
        raise UserError(
            "Every context has the same labels for all its samples, so a probe could tell labels by context and no "
            "permutation within it shows that; cross contexts with labels, or give permutations=0 to go without."
        )
