"""From means of latents to numbers: how good the dictionaries are, which latents differ, which tell the code, which
matter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvprobe.probing.intervals import LEVEL, held_out
from kvprobe.probing.permutation import step_down
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.sparse import sparse_curves
from kvprobe.probing.splits import SPLITS, Split, fold_numbers, paired_features
from kvprobe.saes import Dictionary
from kvprobe.stats import DIFFERENCE, SHARE, Estimate, means, ratio
from kvprobe.studies.features.collect import PER_CODE, READERS, RESTARTED, UNTOUCHED, Collected
from kvprobe.studies.features.config import Config

CHANCE = 0.1
FLIPS = 1999
"""Sign flips of the null; no p can be below 1 / (FLIPS + 1)."""
KS = (1, 4, 16, 64)
ARMS = (*PER_CODE, "restart T3")
PARTS = ("reconstruction", "remainder")
"""Of the raw activation: what the dictionary makes of it, and what it leaves out."""


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        differences: one row per place, segment, reader and latent (or raw dimension): mean in both arms, difference
            with its interval, and the p-value corrected for all of them.
        curves: one row per place, arm, split, reader and k: accuracy per digit with its interval; the largest k is all
            dimensions.
        metrics: the headline numbers.
    """

    differences: pd.DataFrame
    curves: pd.DataFrame
    metrics: dict[str, Any]


def analyse(collected: Collected, dictionaries: Sequence[Dictionary], quality: Any, config: Config) -> Analysis:
    """Everything but what latents do to the answer."""
    places = [str(features.place) for features in dictionaries]
    differences = pd.concat(
        [
            differing(*pair_of(collected, place, segment, reader), config.seed).assign(
                place=place, segment=segment, reader=reader
            )
            for place in places
            for segment in RESTARTED
            for reader in READERS
        ],
        ignore_index=True,
    )
    curves, claims = decoding(collected, dictionaries, config)
    metrics = {
        "chance": CHANCE,
        "contexts": config.contexts,
        "samples": config.contexts * config.codes,
        "places": places,
        "quality": {place: judged(quality[quality["place"] == place]) for place in places},
        "untouched": {place: untouched(collected, place) for place in places},
        "differing": {place: counted(differences[differences["place"] == place], claimed(places)) for place in places},
        "claims": claims,
    }
    return Analysis(differences, curves, metrics)


def claimed(places: Sequence[str]) -> int:
    """How much the answer may claim: that latents and raw dimensions differ, that the latents matter, and at each place
    that a single latent tells more or less than a single dimension, and that T3 is read."""
    return len(("latents", "raw")) + 1 + 2 * len(places)


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
) -> pd.DataFrame:
    """Difference of each column, paired within contexts.

    Where an arm makes no difference, retained and restart may change places within a context: the signs of its
    differences are flipped, all columns together, and the largest of the standardised means sets the level (step-down).
    """
    change = retained - restart
    signs = np.random.default_rng([seed, 3]).choice([-1.0, 1.0], (FLIPS + 1, len(change)))
    signs[0] = 1.0
    mean, low, high = means(change.T, np.arange(len(change)))
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
    """`differing` on the even and on the odd contexts alone, so that what is found on one half can be tested on the
    other."""
    retained, restart = pair_of(collected, place, segment, "latents")
    return {half: differing(retained[half::2], restart[half::2], config.seed) for half in (0, 1)}


def counted(differences: Any, comparisons: int) -> dict[str, dict[str, dict[str, int]]]:
    """By segment and reader: how many columns differ at the level, and where it is shared with all that the answer
    claims (`claimed`); of how many that are not constantly zero; and how few hold half of the squared difference."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (segment, reader), own in differences.groupby(["segment", "reader"]):
        alive = (own["retained"] != 0) | (own["restart"] != 0)
        found.setdefault(segment, {})[reader] = {
            "differ": int((own["p_family"] <= LEVEL).sum()),
            "claimed": int((own["p_family"] <= LEVEL / comparisons).sum()),
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
    dictionaries: Sequence[Dictionary],
    config: Config,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Accuracy per digit of probes on the k best latents or raw dimensions, chosen in each training part, and on all;
    on all dimensions of the reconstruction, and of what it leaves out.

    And by place, with intervals that hold together: how much more the best single latent shows of T2 itself than the
    best single dimension (`single`), and all latents of T3 than those of its restart (`read`).
    """
    labels, contexts = collected.digits, collected.contexts
    rng = np.random.default_rng([config.seed, 5])
    folds = {split: fold_numbers(split, contexts, config.folds, rng) for split in SPLITS}
    tables, single, whole = [], {}, {}
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
                        table, hits = curve(every, labels, contexts, folds[split], split, ks, config.seed)
                        if (arm, split) == ("hidden", "paired") and reader in READERS:
                            single[str(features.place), reader] = hits[1]
                        if split == "leave-context-out" and reader == "latents":
                            whole[str(features.place), arm] = hits[every.shape[1]]
                        about = {"place": str(features.place), "arm": arm, "reader": reader, "split": split}
                        tables.append(table.assign(**about))
                bar.update()
    places = [str(features.place) for features in dictionaries]

    def beyond(own: np.ndarray, other: np.ndarray) -> dict[str, Any]:
        return held_out(own - other, contexts, DIFFERENCE, claimed(places)).record()

    claims = {
        "single": {place: beyond(single[place, "latents"], single[place, "raw"]) for place in places},
        "read": {place: beyond(whole[place, "T3"], whole[place, "restart T3"]) for place in places},
    }
    return pd.concat(tables, ignore_index=True), claims


def curve(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "digits samples"],
    contexts: Int[np.ndarray, "samples"],
    folds: Int[np.ndarray, "samples"],
    split: Split,
    ks: Sequence[int],
    seed: int,
) -> tuple[pd.DataFrame, dict[int, Float[np.ndarray, "samples"]]]:
    """Accuracy with its interval for each k, and for k random dimensions; the last row is of all dimensions. And by k,
    the share of digits that is read right of each sample."""
    read = features[None]
    if split == "paired":
        read = paired_features(read, contexts)
    size = features.square().mean().sqrt()[None]
    every = ridge_probes(read, labels, torch.from_numpy(folds), 10, size=size).predicted[0]
    hits = {features.shape[1]: every.eq(labels).double().mean(0).numpy()}
    accuracy = held_out(hits[features.shape[1]], contexts, SHARE)
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
        sparse = sparse_curves(read, labels, contexts, folds, 10, ks=ks, rng=rng)
        tables = [sparse.df().drop(columns="probe"), *tables]
        hits |= {k: best[0] for k, (best, _) in sparse.hits.items()}
    return pd.concat(tables, ignore_index=True), hits


def _ratio(top: Any, bottom: Any, comparisons: int = 1) -> Estimate:
    """`kvprobe.stats.ratio` of two columns."""
    return ratio(np.asarray(top, float), np.asarray(bottom, float), comparisons=comparisons)


def judged(quality: Any) -> dict[str, Any]:
    """What a dictionary leaves unexplained, and what the model loses by it."""
    texts, latents = (quality[quality["grid"] == grid] for grid in ("texts", "latents"))
    spliced = texts[texts["clean"].notna()]
    losses = {
        name: _ratio(spliced[name], spliced["predicted"]).record() for name in ("clean", "spliced", "mean", "zero")
    }
    return {
        "unexplained": _ratio(texts["error"], texts["variance"]).record(),
        "unexplained_turned": _ratio(texts["turned"], texts["variance"]).record(),
        "active": float(texts["active"].sum() / texts["tokens"].sum()),
        "width": len(latents),
        "dead": int((latents["density"] == 0).sum()),
        "dense": int((latents["density"] > 0.5).sum()),
        "loss": losses,
        "loss_added": _ratio(spliced["spliced"] - spliced["clean"], spliced["predicted"]).record(),
        "kl": {
            name: _ratio(spliced[f"kl_{name}"], spliced["predicted"]).record() for name in ("spliced", "mean", "zero")
        },
        "recovered": _ratio(spliced["kl_mean"] - spliced["kl_spliced"], spliced["kl_mean"]).record(),
        "texts": len(texts),
        "spliced_texts": len(spliced),
    }


def exchanged(table: Any) -> dict[str, Any]:
    """By place: the KL between retained and restart, and the share of it that goes away with each set of latents."""
    found: dict[str, Any] = {}
    for place, own in table.groupby("place"):
        wide = own.groupby(["context", "set"])["kl"].mean().unstack()
        sets: Mapping[str, Any] = {
            name: _ratio(wide["retained"] - wide[name], wide["retained"]).record()
            for name in wide.columns
            if name != "retained"
        }
        apart = wide["random"] - wide["differing"]
        found[str(place)] = {
            "kl": _ratio(wide["retained"], np.ones(len(wide))).record(),
            "sets": sets,
            "differing_less_random": _ratio(apart, wide["retained"]).record(),
            "claim": _ratio(apart, wide["retained"], comparisons=claimed(table["place"].unique().tolist())).record(),
        }
    return found
