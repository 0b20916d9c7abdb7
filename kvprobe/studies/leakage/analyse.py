"""From features to numbers: probes with all their controls for every arm, and the use measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.experiments.parts import tensor_of_parts
from kvprobe.inference.model import Model
from kvprobe.probing.claims import CONTROL, FLOOR, Probing
from kvprobe.probing.differences import less_restart, nothing
from kvprobe.probing.features import Features
from kvprobe.probing.intervals import LEVEL, held_out
from kvprobe.probing.probe import embeddings
from kvprobe.probing.probe_features import probe_features
from kvprobe.probing.splits import centred_within
from kvprobe.stats import SHARE, UNBOUNDED, estimate
from kvprobe.studies.leakage.collect import FAMILIES, PER_CONTEXT, PER_SECRET, USE_ARMS
from kvprobe.studies.leakage.config import Config
from kvprobe.tasks.designs import Target

ARMS = ("before", "hidden", "direct", "masked", "restart")
CHANGED = {"masked": "masked less restart", "direct": "direct less restart"}
"""Arms of what the hidden turns changed: slots less those of their restart."""

FLOORS = {"direct": "direct restart", "masked": "restart"}
"""Which arm holds the same tokens at the same positions, computed without the hidden turns."""


@dataclass(frozen=True)
class Collected:
    """All contexts together.

    Attributes:
        vectors: by (arm, family); one row per sample, or one per context for the arms that no secret can reach.
        texts: by arm, the tokens that were read, per context.
        labels: of each sample's secret.
        contexts: number of the context of each sample.
        use: `logprob`, `margin`, `correct` (per use arm and token) and `kl` (per use arm), samples first.
        target: what is to be recovered.
    """

    vectors: dict[tuple[str, str], Float[Tensor, "rows layers reads dim"]]
    texts: dict[str, tuple[tuple[int, ...], ...]]
    labels: Int[np.ndarray, "samples targets"]
    contexts: Int[np.ndarray, "samples"]
    use: dict[str, np.ndarray]
    target: Target

    @classmethod
    def load(cls, paths: Sequence[Path], target: Target) -> "Collected":
        """Join the files that `collect` wrote, one tensor at a time so that nothing is held twice."""

        vectors = {
            (arm, family): tensor_of_parts(paths, f"{arm}.{family}")
            for arm in PER_SECRET + PER_CONTEXT
            for family in FAMILIES
        }
        texts = {arm: tuple(tuple(tensor_of_parts([path], f"text.{arm}").tolist()) for path in paths) for arm in FLOORS}
        labels = tensor_of_parts(paths, "labels").numpy()
        use = {name: tensor_of_parts(paths, name).numpy() for name in ("logprob", "margin", "correct", "kl")}
        return cls(vectors, texts, labels, np.repeat(np.arange(len(paths)), len(labels) // len(paths)), use, target)

    def features(self, arm: str) -> Features:
        """What probes read of an arm."""
        samples = np.arange(len(self.contexts))
        texts = self.texts.get(arm)
        return Features.of_read_outs(
            {family: self.vectors[arm, family] for family in FAMILIES},
            self.contexts if arm in PER_CONTEXT else samples,
            torch.from_numpy(self.labels.T.copy()),
            self.contexts,
            self.target,
            None if texts is None else tuple(texts[context] for context in self.contexts),
        )


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        probings: by arm, what probes made of it.
        probes: one row per arm, split, family, read-out and layer; see `Probing.table`.
        readings: one row per arm, split and reading; see `Probing.summary`.
        samples: one row per sample and condition: what the model made of the secret, and what the probe read.
        metrics: the headline numbers.
    """

    probings: dict[str, Probing]
    probes: pd.DataFrame
    readings: pd.DataFrame
    samples: pd.DataFrame
    metrics: dict[str, Any]


def analyse(model: Model, collected: Collected, untrained: Collected | None, config: Config) -> Analysis:
    """Fit all probes and find all intervals.

    Args:
        untrained: what a model before training gave on the same conversations.
    """
    rng = np.random.default_rng([config.seed, 2])
    probings = {}
    for arm in ("masked", "direct", "hidden"):
        features = collected.features(arm)
        floors = {}
        if arm in FLOORS:
            floors = {FLOOR: collected.features(FLOORS[arm]), "embedding": embeddings(model, features)}
            if untrained is not None:
                floors["untrained"] = untrained.features(arm)
        if arm == "masked":
            floors["before"] = collected.features("before")
        # The ceiling needs no p-values.
        permutations = config.permutations if arm in FLOORS else 0
        probings[arm] = probe_features(
            features, floors, folds=config.folds, permutations=permutations, rng=rng, note=f"Fitting probes, {arm}"
        )
    # In one conversation the restart is one vector, and taking it away changes nothing.
    for arm, name in CHANGED.items() if config.contexts > 1 else ():
        changed = less_restart(collected.features(arm), collected.features(FLOORS[arm]))
        probings[name] = probe_features(
            changed,
            {FLOOR: nothing(changed)},
            folds=config.folds,
            permutations=config.permutations,
            rng=rng,
            note=f"Fitting probes, {name}",
        )

    tables = {arm: probing.table for arm, probing in probings.items()}
    floors = probings["masked"].floors
    tables |= {arm: floors[floors["floor"] == arm].drop(columns="floor") for arm in ("before", "restart")}
    drawn = [*ARMS, *(name for name in CHANGED.values() if name in tables)]
    probes = pd.concat([tables[arm].assign(arm=arm) for arm in drawn], ignore_index=True)
    readings = pd.concat([each.summary.assign(arm=arm) for arm, each in probings.items()], ignore_index=True)
    splits = list(probings["masked"].picks)
    headline = "leave-context-out" if "leave-context-out" in splits else "random"
    clusters = probings["masked"].clusters
    masked = probings["masked"].right[headline, "retained"]
    metrics = {
        "secret": config.secret,
        "chance": collected.target.chance,
        "headline_split": headline,
        **_headlines(probings, splits),
        "by_place": {
            place: held_out(masked[index].astype(float), clusters, SHARE).record()
            for index, place in enumerate(collected.target.places)
        },
        "use": _use(collected.use, clusters),
        "claims": _claims(probings, headline, collected.use, clusters),
        "light_cone": _light_cone(collected),
        "samples": len(clusters),
        "contexts": config.contexts,
        "clusters": len(set(clusters.tolist())),
    }
    right = {arm: probing.right[headline, "retained"] for arm, probing in probings.items()}
    right |= {arm: probings["masked"].right[headline, arm] for arm in ("before", "restart")}
    texts = ["-".join(collected.target.classes[label] for label in row) for row in collected.labels]
    return Analysis(probings, probes, readings, _sample_table(collected, texts, right), metrics)


def _headlines(probings: Mapping[str, Probing], splits: Sequence[str]) -> dict[str, Any]:
    """By split and arm, of the probe chosen on inner folds: accuracy, bits, leak, selectivity; and what the scan of all
    sites found."""
    out: dict[str, Any] = {
        name: {split: {} for split in splits} for name in ("accuracy", "bits", "leak", "selectivity")
    }
    out |= {"chosen": {split: {} for split in splits}, "scan": {split: {} for split in splits}}
    for arm, probing in probings.items():
        for split in splits:
            readings = probing.readings(split)
            for name in ("accuracy", "bits"):
                out[name][split][arm] = probing.reading(split, "retained", name).record()
            if CONTROL in readings:
                out["selectivity"][split][arm] = probing.reading(split, CONTROL, "lead").record()
            out["chosen"][split][arm] = [
                {"fold": fold, "family": family, **site._asdict()}
                for fold, (family, site) in enumerate(probing.picks[split])
            ]
            if FLOOR in readings:
                out["leak"][split][arm] = probing.reading(split, FLOOR, "lead").record()
                own: Any = probing.table[probing.table["split"] == split]
                found = own[own["p_family"] <= LEVEL]
                out["scan"][split][arm] = {
                    "sites": len(own),
                    "found": len(found),
                    "lowest_layer": int(found["layer"].min()) if len(found) else None,
                    "best": float(own["accuracy"].max()),
                }
            if arm == "masked":
                for floor in ("restart", "before"):
                    for name in ("accuracy", "bits"):
                        out[name][split][floor] = probing.reading(split, floor, name).record()
    return out


def _claims(
    probings: Mapping[str, Probing],
    headline: str,
    use: Mapping[str, np.ndarray],
    clusters: Int[np.ndarray, "samples"],
) -> dict[str, Any]:
    """All that the answer may claim, with intervals that hold together: leaks of T3, of what it changed, and within
    conversations, each with whether permuted labels confirm it, and what masking adds to the margin of the truth."""
    leaks = {"leak": ("masked", headline)}
    if CHANGED["masked"] in probings:
        leaks |= {"changed": (CHANGED["masked"], headline), "inside": ("masked", "paired")}
    comparisons = len(leaks) + 1
    claims: dict[str, Any] = {
        name: probings[arm].lead(split, FLOOR, comparisons).record() | {"confirmed": probings[arm].confirmed(split)}
        for name, (arm, split) in leaks.items()
    }
    claims["use"] = estimate(_gained(use["margin"]), clusters, UNBOUNDED, comparisons).record()
    return claims


def _gained(measure: Float[np.ndarray, "samples arms tokens"]) -> Float[np.ndarray, "samples"]:
    """What masking gives beyond a restart."""
    summed = measure.astype(float).sum(2)
    return summed[:, USE_ARMS.index("retained")] - summed[:, USE_ARMS.index("restart")]


def _use(use: Mapping[str, np.ndarray], clusters: Int[np.ndarray, "samples"]) -> dict[str, Any]:
    def of(values: np.ndarray, within: tuple[float, float] = UNBOUNDED) -> dict[str, Any]:
        return estimate(values.astype(float), clusters, within).record()

    logprob, margin = use["logprob"].sum(2), use["margin"].sum(2)
    measured: dict[str, Any] = {
        arm: {
            "logprob": of(logprob[:, index]),
            "margin": of(margin[:, index]),
            "token_accuracy": of(use["correct"][:, index].mean(1), SHARE),
            "kl_from_full": of(use["kl"][:, index]),
        }
        for index, arm in enumerate(USE_ARMS)
    }
    retained, restart = USE_ARMS.index("retained"), USE_ARMS.index("restart")
    measured["delta_u"] = of(_gained(use["logprob"]))
    measured["delta_margin"] = of(_gained(use["margin"]))
    measured["delta_kl"] = of(use["kl"][:, retained] - use["kl"][:, restart])
    return measured


def _light_cone(collected: Collected) -> dict[str, float]:
    """How far K and V of the masked arm vary with the secret, relative to their size, at layers 0 and 1 (which it
    cannot reach) and at the last; of what the probes read, the largest over layers and families."""

    def variation(layer: int) -> float:
        relative = []
        for family in ("k", "v"):
            features = collected.vectors["masked", family][:, layer]
            varying = centred_within(features, collected.contexts)
            relative.append(varying.abs().max() / features.abs().max())
        return float(torch.stack(relative).max())

    last = collected.vectors["masked", "k"].shape[1] - 1
    return {"layers_0_1": max(variation(0), variation(1)), "last_layer": variation(last)}


def _sample_table(collected: Collected, texts: Sequence[str], right: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """One row per sample and condition."""
    samples = {"sample": np.arange(len(texts)), "context": collected.contexts, "secret": texts}
    tables = [
        pd.DataFrame(
            {
                **samples,
                "measure": "use",
                "condition": arm,
                "logprob": collected.use["logprob"][:, index].sum(1),
                "margin": collected.use["margin"][:, index].sum(1),
                "kl_from_full": collected.use["kl"][:, index],
                "token_accuracy": collected.use["correct"][:, index].mean(1),
            }
        )
        for index, arm in enumerate(USE_ARMS)
    ]
    tables += [
        pd.DataFrame({**samples, "measure": "probe", "condition": arm, "places_read": right[arm].sum(0)})
        for arm in ARMS
    ]
    return pd.concat(tables, ignore_index=True)
