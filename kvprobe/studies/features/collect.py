"""From dictionaries to tables: what they reconstruct, what they read in every arm, what probes read in that, and what
the answer becomes when latents are exchanged.

Dictionaries, activations and one file per conversation are kept, so an interrupted run resumes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.experiments.parts import table_of_parts, tensor_of_parts, tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.sparse import eta_squared, sparse_hits
from kvprobe.probing.splits import SPLITS, Split, fold_numbers, paired_features
from kvprobe.progress import Bar
from kvprobe.report.views.latents import latent_view, peak_words
from kvprobe.saes import Dictionary, Shards, activating
from kvprobe.studies.features import Config
from kvprobe.studies.features.prepare import prepare
from kvprobe.studies.features.reading import (
    PER_CODE,
    READERS,
    RESTARTED,
    UNTOUCHED,
    Sets,
    exchange,
    judge,
    read_context,
    samples_of,
)
from kvprobe.tasks.passcode import Context, conversation

KS = (1, 4, 16, 64)
ARMS = (*PER_CODE, "restart T3")
PARTS = ("reconstruction", "remainder")
"""Of the raw activation: what the dictionary makes of it, and what it leaves out."""
DIGITS = 10
Case = tuple[int, tuple[Context, list[str]]]
EXCHANGED = 32
"""Latents of a set that is exchanged."""
DRAWS = 4
"""Random sets."""
SHOWN = 6
"""Latents of a kind whose texts the report shows."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """What was measured.

    Returns:
        `texts` and `latents`: what `reading.judge` finds. `means`: per place, segment, reader, context and latent (or
        raw dimension), its mean in both arms. `samples`: per code, place, arm, split, reader and k, the share of its
        digits that a probe reads, with the best k and with random ones. `exchanges`: see `reading.exchange`. `shown`:
        latents that stand out, by what; `activating`: the texts that they are active in. `dictionaries`: their notes.
    """
    dictionaries, shards = prepare(model, config, run)
    cases = list(enumerate(samples_of(model, config)))
    texts = [conversation(context, codes[0]).tokens(model.tokenizer) for _, (context, codes) in cases]
    turned = {str(dictionary.place): (dictionary, dictionary.rotated(config.seed)) for dictionary in dictionaries}

    def judged(features: Dictionary) -> pd.DataFrame:
        return judge(model, features, texts, config.seed)

    def read(case: Case) -> dict[str, Tensor]:
        return read_context(model, *case[1], turned)

    def exchanged(case: Case) -> pd.DataFrame:
        number, (context, codes) = case
        return exchange(model, dictionaries, context, codes[0], by_half[1 - number % 2]).assign(context=number)

    quality: Any = table_of_parts(run, dictionaries, "quality", judged, doing="Judging dictionaries", unit="dictionary")
    paths = tensor_parts(run, cases, "context", read, doing="Reading conversations", unit="conversation")
    by_half = sets_by_half(paths, dictionaries, config)
    exchanges = table_of_parts(run, cases, "exchange", exchanged, doing="Exchanging latents", unit="conversation")
    shown = pd.concat([standing_out(paths, features) for features in dictionaries], ignore_index=True)
    return {
        **{grid: quality[quality["grid"] == grid].dropna(axis=1, how="all") for grid in ("texts", "latents")},
        "means": means_of(paths, dictionaries),
        "samples": decoded(paths, dictionaries, config),
        "exchanges": exchanges,
        "shown": shown,
        "activating": pd.concat(
            [texts_of(model, dictionary, shards, shown) for dictionary in dictionaries], ignore_index=True
        ),
        "dictionaries": pd.DataFrame({"place": turned.keys(), "notes": map(notes_of, dictionaries)}),
    }


def notes_of(features: Dictionary) -> str:
    """What it was trained on, as its files say."""
    return json.dumps(dict(features.sae.cfg.metadata.items()), default=str)


Means = Float[np.ndarray, "contexts dim"]


def pair_of(paths: Sequence[Path], place: object, segment: str, reader: str) -> tuple[Means, Means]:
    """Retained and restart, the codes of a context averaged."""
    retained, restart = (
        tensor_of_parts(paths, f"{place}.{arm}{segment}.{reader}").double() for arm in ("", "restart ")
    )
    return retained.unflatten(0, (len(restart), -1)).mean(1).numpy(), restart.numpy()


def means_of(paths: Sequence[Path], dictionaries: Sequence[Dictionary]) -> pd.DataFrame:
    """Everything that both arms have, and the activations where they may not differ."""
    tables = []
    read = [*((segment, reader) for segment in RESTARTED for reader in READERS), (UNTOUCHED, "raw")]
    for features in dictionaries:
        for segment, reader in read:
            retained, restart = pair_of(paths, features.place, segment, reader)
            context, latent = (places.ravel() for places in np.indices(retained.shape))
            about = {"place": str(features.place), "segment": segment, "reader": reader}
            values = {"retained": retained.ravel(), "restart": restart.ravel()}
            tables.append(pd.DataFrame({"context": context, "latent": latent, **values}).assign(**about))
    return pd.concat(tables, ignore_index=True)


def by_change(retained: Means, restart: Means) -> Int[np.ndarray, "alive"]:
    """The latents that are ever active, those that differ most on average first."""
    alive = np.flatnonzero((retained.mean(0) != 0) | (restart.mean(0) != 0))
    return alive[np.argsort(-np.abs((retained - restart).mean(0)[alive]), kind="stable")]


def sets_by_half(paths: Sequence[Path], dictionaries: Sequence[Dictionary], config: Config) -> dict[int, Sets]:
    """The latents that differ most in T3 on the even and on the odd contexts alone, so that what is found on one half
    can be tested on the other; as many others at random, and all; by place."""
    by_half: dict[int, dict[str, dict[str, list[int]]]] = {0: {}, 1: {}}
    for features in dictionaries:
        retained, restart = pair_of(paths, features.place, "T3", "latents")
        for half in (0, 1):
            ranked = by_change(retained[half::2], restart[half::2])
            top, others = ranked[:EXCHANGED], ranked[EXCHANGED:]
            rng = np.random.default_rng([config.seed, 9, half])
            sets = {"differing": top.tolist(), "all": list(range(features.width))}
            for draw in range(DRAWS):
                sets[f"random {draw}"] = rng.permutation(others)[:EXCHANGED].tolist()
            by_half[half][str(features.place)] = sets
    return dict(by_half)


def standing_out(paths: Sequence[Path], features: Dictionary) -> pd.DataFrame:
    """The latents that differ most in each segment, and those of whose variance within conversations most lies between
    digits in T2 itself (`eta`)."""
    rows: list[dict[str, Any]] = []
    for segment in RESTARTED:
        # By size and not by p, of which many are the least that the flips allow.
        ranked = by_change(*pair_of(paths, features.place, segment, "latents"))
        rows += [{"why": segment, "latent": latent} for latent in ranked[:SHOWN].tolist()]
    labels, contexts = codes_of(paths)
    read = tensor_of_parts(paths, f"{features.place}.hidden.latents")[None]
    between = eta_squared(read, labels, DIGITS, contexts=contexts)[0].mean(0)
    best = between.topk(min(SHOWN, len(between)))
    rows += [
        {"why": "digits", "latent": latent, "eta": value}
        for latent, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return pd.DataFrame(rows).assign(place=str(features.place))


def texts_of(model: Model, features: Dictionary, shards: Shards, shown: pd.DataFrame) -> pd.DataFrame:
    """Of each latent that stands out: how often it is active in the recorded texts, and where most."""
    latents = shown.loc[shown["place"] == str(features.place), "latent"].unique().tolist()
    rows = []
    for activity in activating(features, shards, latents):
        view = asdict(latent_view(activity, model.tokenizer)) if activity.examples else None
        words = peak_words(activity, model.tokenizer)
        rows.append({"latent": activity.latent, "density": activity.density, "words": words, "view": json.dumps(view)})
    return pd.DataFrame(rows).assign(place=str(features.place))


def codes_of(paths: Sequence[Path]) -> tuple[Int[Tensor, "digits samples"], Int[np.ndarray, "samples"]]:
    """The digits of each sample, and the number of its context."""
    digits = tensor_of_parts(paths, "digits").T.contiguous()
    return digits, np.repeat(np.arange(len(paths)), digits.shape[1] // len(paths))


def decoded(paths: Sequence[Path], dictionaries: Sequence[Dictionary], config: Config) -> pd.DataFrame:
    """What probes read on the k best latents or raw dimensions, chosen in each training part, and on all; on all
    dimensions of the reconstruction, and of what it leaves out."""
    labels, contexts = codes_of(paths)
    rng = np.random.default_rng([config.seed, 5])
    folds = {split: fold_numbers(split, contexts, config.folds, rng) for split in SPLITS}
    tables = []
    with Bar(total=len(dictionaries) * len(ARMS), desc="Fitting probes", unit="arm") as bar:
        for features in dictionaries:
            for arm in ARMS:
                rows = {reader: tensor_of_parts(paths, f"{features.place}.{arm}.{reader}") for reader in READERS}
                # Of means, as decoding is linear; constants are nothing to a probe.
                rows["reconstruction"] = rows["latents"] @ features.directions.cpu().float()
                rows["remainder"] = rows["raw"] - rows["reconstruction"]
                for reader, read in rows.items():
                    every = read if len(read) == len(contexts) else read[torch.from_numpy(contexts)]
                    ks = [k for k in KS if k < every.shape[1]] if reader in READERS else []
                    for split in SPLITS:
                        table = curve(every, labels, contexts, folds[split], split, ks, config.seed)
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
    seed: int,
) -> pd.DataFrame:
    """The share of each sample's digits that is `right` for each k, and for k `random` dimensions; the rows of `every`
    are of all dimensions."""
    read = paired_features(features[None], contexts) if split == "paired" else features[None]
    size = features.square().mean().sqrt()[None]
    whole = ridge_probes(read, labels, torch.from_numpy(folds), DIGITS, size=size).predicted[0]
    known = {"sample": range(len(contexts)), "context": contexts}
    hits = sparse_hits(read, labels, folds, DIGITS, ks=ks, rng=np.random.default_rng([seed, 6]))[1] if ks else {}
    tables = [
        pd.DataFrame({**known, "k": k, "every": False, "right": best[0], "random": random[0]})
        for k, (best, random) in hits.items()
    ]
    right = whole.eq(labels).double().mean(0).numpy()
    tables.append(
        pd.DataFrame(
            {**known, "k": features.shape[1], "every": True, "right": right, "random": np.full(len(right), np.nan)}
        )
    )
    return pd.concat(tables, ignore_index=True)
