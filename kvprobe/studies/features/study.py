"""The features study from start to report data."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvprobe.experiments.begin import begin
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.sparse import eta_squared
from kvprobe.report.document import TokenView
from kvprobe.report.views.latents import latent_view, peak_words
from kvprobe.saes import Dictionary, Shards, activating
from kvprobe.studies.features.analyse import Analysis, analyse, exchanged, halved
from kvprobe.studies.features.collect import RESTARTED, Collected, collect, collect_exchanges, collect_quality
from kvprobe.studies.features.config import Config
from kvprobe.studies.features.figures import draw_all
from kvprobe.studies.features.narrative import narrate
from kvprobe.studies.features.prepare import content_of, prepare, recording

NAME = "features"
EXCHANGED = 32
"""Latents of a set that is exchanged."""
DRAWS = 4
"""Random sets."""
SHOWN = 6
"""Latents of a kind whose texts the report shows."""


def run(config: Config, root: Path = Path("runs"), name: str | None = None) -> Run:
    """Run the study (or resume, or find it finished) and return its directory.

    Raises:
        UserError: a setting that does not fit the model, or a directory that holds another run.
    """
    model, directory = begin(NAME, config, root, name, {"dictionaries": content_of(config)})
    if directory.finished:
        return directory
    dictionaries, shards = prepare(model, config, directory)
    quality = collect_quality(model, dictionaries, config, directory)
    collected = Collected(collect(model, dictionaries, config, directory))
    analysis = analyse(collected, dictionaries, quality, config)
    exchanges = collect_exchanges(model, dictionaries, sets_by_half(collected, dictionaries, config), config, directory)
    metrics = analysis.metrics
    metrics["exchange"], metrics["exchanged"] = exchanged(exchanges), EXCHANGED
    looked_at = {str(each.place): shown(model, each, shards, collected, analysis) for each in dictionaries}
    metrics["shown"] = {place: rows for place, (rows, _) in looked_at.items()}
    metrics["precision"] = float(torch.finfo(model.lanes.dtype).eps)
    metrics["trained_on"] = [dict(each.sae.cfg.metadata.items()) for each in dictionaries]
    directory.save_table("samples", quality)
    directory.save_table("differences", analysis.differences)
    directory.save_table("curves", analysis.curves)
    directory.save_table("exchanges", exchanges)
    draw_all(analysis.differences, analysis.curves, quality, metrics, directory.path / "figures")
    views = {place: views for place, (_, views) in looked_at.items()}
    report = narrate(metrics, analysis.curves, config, model, directory.environment, views)
    directory.finish(metrics, report.to_dict())
    shutil.rmtree(recording(directory))
    return directory


def sets_by_half(
    collected: Collected, dictionaries: Sequence[Dictionary], config: Config
) -> dict[int, dict[str, dict[str, list[int]]]]:
    """The latents that differ most in T3 on each half of the contexts, as many others at random, and all; by place."""
    found: dict[int, dict[str, dict[str, list[int]]]] = {0: {}, 1: {}}
    for features in dictionaries:
        halves: dict[int, Any] = dict(halved(collected, str(features.place), "T3", config))
        for half, table in halves.items():
            alive = table[(table["retained"] != 0) | (table["restart"] != 0)]
            ranked = alive["latent"].to_numpy()[np.argsort(-alive["difference"].abs().to_numpy(), kind="stable")]
            top, others = ranked[:EXCHANGED], ranked[EXCHANGED:]
            rng = np.random.default_rng([config.seed, 9, half])
            sets = {"differing": top.tolist(), "all": list(range(features.width))}
            for draw in range(DRAWS):
                sets[f"random {draw}"] = rng.permutation(others)[:EXCHANGED].tolist()
            found[half][str(features.place)] = sets
    return found


def shown(
    model: Model, features: Dictionary, shards: Shards, collected: Collected, analysis: Analysis
) -> tuple[list[dict[str, Any]], list[TokenView]]:
    """The latents that differ most in each segment, and those that tell most of the digits in T2 itself: what to say of
    each, and the texts that they are most active in."""
    own: Any = analysis.differences
    own = own[(own["place"] == str(features.place)) & (own["reader"] == "latents")]
    rows: list[dict[str, Any]] = []
    for segment in RESTARTED:
        table = own[own["segment"] == segment]
        # By size and not by p, of which many are the least that the flips allow.
        table = table.loc[table["difference"].abs().sort_values(ascending=False).index].head(SHOWN)
        rows += [{"why": segment, **row} for row in table.to_dict("records")]
    read = collected(str(features.place), "hidden", "latents")[None]
    told = eta_squared(read, collected.digits, 10, contexts=collected.contexts)[0].mean(0)
    best = told.topk(min(SHOWN, len(told)))
    rows += [
        {"why": "digits", "latent": latent, "eta": value}
        for latent, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    latents = list(dict.fromkeys(int(row["latent"]) for row in rows))
    found = dict(zip(latents, activating(features, shards, latents), strict=True))
    for row in rows:
        each = found[int(row["latent"])]
        row["density"], row["words"] = each.density, peak_words(each, model.tokenizer)
    return rows, [latent_view(each, model.tokenizer) for each in found.values() if each.examples]
