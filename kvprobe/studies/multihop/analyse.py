"""From features to numbers: what probes read at each distance in each arm, against the floor; transfer; light cone;
use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import chosen, fit_sites
from kvprobe.probing.intervals import INFORMATION, held_out
from kvprobe.probing.splits import SPLITS, Split, centred_within, fold_numbers
from kvprobe.probing.transfer import transferred
from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED, estimate
from kvprobe.studies.multihop.arms import ARMS, DISTANCES, FORK, Arm, lowest_layer
from kvprobe.studies.multihop.collect import PLACES, USE_ARMS, Place, place
from kvprobe.studies.multihop.collected import Collected
from kvprobe.studies.multihop.config import Config

CHANCE = 0.1
CONDITIONS = ("retained", "restart")
TRANSFERRED: tuple[Split, ...] = ("leave-context-out", "paired")
CLAIMS = len(ARMS) + len(PLACES) + len(DISTANCES[FORK:]) + len(ARMS)
"""What the answer may claim: a leak beyond the first summary by arm, one at each place, more without hops by distance,
use by arm."""


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        probes: one row per condition, arm, distance, split, family, read-out and layer: accuracy per digit with its
            interval.
        samples: one row per sample and condition: what the model made of the code, and what the probes read.
        metrics: the headline numbers.
    """

    probes: pd.DataFrame
    samples: pd.DataFrame
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """What the probe that did best on each inner fold reads at one place.

    Attributes:
        hits: whether each digit was right.
        bits: that the probe gives of a digit, mean over digits.
        inner: accuracy on the inner fold of every site, families joined.
        sites: family and site of each row of `inner`.
        picks: the site of each test fold.
    """

    hits: Bool[np.ndarray, "samples digits"]
    bits: Float[np.ndarray, "samples"]
    inner: Float[Tensor, "sites folds"]
    sites: tuple[tuple[Family, Site], ...]
    picks: tuple[tuple[Family, Site], ...]


def analyse(collected: Collected, config: Config) -> Analysis:
    """Fit all probes and find all intervals."""
    rng = np.random.default_rng([config.seed, 2])
    clusters = collected.contexts
    folds: dict[Split, np.ndarray] = {split: fold_numbers(split, clusters, config.folds, rng) for split in SPLITS}

    def of(
        values: np.ndarray, within: tuple[float, float] = UNBOUNDED, comparisons: int = 1, probed: bool = True
    ) -> dict[str, Any]:
        found = held_out if probed else estimate
        return found(values.astype(float), clusters, within, comparisons).record()

    tables, found = [], {}
    with tqdm(total=len(PLACES) * len(CONDITIONS) * len(SPLITS), desc="Fitting probes", unit="place") as bar:
        for at in PLACES:
            for condition in CONDITIONS:
                features = collected.joined(condition, at)
                for split in SPLITS:
                    table, reading = read(condition, at, features, split, folds[split])
                    found[condition, at, split] = reading
                    tables.append(table)
                    bar.update()

    metrics: dict[str, Any] = {"chance": CHANCE, "samples": len(clusters), "sessions": config.sessions}
    for name in ("accuracy", "floor", "leak", "bits", "floor_bits", "chosen", "beyond"):
        metrics[name] = {split: {} for split in SPLITS}
    claims: dict[str, Any] = {"beyond": {}, "reach": {}}
    metrics["claims"] = claims
    for split in SPLITS:
        for arm in ARMS:
            retained, restart = (
                [found[condition, place(arm, distance), split] for distance in DISTANCES] for condition in CONDITIONS
            )
            leaks = [own.hits.mean(1) - floor.hits.mean(1) for own, floor in zip(retained, restart, strict=True)]
            beyond = np.mean(leaks[1:], 0)
            metrics["accuracy"][split][arm] = [of(own.hits.mean(1), SHARE) for own in retained]
            metrics["floor"][split][arm] = [of(own.hits.mean(1), SHARE) for own in restart]
            metrics["leak"][split][arm] = [of(leak, DIFFERENCE) for leak in leaks]
            metrics["bits"][split][arm] = [of(own.bits, INFORMATION) for own in retained]
            metrics["floor_bits"][split][arm] = [of(own.bits, INFORMATION) for own in restart]
            metrics["chosen"][split][arm] = [
                [{"fold": fold, **_named(pick)} for fold, pick in enumerate(own.picks)] for own in retained
            ]
            metrics["beyond"][split][arm] = of(beyond, DIFFERENCE)
            if split == "leave-context-out":
                claims["beyond"][arm] = of(beyond, DIFFERENCE, CLAIMS)
            if split == "paired":
                claims["reach"][arm] = [of(leak, DIFFERENCE, CLAIMS) for leak in leaks]
    metrics["versus"] = {
        split: {
            arm: [of(more, DIFFERENCE) for more in _versus(found, split, arm)] for arm in ARMS if arm != "hop-forced"
        }
        for split in SPLITS
    }
    claims["straight"] = [of(more, DIFFERENCE, CLAIMS) for more in _versus(found, "paired", "skip")]
    claims["use"] = {arm: of(_gained(collected.use["margin"], arm), comparisons=CLAIMS, probed=False) for arm in ARMS}
    metrics["transfer"] = _transfer(collected, found, folds)
    variation = variation_of(collected)
    metrics["light_cone"] = _light_cone(variation)
    metrics["use"] = _use(collected.use, clusters)
    probes = pd.concat(tables, ignore_index=True)
    return Analysis(probes.merge(variation, how="left"), _sample_table(collected, found), metrics)


def read(
    condition: str,
    at: Place,
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
) -> tuple[pd.DataFrame, Reading]:
    """Probes of every site of a place under one split: a table of all, and the reading of the best."""
    fits = fit_sites(features, split, folds)
    best = chosen(fits, folds)
    table = fits.accuracies(features.labels, features.contexts, condition=condition, arm=at[0], split=split)
    reading = Reading(
        best.predicted.eq(features.labels).T.numpy(),
        best.information.double().numpy(),
        fits.inner_accuracy,
        fits.sites,
        best.picks,
    )
    return table.drop(columns="head").assign(distance=at[1]), reading


def _named(pick: tuple[Family, Site]) -> dict[str, Any]:
    family, site = pick
    return {"family": family, "layer": site.layer, "read": site.read}


def _versus(
    found: Mapping[tuple[str, Place, Split], Reading], split: Split, arm: Arm
) -> list[Float[np.ndarray, "samples"]]:
    """By distance, how much more a probe reads in the open arm, or in that which skips, than where every hop is
    forced."""
    read = [
        [found["retained", place(each, distance), split].hits.mean(1) for distance in DISTANCES]
        for each in (arm, "hop-forced")
    ]
    return [own - forced for own, forced in zip(*read, strict=True)]


def _transfer(
    collected: Collected,
    found: Mapping[tuple[str, Place, Split], Reading],
    folds: Mapping[Split, Int[np.ndarray, "samples"]],
) -> dict[str, Any]:
    """Probes trained at each distance, tested at each, all at one site: that of the best inner accuracy, mean over
    distances."""
    labels = collected.labels
    out: dict[str, Any] = {split: {} for split in TRANSFERRED}
    with tqdm(total=len(out) * len(ARMS), desc="Testing probes at other distances", unit="arm") as bar:
        for split in TRANSFERRED:
            number = torch.from_numpy(folds[split])
            for arm in ARMS:
                readings = [found["retained", place(arm, distance), split] for distance in DISTANCES]
                best = torch.stack([own.inner for own in readings]).mean(0).argmax(0).tolist()
                picks = [readings[0].sites[index] for index in best]
                hits = np.empty((len(DISTANCES), len(DISTANCES), len(number)))
                for pick in set(picks):
                    read = [collected.vectors("retained", place(arm, distance), pick, split) for distance in DISTANCES]
                    seen, size = (torch.stack(each) for each in zip(*read, strict=True))
                    right = transferred(seen, labels, number, 10, size).eq(labels).double().mean(2).numpy()
                    mine = np.isin(folds[split], [fold for fold, own in enumerate(picks) if own == pick])
                    hits[:, :, mine] = right[:, :, mine]
                out[split][arm] = {
                    "accuracy": [[held_out(each, collected.contexts, SHARE).record() for each in row] for row in hits],
                    "picks": [_named(pick) for pick in picks],
                }
                bar.update()
    return out


def variation_of(collected: Collected) -> pd.DataFrame:
    """How far what the probes read varies with the code, relative to its size: the largest over samples and numbers."""
    tables = []
    for at in PLACES:
        features = collected.joined("retained", at)
        for family, tensor in features.tensors.items():
            varying = centred_within(tensor, collected.contexts).abs().amax((0, 2)) / tensor.abs().amax((0, 2))
            sites = features.sites[family]
            tables.append(
                pd.DataFrame(
                    {
                        "condition": "retained",
                        "arm": at[0],
                        "distance": at[1],
                        "family": family,
                        "layer": [site.layer for site in sites],
                        "read": [site.read for site in sites],
                        "variation": varying.numpy(),
                    }
                )
            )
    return pd.concat(tables, ignore_index=True)


def _light_cone(variation: Any) -> dict[str, list[dict[str, Any]]]:
    """By arm and distance: the lowest layer that the code can reach, the largest variation of K and V below it, there,
    and at the last layer."""

    def of(arm: Any, distance: int) -> dict[str, Any]:
        at, lowest = place(arm, distance), lowest_layer(arm, distance)
        own = variation[(variation["arm"] == at[0]) & (variation["distance"] == at[1])]
        own = own[own["family"] != "resid_post"].groupby("layer")["variation"].max()
        return {
            "lowest": lowest,
            "below": float(own[own.index < lowest].max()),
            "there": float(own[lowest]) if lowest in own.index else None,
            "last": float(own.iloc[-1]),
        }

    return {arm: [of(arm, distance) for distance in DISTANCES] for arm in ARMS}


def _use(use: Mapping[str, np.ndarray], clusters: Int[np.ndarray, "samples"]) -> dict[str, Any]:
    def of(values: np.ndarray, within: tuple[float, float] = UNBOUNDED) -> dict[str, Any]:
        return estimate(values.astype(float), clusters, within).record()

    logprob, margin = use["logprob"].sum(2), use["margin"].sum(2)
    measured: dict[str, Any] = {
        arm: {
            "logprob": of(logprob[:, index]),
            "margin": of(margin[:, index]),
            "token_accuracy": of(use["correct"][:, index].mean(1), SHARE),
            "kl_from_shown": of(use["kl"][:, index]),
        }
        for index, arm in enumerate(USE_ARMS)
    }
    for arm in ARMS:
        measured[arm]["delta_margin"] = of(_gained(use["margin"], arm))
        measured[arm]["delta_u"] = of(_gained(use["logprob"], arm))
    return measured


def _gained(measure: Float[np.ndarray, "samples arms tokens"], arm: Arm) -> Float[np.ndarray, "samples"]:
    """What masking gives beyond the restart of the same arm."""
    summed = measure.sum(2)
    return summed[:, USE_ARMS.index(arm)] - summed[:, USE_ARMS.index(f"restart, {arm}")]


def _sample_table(collected: Collected, found: Mapping[tuple[str, Place, Split], Reading]) -> pd.DataFrame:
    """One row per sample and use arm, and per sample, condition, arm, distance and split."""
    common = {
        "sample": np.arange(len(collected.digits)),
        "session": collected.contexts,
        "code": ["".join(map(str, row)) for row in collected.digits],
    }
    tables = [
        pd.DataFrame(
            common
            | {
                "measure": "use",
                "condition": arm,
                "logprob": collected.use["logprob"][:, index].sum(1),
                "margin": collected.use["margin"][:, index].sum(1),
                "token_accuracy": collected.use["correct"][:, index].mean(1),
            }
        )
        for index, arm in enumerate(USE_ARMS)
    ]
    for (condition, (arm, distance), split), reading in found.items():
        named = {"measure": "probe", "condition": condition, "arm": arm, "distance": distance, "split": split}
        tables.append(pd.DataFrame(common | named | {"digits_read": reading.hits.sum(1), "bits": reading.bits}))
    return pd.concat(tables, ignore_index=True)
