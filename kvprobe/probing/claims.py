"""What probes read, with everything that could be read without any leak beside it, and the claim that follows.

An accuracy alone says little. Here it comes under three splits, beside the restart floor at the same tokens and
positions, a control task that can only be memorised, what the context or the text alone gives away, and labels permuted
within context; in bits as well as in hits; and with family-wise p-values over all sites.
`kvprobe.probing.probe_features` makes all of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int

from kvprobe.brief import Brief, table_html
from kvprobe.exported import Exported
from kvprobe.models.lens import Family
from kvprobe.probing.features import Site
from kvprobe.probing.intervals import LEVEL, held_out
from kvprobe.stats import DIFFERENCE, FEWEST, Estimate
from kvprobe.tasks.designs import Target
from kvprobe.tidy import crossed
from kvprobe.wording import percent, points

FLOOR = "restart"
"""The name of the floor that a leak is measured against."""

CONTROL = "hash control"
"""The name of the control task; see `kvprobe.probing.controls.hash_control`."""

TOO_FEW = "too few contexts to tell"
ENOUGH = ceil(1 / LEVEL) - 1
"""Permutations with which p can be as low as the level."""
UNMEASURED = "Nothing was measured: retained and restart are the same numbers."


@dataclass(frozen=True, repr=False)
class Probing(Brief, Exported):
    """What was read about a target, with its floors and controls.

    Attributes:
        target: what was to be recovered.
        table: one row per split and site: `accuracy` (mean over places), with `low` and `high`, and `bits` (per label),
            with `_low` and `_high`; `floor`, `leak` (accuracy − floor, with interval) and `leak_bits`, where there is a
            restart floor; `control` and `selectivity` (accuracy − hash control), where there is one; `eta_squared`
            (mean over dimensions); `permuted` (mean accuracy with labels permuted in context), `p`, and over all sites
            of all splits together `p_family` (step-down max-T) and `q` (Benjamini and Hochberg 1995, for exploratory
            maps).
        summary: one row per split and reading: `retained` first, then each floor, the hash control, and what `context`,
            `text` and `majority` alone give away. `accuracy` and `bits` are of the site chosen on inner folds; `lead`
            is the accuracy of `retained` above it. All have intervals, and the smallest and largest mean of a cluster;
            see `reading`.
        floors: per split and floor, its own accuracy at every site, with `low` and `high`.
        codelength: per split and place, bits per label by online coding from the site that most folds chose. All
            samples had a part in that choice, so with many sites it is slightly optimistic; compare accuracies for a
            claim.
        sparse: per split and k, accuracy from the k best dimensions of the site that each fold chose, and from k random
            ones.
        picks: per split, the site that each test fold chose.
        right: per split and reading, which samples' places the chosen site read right.
        clusters: the unit that intervals leave out, per sample: its context, or itself where all samples share one
            context.
        use: what the model itself says about the answer, a row per sample and arm; None if it was not asked.
        warnings: why its numbers may mislead, in sentences; see `doubts`.
        measured: false where retained equals restart bit for bit, so there is nothing to claim; `warnings` say why.
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
    warnings: tuple[str, ...] = ()
    measured: bool = True

    def _plain(self) -> Mapping[str, object]:
        tables = ("table", "summary", "floors", "codelength", "sparse", "use")
        return {
            "target": self.target,
            "chance": self.chance,
            "measured": self.measured,
            "warnings": self.warnings,
            "claims": [claim(self, split) for split in self.picks] if self.measured else [UNMEASURED],
            "picks": [
                {"split": split, "fold": fold, "family": family, **site._asdict()}
                for split, sites in self.picks.items()
                for fold, (family, site) in enumerate(sites)
            ],
            **{name: getattr(self, name) for name in tables},
        }

    def _facts(self) -> Iterable[str]:
        yield f"{self.target.name!r}, {len(self.table)} sites and splits, chance {self.chance:.3g}"
        yield from (
            (f"{split}: {verdict(self, split)}" for split in self.picks) if self.measured else ("nothing measured",)
        )

    @property
    def chance(self) -> float:
        """Accuracy of a blind guess: of any label or, where labels are unbalanced, of the commonest one."""
        guesses = [self.reading(*of) for of in self.right if of[1] == "majority"]
        better = [guess.mean for guess in guesses if guess.ends[0] > self.target.chance]
        return max([self.target.chance, *better])

    def _html(self) -> str:
        claims = "".join(f"<p>{escape(line)}</p>" for line in str(self).splitlines())
        readings = dict.fromkeys(reading for _, reading in self.right)
        rows = (
            [name, *(percent(self.reading(split, name)) if (split, name) in self.right else "" for split in self.picks)]
            for name in readings
        )
        return claims + table_html(("accuracy", *self.picks), rows)

    def df(self) -> pd.DataFrame:
        """The table of all sites."""
        return self.table

    def readings(self, split: str) -> list[str]:
        """The readings of a split, `retained` first."""
        return [reading for of_split, reading in self.right if of_split == split]

    def hits(self, reading: str = "retained") -> pd.DataFrame:
        """One row per `split`, `place` and `sample`: whether a reading gets it `right`, and whether the restart does
        (`floor`, NaN where there is none)."""
        tables = []
        for split in self.picks:
            right, floor = self.right[split, reading], self.right.get((split, FLOOR))
            held = np.full(right.shape, np.nan) if floor is None else floor
            keys = {"split": [split], "place": self.target.places, "sample": range(right.shape[1])}
            tables.append(crossed(keys, {"right": right.astype(float), "floor": held.astype(float)}))
        return pd.concat(tables, ignore_index=True)

    def reading(self, split: str, reading: str, name: str = "accuracy") -> Estimate:
        """`accuracy`, `bits` or `lead` of a row of the summary."""
        summary = self.summary
        row: Any = summary[(summary["split"] == split) & (summary["reading"] == reading)].iloc[0]
        return Estimate.of_columns(row, name, len(set(self.clusters.tolist())))

    def lead(self, split: str, over: str, comparisons: int = 1) -> Estimate:
        """How much more `retained` reads than another reading.

        Args:
            comparisons: how many such leads a claim is picked from; see `kvprobe.stats.interval`.
        """
        retained, other = (self.right[split, name].mean(0) for name in ("retained", over))
        return held_out(retained - other, self.clusters, DIFFERENCE, comparisons)

    def confirmed(self, split: str) -> bool:
        """Whether labels permuted within contexts do worse at some site, family-wise; True if none were permuted."""
        rows = self.table[self.table["split"] == split]
        return "p_family" not in rows or bool(rows["p_family"].min() <= LEVEL)

    def __str__(self) -> str:
        doubted = [f"Warning: {warning}" for warning in self.warnings]
        claims = (claim(self, split) for split in self.picks) if self.measured else (UNMEASURED,)
        return "\n".join([*doubted, *claims])


def doubts(
    labels: Int[np.ndarray, "places samples"],
    clusters: Int[np.ndarray, "samples"],
    target: Target,
    summary: pd.DataFrame,
    permutations: int,
) -> Iterator[str]:
    """Why the numbers of a design may mislead."""
    if 0 < permutations < ENOUGH:
        least = f"{1 / (permutations + 1):.2g}"
        yield f"{permutations} permutations give no p below {least}, so nothing is confirmed; give {ENOUGH} or more."
    names, members = np.unique(clusters, return_inverse=True)
    if len(names) < FEWEST:
        yield f"{len(names)} contexts are too few to tell: only ranges are shown; give at least {FEWEST}."
    for place, row in zip(target.places, labels, strict=True):
        counts = np.zeros((len(names), len(target.classes)), int)
        np.add.at(counts, (members, row), 1)
        if len(names) < len(clusters) and (counts == counts[:, :1]).all():
            where = f" at {place!r}" if place else ""
            yield (
                f"every context has each class of {target.name!r}{where} equally often, so the labels of its other "
                "samples tell what a sample's label is not: floors fall below chance and leads look larger; draw "
                "labels at random."
            )
    still = (summary["reading"] == "retained") & (summary["accuracy_low"] == summary["accuracy_high"])
    for _, row in summary[still].iterrows():
        yield (
            f"{row['split']}: every context has the same accuracy of {row['accuracy']:.0%}, so its interval has no "
            "width and says nothing of how much it varies."
        )


def claim(probing: Probing, split: str) -> str:
    """What was read under a split, and above which floor, in a sentence.

    The claim's interval is wide enough for those of all splits to hold together, and the permutation test must agree:
    where nothing gives the labels away, at most 5 % of probings claim anything.
    """
    lead, above = _lead(probing, split)
    floor = f"{lead} {'floor' if lead == FLOOR else 'alone'} {percent(probing.reading(split, lead))}"
    selective = (
        f", with a selectivity of {points(probing.reading(split, CONTROL, 'lead'))}"
        if CONTROL in probing.readings(split)
        else ""
    )
    retained, said = percent(probing.reading(split, "retained")), verdict(probing, split)
    return (
        f"{split}: {said if said == TOO_FEW else f'{said} above the {lead}'}; a probe reads "
        f"{retained} of {probing.target.name} ({floor}, chance {probing.chance:.0%}), "
        f"{points(above)} above it{selective}."
    )


def verdict(probing: Probing, split: str) -> str:
    """Decodable, not detected, not confirmed, or undecided."""
    _, above = _lead(probing, split)
    if not above.has_interval:
        return TOO_FEW
    if not above.above():
        return "not detected"
    return (
        "decodable" if probing.confirmed(split) else "not confirmed (permuted labels are not read significantly worse)"
    )


def _lead(probing: Probing, split: str) -> tuple[str, Estimate]:
    """The floor of a claim, and how much more is read than there."""
    readings = probing.readings(split)
    blind = [name for name in ("context", "text", "majority", "embedding") if name in readings]
    floor = FLOOR if FLOOR in readings else max(blind, key=lambda name: probing.reading(split, name).mean)
    return floor, probing.lead(split, floor, len(probing.picks))
