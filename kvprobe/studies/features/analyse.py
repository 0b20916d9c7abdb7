"""From means of latents to numbers: how good the dictionaries are, which latents differ, which tell the code, which matter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvprobe.features import SparseFeatures
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.scan import paired_features, step_down
from kvprobe.probing.sparse import sparse_curves
from kvprobe.probing.splits import SPLITS, Split, fold_numbers
from kvprobe.stats import cluster_bootstrap, cluster_weights, estimate
from kvprobe.studies.features.collect import PER_CODE, READERS, RESTARTED, UNTOUCHED, Collected
from kvprobe.studies.features.config import Config

CHANCE = 0.1
FLIPS = 1999
"""Sign flips of the null; no p can be below 1 / (FLIPS + 1)."""
LEVEL = 0.05
KS = (1, 4, 16, 64)
ARMS = (*PER_CODE, "restart T3")
PARTS = ("reconstruction", "remainder")
"""Of the raw activation: what the dictionary makes of it, and what it leaves out."""


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        differences: one row per place, segment, reader and latent (or raw dimension): mean in both arms, difference with its
            interval, and the p-value corrected for all of them.
        curves: one row per place, arm, split, reader and k: accuracy per digit with its interval; the largest k is all dimensions.
        metrics: the headline numbers.
    """

    differences: pd.DataFrame
    curves: pd.DataFrame
    metrics: dict[str, Any]


def analyse(collected: Collected, dictionaries: Sequence[SparseFeatures], quality: Any, config: Config) -> Analysis:
    """Everything but what latents do to the answer."""
    weights = cluster_weights(config.contexts, np.random.default_rng([config.seed, 2]))
    places = [str(features.place) for features in dictionaries]
    differences = pd.concat(
        [
            differing(*pair_of(collected, place, segment, reader), config.seed, weights).assign(
                place=place, segment=segment, reader=reader
            )
            for place in places
            for segment in RESTARTED
            for reader in READERS
        ],
        ignore_index=True,
    )
    curves = decoding(collected, dictionaries, config, weights)
    metrics = {
        "chance": CHANCE,
        "contexts": config.contexts,
        "samples": config.contexts * config.codes,
        "places": places,
        "quality": {place: judged(quality[quality["place"] == place], config.seed) for place in places},
        "untouched": {place: untouched(collected, place) for place in places},
        "differing": {place: counted(differences[differences["place"] == place]) for place in places},
    }
    return Analysis(differences, curves, metrics)


def pair_of(
    collected: Collected, place: str, segment: str, reader: str
) -> tuple[Float[np.ndarray, "contexts dim"], Float[np.ndarray, "contexts dim"]]:
    """Retained and restart, the codes of a context averaged."""
    retained = collected(place, segment, reader)
    restart = collected(place, f"restart {segment}", reader).double()
    return retained.double().unflatten(0, (len(restart), -1)).mean(1).numpy(), restart.numpy()


def differing(
    retained: Float[np.ndarray, "contexts dim"],
    restart: Float[np.ndarray, "contexts dim"],
    seed: int,
    weights: Int[np.ndarray, "resamples contexts"],
) -> pd.DataFrame:
    """Difference of each column, paired within contexts.

    Where an arm makes no difference, retained and restart may change places within a context: the signs of its differences are
    flipped, all columns together, and the largest of the standardised means sets the level (step-down).
    """
    change = retained - restart
    signs = np.random.default_rng([seed, 3]).choice([-1.0, 1.0], (FLIPS + 1, len(change)))
    signs[0] = 1.0
    mean, low, high = cluster_bootstrap(change.T, np.arange(len(change)), weights)
    return pd.DataFrame(
        {
            "latent": np.arange(change.shape[1]),
            "retained": retained.mean(0),
            "restart": restart.mean(0),
            "difference": mean,
            "low": low,
            "high": high,
            "p_family": step_down(np.abs(signs @ change) / len(change)),
        }
    )


def halved(collected: Collected, place: str, segment: str, config: Config) -> dict[int, pd.DataFrame]:
    """`differing` on the even and on the odd contexts alone, so that what is found on one half can be tested on the other."""
    retained, restart = pair_of(collected, place, segment, "latents")
    found = {}
    for half in (0, 1):
        weights = cluster_weights(len(retained[half::2]), np.random.default_rng([config.seed, 4]), 1)
        found[half] = differing(retained[half::2], restart[half::2], config.seed, weights)
    return found


def counted(differences: Any) -> dict[str, dict[str, dict[str, int]]]:
    """By segment and reader: how many columns differ at the level, of how many that are not constantly zero, and how few hold half of
    the squared difference."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (segment, reader), own in differences.groupby(["segment", "reader"]):
        alive = (own["retained"] != 0) | (own["restart"] != 0)
        found.setdefault(segment, {})[reader] = {
            "differ": int((own["p_family"] <= LEVEL).sum()),
            "up": int(((own["p_family"] <= LEVEL) & (own["difference"] > 0)).sum()),
            "alive": int(alive.sum()),
            "half": fewest(own["difference"].to_numpy(float) ** 2),
        }
    return found


def fewest(values: Float[np.ndarray, "columns"]) -> int:
    """How many of the largest hold half of the sum."""
    return int(np.searchsorted(np.sort(values)[::-1].cumsum(), values.sum() / 2) + 1)


def untouched(collected: Collected, place: str) -> float:
    """The largest difference, relative to the largest activation, in the segment that no arm changes: round-off."""
    retained, restart = (collected(place, arm, "raw") for arm in (UNTOUCHED, f"restart {UNTOUCHED}"))
    return float((retained - restart).abs().max() / retained.abs().max())


def decoding(
    collected: Collected,
    dictionaries: Sequence[SparseFeatures],
    config: Config,
    weights: Int[np.ndarray, "resamples contexts"],
) -> pd.DataFrame:
    """Accuracy per digit of probes on the k best latents or raw dimensions, chosen in each training part, and on all; on all dimensions
    of the reconstruction, and of what it leaves out."""
    labels, contexts = collected.digits, collected.contexts
    rng = np.random.default_rng([config.seed, 5])
    folds = {split: fold_numbers(split, contexts, config.folds, rng) for split in SPLITS}
    tables = []
    with tqdm(total=len(dictionaries) * len(ARMS), desc="Fitting probes", unit="arm") as bar:
        for features in dictionaries:
            for arm in ARMS:
                rows = {reader: collected(features.place, arm, reader) for reader in READERS}
                # Of means, as decoding is linear; constants are nothing to a probe.
                rows["reconstruction"] = rows["latents"] @ features.directions.cpu().float()
                rows["remainder"] = rows["raw"] - rows["reconstruction"]
                for reader, read in rows.items():
                    every = read if len(read) == len(contexts) else read[torch.from_numpy(contexts)]
                    ks = [k for k in KS if k < every.shape[1]] if reader in READERS else []
                    for split in SPLITS:
                        table = curve(every, labels, contexts, folds[split], split, ks, weights, config.seed)
                        about = {"place": str(features.place), "arm": arm, "reader": reader, "split": split}
                        tables.append(table.assign(**about))
                bar.update()
    return pd.concat(tables, ignore_index=True)


def curve(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "digits samples"],
    contexts: Int[np.ndarray, "samples"],
    folds: Int[np.ndarray, "samples"],
    split: Split,
    ks: Sequence[int],
    weights: Int[np.ndarray, "resamples contexts"],
    seed: int,
) -> pd.DataFrame:
    """Accuracy with its interval for each k, and for k random dimensions; the last row is of all dimensions."""
    read = features[None]
    if split == "paired":
        read = paired_features(read, contexts)
    size = features.square().mean().sqrt()[None]
    every = ridge_probes(read, labels, torch.from_numpy(folds), 10, size=size).predicted[0]
    accuracy = estimate(every.eq(labels).double().mean(0).numpy(), contexts, weights)
    whole = {
        "k": features.shape[1],
        "accuracy": accuracy.mean,
        "low": accuracy.low,
        "high": accuracy.high,
        "random": np.nan,
    }
    tables = [pd.DataFrame([whole])]
    if ks:
        rng = np.random.default_rng([seed, 6])
        tables = [sparse_curves(read, labels, contexts, folds, 10, ks=ks, rng=rng).df().drop(columns="probe"), *tables]
    return pd.concat(tables, ignore_index=True)


def judged(quality: Any, seed: int) -> dict[str, Any]:
    """What a dictionary leaves unexplained, and what the model loses by it."""
    texts, latents = (quality[quality["grid"] == grid] for grid in ("texts", "latents"))
    spliced = texts[texts["clean"].notna()]
    rng = np.random.default_rng([seed, 7])
    weights, few = (cluster_weights(len(rows), rng) for rows in (texts, spliced))
    losses = {name: ratio(spliced[name], spliced["predicted"], few) for name in ("clean", "spliced", "mean", "zero")}
    return {
        "unexplained": ratio(texts["error"], texts["variance"], weights),
        "unexplained_turned": ratio(texts["turned"], texts["variance"], weights),
        "active": float(texts["active"].sum() / texts["tokens"].sum()),
        "width": len(latents),
        "dead": int((latents["density"] == 0).sum()),
        "dense": int((latents["density"] > 0.5).sum()),
        "loss": losses,
        "loss_added": ratio(spliced["spliced"] - spliced["clean"], spliced["predicted"], few),
        "kl": {name: ratio(spliced[f"kl_{name}"], spliced["predicted"], few) for name in ("spliced", "mean", "zero")},
        "recovered": ratio(spliced["kl_mean"] - spliced["kl_spliced"], spliced["kl_mean"], few),
        "texts": len(texts),
        "spliced_texts": len(spliced),
    }


def ratio(top: Any, bottom: Any, weights: Int[np.ndarray, "resamples texts"]) -> dict[str, float]:
    """A ratio of sums over texts with its interval."""
    above, below = np.asarray(top, float), np.asarray(bottom, float)
    low, high = np.percentile((weights @ above) / (weights @ below), [2.5, 97.5])
    return {"mean": float(above.sum() / below.sum()), "low": float(low), "high": float(high)}


def exchanged(table: Any, seed: int) -> dict[str, Any]:
    """By place: the KL between retained and restart, and the share of it that goes away with each set of latents."""
    found: dict[str, Any] = {}
    for place, own in table.groupby("place"):
        wide = own.groupby(["context", "set"])["kl"].mean().unstack()
        weights = cluster_weights(len(wide), np.random.default_rng([seed, 8]))
        sets: Mapping[str, Any] = {
            name: ratio(wide["retained"] - wide[name], wide["retained"], weights)
            for name in wide.columns
            if name != "retained"
        }
        apart = ratio(wide["random"] - wide["differing"], wide["retained"], weights)
        found[str(place)] = {
            "kl": ratio(wide["retained"], np.ones(len(wide)), weights),
            "sets": sets,
            "differing_less_random": apart,
        }
    return found
