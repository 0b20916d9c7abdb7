"""From features to numbers: probes for every arm, layer, family, read-out and split, and the use measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from kvprobe.probing.splits import SPLITS, Split, centred_within, fold_numbers
from kvprobe.probing.sweep import accuracy_table, best_by_inner_fold, sites, sweep
from kvprobe.stats import cluster_weights, estimate
from kvprobe.studies.leakage.collect import FAMILIES, PER_CODE, PER_CONTEXT, USE_ARMS
from kvprobe.studies.leakage.config import Config

ARMS = ("before", "hidden", "direct", "masked", "restart")
CHANCE = 0.1


@dataclass(frozen=True)
class Collected:
    """All contexts together.

    Attributes:
        features: by (arm, family); one row per sample, or one per context for the arms that no code can reach.
        digits: of each sample's code.
        contexts: number of the context of each sample.
        use: `logprob`, `margin`, `correct` (per use arm and code token) and `kl` (per use arm), samples first.
    """

    features: dict[tuple[str, str], Float[Tensor, "rows layers reads dim"]]
    digits: Int[np.ndarray, "samples digits"]
    contexts: Int[np.ndarray, "samples"]
    use: dict[str, np.ndarray]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Collected":
        """Join the files that `collect` wrote, one tensor at a time so that nothing is held twice."""

        def joined(name: str) -> Tensor:
            pieces = []
            for path in paths:
                with safe_open(path, framework="pt") as file:
                    pieces.append(file.get_tensor(name))
            return torch.cat(pieces)

        features = {(arm, family): joined(f"{arm}.{family}") for arm in PER_CODE + PER_CONTEXT for family in FAMILIES}
        digits = joined("digits").numpy()
        use = {name: joined(name).numpy() for name in ("logprob", "margin", "correct", "kl")}
        return cls(features, digits, np.repeat(np.arange(len(paths)), len(digits) // len(paths)), use)


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        probes: one row per arm, split, family, read-out and layer: accuracy per digit with its interval.
        samples: one row per sample and condition: what the model made of the code, and what the probe read.
        metrics: the headline numbers.
    """

    probes: pd.DataFrame
    samples: pd.DataFrame
    metrics: dict[str, Any]


def analyse(collected: Collected, config: Config) -> Analysis:
    """Fit all probes and bootstrap all intervals."""
    rng = np.random.default_rng([config.seed, 2])
    single = config.contexts == 1
    splits: tuple[Split, ...] = ("random",) if single else SPLITS
    # With one context there is nothing to resample but its samples, and no claim beyond it.
    clusters = np.arange(len(collected.contexts)) if single else collected.contexts
    weights = cluster_weights(int(clusters.max()) + 1, rng)
    labels = torch.from_numpy(collected.digits.T.copy())

    tables, chosen_hits, metrics = [], {}, {"chance": CHANCE, "accuracy": {}, "leak": {}, "chosen": {}}
    with tqdm(total=len(splits) * len(ARMS) * len(FAMILIES), desc="Fitting probes", unit="sweep") as bar:
        for split in splits:
            folds = fold_numbers(split, collected.contexts, config.folds, rng)
            for arm in ARMS:
                candidates = []
                for family in FAMILIES:
                    features = collected.features[arm, family]
                    rows = collected.contexts if arm in PER_CONTEXT else np.arange(len(collected.contexts))
                    result = sweep(features, rows, labels, collected.contexts, split, folds, classes=10)
                    places = sites(features)
                    tables.append(
                        accuracy_table(result, places, labels, clusters, weights, arm=arm, split=split, family=family)
                    )
                    candidates += [(family, site, result, index) for index, site in enumerate(places)]
                    bar.update()
                predicted, picks = best_by_inner_fold(candidates, folds)
                chosen_hits[split, arm] = (predicted == collected.digits).astype(float)
                metrics["chosen"].setdefault(split, {})[arm] = picks
                metrics["accuracy"].setdefault(split, {})[arm] = asdict(
                    estimate(chosen_hits[split, arm].mean(1), clusters, weights)
                )
            for arm in ("direct", "masked"):
                leak = (chosen_hits[split, arm] - chosen_hits[split, "restart"]).mean(1)
                metrics["leak"].setdefault(split, {})[arm] = asdict(estimate(leak, clusters, weights))

    headline: Split = "random" if single else "leave-context-out"
    metrics["headline_split"] = headline
    metrics["by_digit"] = [
        asdict(estimate(chosen_hits[headline, "masked"][:, digit], clusters, weights))
        for digit in range(collected.digits.shape[1])
    ]
    metrics["use"] = _use(collected.use, clusters, weights)
    metrics["light_cone"] = _light_cone(collected)
    metrics["samples"], metrics["contexts"] = len(clusters), config.contexts
    samples = _sample_table(collected, {arm: chosen_hits[headline, arm] for arm in ARMS})
    return Analysis(pd.concat(tables, ignore_index=True), samples, metrics)


def _use(
    use: Mapping[str, np.ndarray], clusters: Int[np.ndarray, "samples"], weights: Int[np.ndarray, "_ _"]
) -> dict[str, Any]:
    def of(values: np.ndarray) -> dict[str, float]:
        return asdict(estimate(values.astype(float), clusters, weights))

    logprob, margin = use["logprob"].sum(2), use["margin"].sum(2)
    measured: dict[str, Any] = {
        arm: {
            "logprob": of(logprob[:, index]),
            "margin": of(margin[:, index]),
            "token_accuracy": of(use["correct"][:, index].mean(1)),
            "kl_from_full": of(use["kl"][:, index]),
        }
        for index, arm in enumerate(USE_ARMS)
    }
    retained, restart = USE_ARMS.index("retained"), USE_ARMS.index("restart")
    measured["delta_u"] = of(logprob[:, retained] - logprob[:, restart])
    measured["delta_margin"] = of(margin[:, retained] - margin[:, restart])
    measured["delta_kl"] = of(use["kl"][:, retained] - use["kl"][:, restart])
    return measured


def _light_cone(collected: Collected) -> dict[str, float]:
    """How far K and V of the masked arm vary with the code, relative to their size, at layers 0 and 1 (which it
    cannot reach) and at the last; of what the probes read, the largest over layers and families."""

    def variation(layer: int) -> float:
        relative = []
        for family in ("k", "v"):
            features = collected.features["masked", family][:, layer]
            varying = centred_within(features, collected.contexts)
            relative.append(varying.abs().max() / features.abs().max())
        return float(torch.stack(relative).max())

    last = collected.features["masked", "k"].shape[1] - 1
    return {"layers_0_1": max(variation(0), variation(1)), "last_layer": variation(last)}


def _sample_table(collected: Collected, hits: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """One row per sample and condition."""
    codes = ["".join(map(str, row)) for row in collected.digits]
    tables = []
    for index, arm in enumerate(USE_ARMS):
        tables.append(
            pd.DataFrame(
                {
                    "sample": np.arange(len(codes)),
                    "context": collected.contexts,
                    "code": codes,
                    "measure": "use",
                    "condition": arm,
                    "logprob": collected.use["logprob"][:, index].sum(1),
                    "margin": collected.use["margin"][:, index].sum(1),
                    "kl_from_full": collected.use["kl"][:, index],
                    "token_accuracy": collected.use["correct"][:, index].mean(1),
                }
            )
        )
    for arm, hit in hits.items():
        tables.append(
            pd.DataFrame(
                {
                    "sample": np.arange(len(codes)),
                    "context": collected.contexts,
                    "code": codes,
                    "measure": "probe",
                    "condition": arm,
                    "digits_read": hit.sum(1),
                }
            )
        )
    return pd.concat(tables, ignore_index=True)
