"""The probe that a study proposes for publishing: at the site that most folds chose, with the numbers of its
probing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probes.card import CARD_SPLITS, UNSEEN, Measure, ProbeInput, Training
from kvprobe.probes.probe import Probe
from kvprobe.probing.claims import CONTROL, FLOOR, Probing
from kvprobe.probing.differences import difference
from kvprobe.probing.features import Features, Site
from kvprobe.probing.ridge import VARIANCE_FLOOR
from kvprobe.stats import Estimate


def candidate_probe(
    model: Model,
    features: Features,
    probing: Probing,
    training: Training,
    *,
    restart: Features | None = None,
    less_restart: bool = False,
    use: Estimate | None = None,
    name: str | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Probe:
    """A probe of the site that most folds chose when whole contexts were held out, trained on all samples.

    Args:
        training: study, segment and the like; the rest is filled in.
        features: of the sites as they are, even if the probe reads differences.
        restart: features of the same samples computed without the hidden text; without them no reading of the probe may
            be called a leak.
        less_restart: the probing was of the differences of the two; see `kvprobe.probing.differences`.
        use: what the retained cache adds to the model's margin for the truth; see `Measure`.
        name, folds, seed: see `Probe.fit`.

    Raises:
        UserError: all samples share a context, the site reads single slots, or no site shows anything that varies.
    """
    if UNSEEN not in probing.picks:
        raise UserError(
            "All samples share one context, so it is unknown how the probe reads others; propose probes of more "
            "contexts."
        )
    if less_restart and restart is None:
        raise UserError("A probe of differences from the restart needs the restart's features; give them, too.")
    subtracted = restart if less_restart else None
    picks = [pick for pick in probing.picks[UNSEEN] if _varies(features, subtracted, pick)]
    # Where nothing can be read, folds may choose sites that do not vary; then any other site is as good.
    candidates = picks or [pick for pick in features.family_sites if _varies(features, subtracted, pick)]
    if not candidates:
        raise UserError(
            "All sites show the same in all samples, so there is no probe to propose; read other segments or families."
        )
    family, site = max(candidates, key=candidates.count)
    if site.read not in ("mean", "last"):
        raise UserError(f"A published probe reads a segment by its 'mean' or 'last' slot, not by {site.read!r}.")
    probe_input = ProbeInput(family, site.layer, site.head, "mean" if site.read == "mean" else "last", less_restart)
    measures = [*_measures(probing, probe_input)]
    if use is not None:
        measures.append(Measure.of("use", "", use))
    trained = replace(
        training,
        searched=sum(map(len, features.sites.values())),
        agreed=picks.count((family, site)) / len(probing.picks[UNSEEN]),
    )
    return Probe.fit(
        model,
        features.at(family, site)[0],
        features.labels,
        np.asarray(features.contexts),
        features.target,
        probe_input,
        trained,
        measures,
        restart=None if restart is None else restart.at(family, site)[0],
        name=name,
        folds=folds,
        seed=seed,
    )


def _varies(features: Features, restart: Features | None, pick: tuple[Family, Site]) -> bool:
    """Whether a site differs between samples; a site that the hidden text cannot reach does not differ from its
    restart."""
    shown = features.at(*pick)[0]
    seen = shown if restart is None else difference(shown, restart.at(*pick)[0])
    return bool(seen.std(0, correction=0).max() > VARIANCE_FLOOR * seen.square().mean().sqrt())


def _measures(probing: Probing, probe_input: ProbeInput) -> Iterator[Measure]:
    """The numbers of the chosen sites; permutations are of the probe's own site."""
    for split in CARD_SPLITS:
        wanted = {
            "accuracy": ("retained", "accuracy"),
            "bits": ("retained", "bits"),
            "selectivity": (CONTROL, "lead"),
            "floor": (FLOOR, "accuracy"),
            "leak": (FLOOR, "lead"),
            "text": ("text", "accuracy"),
            "majority": ("majority", "accuracy"),
        }
        for measure, (reading, name) in wanted.items():
            if reading in probing.readings(split):
                yield Measure.of(measure, split, probing.reading(split, reading, name))
        if "permuted" in probing.table:
            yield from _permuted(probing.table, split, probe_input)


def _permuted(table: pd.DataFrame, split: str, probe_input: ProbeInput) -> Iterator[Measure]:
    head = table["head"].isna() if probe_input.head is None else table["head"] == probe_input.head
    at = (table["split"] == split) & (table["family"] == probe_input.family) & (table["layer"] == probe_input.layer)
    row: Any = table[at & head & (table["read"] == probe_input.read)].iloc[0]
    for measure, column in (("permuted", "permuted"), ("p", "p_family")):
        yield Measure(measure, split, float(row[column]), None, None)
