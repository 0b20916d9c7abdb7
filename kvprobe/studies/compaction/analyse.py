"""From measurements to numbers: outcomes per arm, and what of them is provenance, position and delimiters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvprobe.experiments.parts import tensor_of_parts, text_of_part
from kvprobe.models.lens import Family
from kvprobe.probing.features import Features
from kvprobe.probing.fits import chosen, fit_sites
from kvprobe.probing.splits import SPLITS, centred_within, fold_numbers
from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED, estimate
from kvprobe.studies.compaction.arms import ARMS, CONTRASTS, MASK, RESTART, RETAINED, contrast
from kvprobe.studies.compaction.collect import CALIBRATION, CONDITIONS, FAMILIES, LOOKED_AT
from kvprobe.studies.compaction.config import Config
from kvprobe.tasks.compaction import KINDS
from kvprobe.tasks.designs import Target

TARGET = Target("code", tuple("0123456789"))
CHANCE = TARGET.chance
CLAIMS = 9
"""Of the headline: the distance, three factors on it, right answers and those beyond the calibration, leak, leak within
contexts and use. The intervals that decide them hold together."""
Range = tuple[float, float]

OUTCOMES = {
    "kl": "KL from full context (nats per token)",
    "agreement": "next tokens as with full context",
    "margin": "margin of the true code (nats)",
    "logprob": "log-probability of the true code (nats)",
    "leak": "digits read in new conversations",
    "paired": "digits read, centred in context",
    "prefix_summary": "answer kept: in the summary",
    "prefix_hidden": "answer kept: only in the hidden turns",
    "prefix_neither": "answer kept: nowhere",
    "right_summary": "right answers: in the summary",
    "right_hidden": "right answers: only in the hidden turns",
}
"""What is measured for every arm. An answer is kept as far as its tokens are those given with the full context."""
SHARES = frozenset(OUTCOMES) - {"kl", "margin", "logprob"}


@dataclass(frozen=True)
class Collected:
    """All contexts together.

    Attributes:
        features: by (arm, family); one row per code for retained arms, one per context for recomputed ones.
        measured: the other tensors of `collect.read_context`, stacked over contexts (codes: over all).
        texts: each context's answers by condition.
        contexts: number of the context of each code.
    """

    features: dict[tuple[str, str], Float[Tensor, "rows layers reads dim"]]
    measured: dict[str, np.ndarray]
    texts: list[dict[str, list[str]]]
    contexts: Int[np.ndarray, "samples"]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Collected":
        """Join the files that `collect` wrote, one tensor at a time so that nothing is held twice."""
        texts = [json.loads(text_of_part(path, "texts")) for path in paths]
        per_code = {name: tensor_of_parts(paths, name).numpy() for name in ("digits", "logprob", "margin", "correct")}
        names = ("kl", "agree", "between", "same", "prefix", "right", "attention")
        per_context = {name: tensor_of_parts(paths, name, stacked=True).numpy() for name in names}
        features = {
            (arm.name, family): tensor_of_parts(paths, f"{arm.name}.{family}") for arm in ARMS for family in FAMILIES
        }
        contexts = np.repeat(np.arange(len(paths)), len(per_code["digits"]) // len(paths))
        return cls(features, per_code | per_context, texts, contexts)


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        samples: one row per code and arm.
        conversations: one row per context and condition, with the answers as text.
        probes: accuracy of every probe.
        metrics: the headline numbers.
    """

    samples: pd.DataFrame
    conversations: pd.DataFrame
    probes: pd.DataFrame
    metrics: dict[str, Any]


def analyse(collected: Collected, config: Config) -> Analysis:
    """Fit the probes, estimate every outcome of every arm, and take the arms apart into effects."""
    rng = np.random.default_rng([config.seed, 2])
    count = len(collected.texts)
    probes, hits = _probe(collected, config, rng)
    outcomes = _outcomes(collected, hits)

    def of(values: np.ndarray, within: Range = UNBOUNDED) -> dict[str, Any]:
        return estimate(values, within=within).record()

    def claimed(values: np.ndarray, within: Range = UNBOUNDED) -> dict[str, Any]:
        return estimate(values, within=within, comparisons=CLAIMS).record()

    metrics: dict[str, Any] = {
        "chance": CHANCE,
        "contexts": count,
        "samples": len(collected.contexts),
        "arms": {
            arm.name: {
                name: of(values[:, index], SHARE if name in SHARES else UNBOUNDED) for name, values in outcomes.items()
            }
            for index, arm in enumerate(ARMS)
        },
        "effects": {
            name: {
                " × ".join(factors): claimed(
                    values @ np.array(contrast(factors)), DIFFERENCE if name in SHARES else UNBOUNDED
                )
                for factors in CONTRASTS
            }
            for name, values in outcomes.items()
        },
        "mask_minus_restart": {
            name: claimed(
                values[:, ARMS.index(MASK)] - values[:, ARMS.index(RESTART)],
                DIFFERENCE if name in SHARES else UNBOUNDED,
            )
            for name, values in outcomes.items()
        },
        "full": _full(collected, of),
        "calibration": _calibration(collected, of, claimed),
        "dangling": _dangling(collected, of),
        "light_cone": _light_cone(collected),
    }
    return Analysis(_sample_table(collected, hits), _conversation_table(collected), probes, metrics)


def _probe(
    collected: Collected, config: Config, rng: np.random.Generator
) -> tuple[pd.DataFrame, dict[tuple[str, str], np.ndarray]]:
    """Every probe's accuracy, and per (split, arm) how many digits the probe chosen on the inner fold read right."""
    labels = torch.from_numpy(collected.measured["digits"].T.copy())
    tables, hits = [], {}
    with tqdm(total=len(SPLITS) * len(ARMS), desc="Fitting probes", unit="arm") as bar:
        for split in SPLITS:
            folds = fold_numbers(split, collected.contexts, config.folds, rng)
            for arm in ARMS:
                rows = np.arange(len(collected.contexts)) if arm in RETAINED else collected.contexts
                tensors: dict[Family, Tensor] = {family: collected.features[arm.name, family] for family in FAMILIES}
                features = Features.of_read_outs(tensors, rows, labels, collected.contexts, TARGET)
                fits = fit_sites(features, split, folds)
                tables.append(fits.accuracies(labels, collected.contexts, arm=arm.name, split=split))
                hits[split, arm.name] = chosen(fits, folds).predicted.eq(labels).double().mean(0).numpy()
                bar.update()
    return pd.concat(tables, ignore_index=True).drop(columns="head"), hits


def _outcomes(
    collected: Collected, hits: Mapping[tuple[str, str], np.ndarray]
) -> dict[str, Float[np.ndarray, "contexts arms"]]:
    """Every outcome, averaged over what each context has of it."""
    count = len(collected.texts)
    places = [CONDITIONS.index(arm.name) for arm in ARMS]

    def by_context(per_code: np.ndarray) -> np.ndarray:
        return per_code.reshape(count, -1, *per_code.shape[1:]).mean(1)

    def probed(split: str) -> np.ndarray:
        return by_context(np.stack([hits[split, arm.name] for arm in ARMS], 1))

    measured = collected.measured
    outcomes = {
        "kl": np.nanmean(measured["kl"][:, places], -1),
        "agreement": np.nanmean(measured["agree"][:, places], -1),
        "margin": by_context(measured["margin"].sum(-1))[:, 1:],
        "logprob": by_context(measured["logprob"].sum(-1))[:, 1:],
        "leak": probed("leave-context-out"),
        "paired": probed("paired"),
    }
    for number, kind in enumerate(KINDS):
        outcomes[f"prefix_{kind}"] = measured["prefix"][:, places, number]
        if kind != "neither":
            outcomes[f"right_{kind}"] = measured["right"][:, places, number]
    return {name: outcomes[name].astype(float) for name in OUTCOMES}


def _full(collected: Collected, of: Any) -> dict[str, Any]:
    """What the full context itself does, as the ceiling of the arms."""
    count = len(collected.texts)
    first = collected.measured["margin"][:, 0].sum(-1).reshape(count, -1).mean(1)
    right = collected.measured["right"][:, 0].astype(float)
    return {
        "margin": of(first.astype(float)),
        "right_summary": of(right[:, KINDS.index("summary")], SHARE),
        "right_hidden": of(right[:, KINDS.index("hidden")], SHARE),
        "reply_tokens": float(np.isfinite(collected.measured["kl"][:, 0]).sum(-1).mean()),
    }


def _calibration(collected: Collected, of: Any, claimed: Any) -> dict[str, Any]:
    """Masking and restarting where what is hidden does not matter, and how far one is from the other."""
    masked, restarted = (CONDITIONS.index(name) for name in CALIBRATION[1:])
    kl = np.nanmean(collected.measured["kl"], -1).astype(float)
    between = np.nanmean(collected.measured["between"], -1).astype(float)
    right = collected.measured["right"][:, :, KINDS.index("summary")].astype(float)
    own = [CONDITIONS.index(arm.name) for arm in (MASK, RESTART)]
    return {
        "kl_masked": of(kl[:, masked]),
        "kl_restarted": of(kl[:, restarted]),
        "kl_masked_minus_restarted": of(kl[:, masked] - kl[:, restarted]),
        "kl_difference_beyond_calibration": of(kl[:, own[0]] - kl[:, own[1]] - kl[:, masked] + kl[:, restarted]),
        "between": of(between[:, 0]),
        "between_irrelevant": of(between[:, 1]),
        "between_beyond_calibration": of(between[:, 0] - between[:, 1]),
        "right_summary_masked": of(right[:, masked], SHARE),
        "right_summary_restarted": of(right[:, restarted], SHARE),
        "right_summary_masked_minus_restarted": of(right[:, masked] - right[:, restarted], DIFFERENCE),
        "right_summary_beyond_calibration": claimed(
            right[:, own[0]] - right[:, own[1]] - right[:, masked] + right[:, restarted]
        ),
    }


def _dangling(collected: Collected, of: Any) -> dict[str, Any]:
    """The attention that T3 spends on the hidden turns while they are in view, and where it goes when they are not."""
    full, mask, restart = np.moveaxis(collected.measured["attention"].astype(float), 1, 0)
    hidden = LOOKED_AT.index("hidden turns")
    others = [place for place in range(len(LOOKED_AT)) if place != hidden]
    mass = full[..., hidden]
    went = {LOOKED_AT[place]: of((mask - full)[..., place].mean((1, 2))) for place in others}
    return {
        "mass": of(mass.mean((1, 2))),
        "by_layer": mass.mean((0, 2)).tolist(),
        "by_head": mass.mean(0).tolist(),
        "most_by_head": float(mass.mean(0).max()),
        "went": went,
        "went_by_layer": {LOOKED_AT[place]: (mask - full)[..., place].mean((0, 2)).tolist() for place in others},
        "mask_minus_restart": {
            LOOKED_AT[place]: of(np.abs(mask - restart)[..., place].mean((1, 2))) for place in others
        },
    }


def _light_cone(collected: Collected) -> dict[str, float]:
    """How far K and V of T3 vary with the code, relative to their size, under retained arms: at layers 0 and 1, which
    it cannot reach, and at the last."""

    def variation(layer: int) -> float:
        relative = []
        for arm in RETAINED:
            for family in FAMILIES:
                features = collected.features[arm.name, family][:, layer]
                relative.append(centred_within(features, collected.contexts).abs().max() / features.abs().max())
        return float(torch.stack(relative).max())

    last = collected.features[MASK.name, "k"].shape[1] - 1
    return {"layers_0_1": max(variation(0), variation(1)), "last_layer": variation(last)}


def _sample_table(collected: Collected, hits: Mapping[tuple[str, str], np.ndarray]) -> pd.DataFrame:
    """One row per code and arm, and for the full context."""
    codes = ["".join(map(str, row)) for row in collected.measured["digits"]]
    tables = []
    for index, condition in enumerate(("full", *(arm.name for arm in ARMS))):
        columns: dict[str, Any] = {
            "sample": np.arange(len(codes)),
            "context": collected.contexts,
            "code": codes,
            "condition": condition,
            "logprob": collected.measured["logprob"][:, index].sum(1),
            "margin": collected.measured["margin"][:, index].sum(1),
            "token_accuracy": collected.measured["correct"][:, index].mean(1),
        }
        if index:
            columns |= {f"probe_{split}": hits[split, condition] for split in SPLITS}
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def _conversation_table(collected: Collected) -> pd.DataFrame:
    """One row per context and condition: the continuation, and the answers with what they are worth."""
    rows = []
    for context, texts in enumerate(collected.texts):
        for place, condition in enumerate(CONDITIONS):
            row: dict[str, Any] = {
                "context": context,
                "condition": condition,
                "kl": float(np.nanmean(collected.measured["kl"][context, place])),
                "agreement": float(np.nanmean(collected.measured["agree"][context, place])),
            }
            for number, kind in enumerate(KINDS):
                row[f"answer_{kind}"] = texts[condition][number]
                for name in ("same", "prefix", "right"):
                    row[f"{name}_{kind}"] = float(collected.measured[name][context, place, number])
            rows.append(row)
    return pd.DataFrame(rows)
