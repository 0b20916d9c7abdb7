"""From dictionaries to tables: what they reconstruct, what they read in every arm, what probes read in that, and what
the answer becomes when latents are exchanged.

Dictionaries, activations and one file per conversation are kept, so an interrupted run resumes.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.experiments.parts import Parts, tensor_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.sparse import eta_squared, hits_by_count
from kvprobe.probing.splits import SPLITS, fold_numbers
from kvprobe.progress import Bar
from kvprobe.report.views.latents import latents_table
from kvprobe.saes import Dictionary, Shards, activating, judge
from kvprobe.studies.features import Config
from kvprobe.studies.features.differences import Means, by_difference, differing_and_random
from kvprobe.studies.features.prepare import prepare
from kvprobe.studies.features.reading import (
    PER_CODE,
    READERS,
    RESTARTED,
    UNTOUCHED,
    Sets,
    exchange,
    read_context,
)
from kvprobe.tasks.passcode import Coded, coded_contexts, conversation
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import crossed

KS = (1, 4, 16, 64)
ARMS = (*PER_CODE, "restart T3")
PARTS = ("reconstruction", "remainder")
"""Of the raw activation: what the dictionary makes of it, and what it leaves out."""
DIGITS = 10
EXCHANGED = 32
"""Latents of a set that is exchanged."""
SPLICED = 12
"""Conversations in which the reconstruction takes the place of the activation."""
DRAWS = 4
"""Random sets."""
Turned = Mapping[str, tuple[Dictionary, Dictionary]]
"""By place, a dictionary, and the same turned at random."""
SHOWN = 6
"""Latents of a kind whose texts the report shows."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """What was measured.

    Returns:
        `texts` and `latents`: what `judge` finds, and how often each latent is active. `means`: per place, segment,
        reader, context and latent (or raw dimension), its mean in both arms. `samples`: per code, place, arm, split,
        reader and k, the share of its digits that a probe reads, with the best k and with random ones. `exchanges`: see
        `exchange`. `shown`: latents that stand out, by what; `activating`: the texts that they are active in.
        `dictionaries`: their notes.
    """
    dictionaries, shards = prepare(model, config, run)
    rng = np.random.default_rng([config.seed, 1])
    cases = coded_contexts(config.contexts, config.codes, rng, model.tokenizer)
    texts = [conversation(case.context, case.codes[0]).tokens(model.tokenizer) for case in cases]
    turned = {str(dictionary.place): (dictionary, dictionary.rotated(config.seed)) for dictionary in dictionaries}
    parts, doing, unit = Parts(model, config, run), "Judging dictionaries", "conversation"
    quality: Any = parts.table(judged, dictionaries, "quality", texts, doing=doing, unit="dictionary")
    paths = parts.tensors(read, cases, "context", turned, doing="Reading conversations", unit=unit)
    known = sets_by_half(paths, dictionaries, config), dictionaries
    exchanges = parts.table(exchanged, cases, "exchange", *known, doing="Exchanging latents", unit=unit)
    shown = pd.concat([standing_out(paths, features) for features in dictionaries], ignore_index=True)
    notes = [json.dumps(dict(features.sae.cfg.metadata.items()), default=str) for features in dictionaries]
    return {
        **{grid: quality[quality["grid"] == grid].dropna(axis=1, how="all") for grid in ("texts", "latents")},
        "means": means_of(paths, dictionaries),
        "samples": decoded(paths, dictionaries, config),
        "exchanges": exchanges,
        "shown": shown,
        "activating": pd.concat(
            [texts_of(model, dictionary, shards, shown) for dictionary in dictionaries], ignore_index=True
        ),
        "dictionaries": pd.DataFrame({"place": turned.keys(), "notes": notes}),
    }


def judged(model: Model, config: Config, features: Dictionary, texts: Sequence[Tokens]) -> pd.DataFrame:
    """What a dictionary makes of texts, and how often each latent is active."""
    quality = judge(model, features, texts, config.seed, SPLICED)
    rows = quality.texts.assign(grid="texts", text=range(len(texts)))
    latents = pd.DataFrame({"grid": "latents", "latent": range(features.width), "density": quality.density})
    return pd.concat([rows, latents], ignore_index=True).assign(place=str(features.place))


def read(model: Model, _: Config, case: Coded, turned: Turned) -> dict[str, Tensor]:
    """What dictionaries, and the same turned at random, read of a conversation."""
    return read_context(model, case.context, case.codes, turned)


def exchanged(
    model: Model, _: Config, case: Coded, by_half: Mapping[int, Sets], dictionaries: Sequence[Dictionary]
) -> pd.DataFrame:
    """A conversation with the sets of latents exchanged that were found on the other half."""
    sets = by_half[1 - case.number % 2]
    return exchange(model, dictionaries, case.context, case.codes[0], sets).assign(context=case.number)


def pair_of(paths: Sequence[Path], place: object, segment: str, reader: str) -> tuple[Means, Means]:
    """Retained and restart, the codes of a context averaged."""
    retained, restart = (
        tensor_of_parts(paths, f"{place}.{arm}{segment}.{reader}").double() for arm in ("", "restart ")
    )
    return retained.unflatten(0, (len(restart), -1)).mean(1).numpy(), restart.numpy()


def means_of(paths: Sequence[Path], dictionaries: Sequence[Dictionary]) -> pd.DataFrame:
    """Everything that both arms have, and the activations where they may not differ."""
    read = [*product(RESTARTED, READERS), (UNTOUCHED, "raw")]
    tables = []
    for features, (segment, reader) in product(dictionaries, read):
        retained, restart = pair_of(paths, features.place, segment, reader)
        index = {"context": range(len(retained)), "latent": range(retained.shape[1])}
        about = {"place": str(features.place), "segment": segment, "reader": reader}
        tables.append(crossed(index, {"retained": retained, "restart": restart}).assign(**about))
    return pd.concat(tables, ignore_index=True)


def sets_by_half(paths: Sequence[Path], dictionaries: Sequence[Dictionary], config: Config) -> dict[int, Sets]:
    """The latents that differ most in T3 on the even and on the odd contexts alone, so that what is found on one half
    can be tested on the other; as many others at random, and all; by place."""
    by_half: dict[int, Sets] = {}
    for half in (0, 1):
        sets = {}
        for features in dictionaries:
            retained, restart = (arm[half::2] for arm in pair_of(paths, features.place, "T3", "latents"))
            rng = np.random.default_rng([config.seed, 9, half])
            differing, random = differing_and_random(retained, restart, EXCHANGED, DRAWS, rng)
            sets[str(features.place)] = {"differing": differing, "all": range(features.width), **random}
        by_half[half] = sets
    return by_half


def standing_out(paths: Sequence[Path], features: Dictionary) -> pd.DataFrame:
    """The latents that differ most in each segment, and those of whose variance within conversations most lies between
    digits in T2 itself (`eta`)."""
    rows: list[dict[str, Any]] = []
    for segment in RESTARTED:
        ranked = by_difference(*pair_of(paths, features.place, segment, "latents"))
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
    return latents_table(activating(features, shards, latents), model.tokenizer).assign(place=str(features.place))


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
    for features, arm in Bar([*product(dictionaries, ARMS)], desc="Fitting probes", unit="arm"):
        rows = {reader: tensor_of_parts(paths, f"{features.place}.{arm}.{reader}") for reader in READERS}
        # Of means, as decoding is linear; constants are nothing to a probe.
        rows["reconstruction"] = rows["latents"] @ features.directions.cpu().float()
        rows["remainder"] = rows["raw"] - rows["reconstruction"]
        for (reader, read), split in product(rows.items(), SPLITS):
            every = read if len(read) == len(contexts) else read[torch.from_numpy(contexts)]
            ks = [k for k in KS if k < every.shape[1]] if reader in READERS else []
            table = hits_by_count(every, labels, contexts, folds[split], DIGITS, split=split, ks=ks, seed=config.seed)
            tables.append(table.assign(place=str(features.place), arm=arm, reader=reader, split=split))
    return pd.concat(tables, ignore_index=True)
