"""From maps to numbers: how much K and V carry, where, in which layers, and what the controls say.

A band is the smallest run of adjacent layers whose single-layer effects (means over pairs, summed over segments) add up
to at least 80 % of what those of all layers add up to. It is found on one half of the facts and then patched at once on
the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvprobe.patching.pairs import pooled, summarise
from kvprobe.studies.patching.collect import (
    BANDS,
    EVERYTHING,
    HEADS,
    LAYERS,
    RESIDUAL,
    SAME,
    VALUE,
    WHOLE,
    Bands,
)
from kvprobe.studies.patching.config import Config

SHARE = 0.8
"""Of the summed effects that a band must hold."""
FEWEST = 4
"""Facts that the model must be able to do before anything is said of where they are read: two in each half."""
PARTS = ("K", "V", "KV")
CLAIMS = 3
"""Of the headline: what K carries, what V carries, and which carries more. Their intervals hold together."""


def bands_by_half(table: Any, n_layers: int) -> Bands:
    """The bands of K and of V on each half of the facts; none where a half has too few facts, or no effect toward the
    donor."""
    known = table[table["able"]]
    halves = [int(half) for half in sorted(known["half"].unique())]
    if known["cluster"].nunique() < FEWEST or len(halves) < 2:
        return {}
    bands: dict[str, dict[int, range]] = {}
    for part in ("K", "V"):
        found = {half: band_of(profile(known[known["half"] == half], part, n_layers)) for half in halves}
        if None not in found.values():
            bands[part] = {half: band for half, band in found.items() if band is not None}
    return bands


def profile(table: Any, part: str, n_layers: int) -> Float[np.ndarray, "layers"]:
    """What swapping one part of each single layer does, pooled over pairs and summed over segments: the share of the
    way."""
    cells = table[(table["grid"] == LAYERS) & (table["part"] == part)]
    ways = cells.drop_duplicates("pair")["way"].sum()
    effects = cells.groupby(cells["layer"].astype(int))["effect"].sum()
    return (effects / ways).reindex(range(n_layers), fill_value=0.0).to_numpy()


def band_of(effects: Float[np.ndarray, "layers"], share: float = SHARE) -> range | None:
    """The smallest run of layers that holds this share of the sum, the largest sum among equals; None if the sum is no
    effect toward the donor."""
    whole = float(effects.sum())
    if whole <= 0:
        return None
    sums = np.concatenate([[0.0], np.cumsum(effects)])
    for length in range(1, len(effects) + 1):
        runs = sums[length:] - sums[:-length]
        first = int(runs.argmax())
        if runs[first] >= share * whole:
            return range(first, first + length)
    return None


def analyse(table: Any, example: Any, bands: Bands, config: Config, n_layers: int) -> dict[str, Any]:
    """All numbers of a run; only its pairs where the model cannot do enough of them."""
    found: dict[str, Any] = {"pairs": _pairs(table), "controls": _controls(table), "n_layers": n_layers}
    known = table[table["able"]]
    found["enough"] = known["cluster"].nunique() >= FEWEST
    if not found["enough"]:
        return found
    whole, everything = (known[known["grid"] == grid] for grid in (WHOLE, EVERYTHING))
    wide = everything.pivot(index="pair", columns="part", values="effect")
    pairs = everything.drop_duplicates("pair").set_index("pair")
    found["everything"] = {part: _pooled(everything[everything["part"] == part], CLAIMS) for part in PARTS}
    found["difference"] = _pooled(pairs.assign(effect=wide["V"] - wide["K"]).reset_index(), CLAIMS)
    found["interaction"] = _pooled(pairs.assign(effect=wide["KV"] - wide["K"] - wide["V"]).reset_index())
    found["whole"] = _listed(whole, ["segment", "part"])
    found["by_kind"] = _listed(everything, ["kind", "part"])
    found["layers"] = _listed(known[known["grid"] == LAYERS], ["layer", "segment", "part"])
    residual = known[known["grid"] == RESIDUAL]
    found["residual"] = _listed(residual, ["layer"]) if len(residual) else []
    heads = known[(known["grid"] == HEADS) & (known["segment"] == VALUE)]
    found["heads"] = _listed(heads.assign(effect=heads["score"]), ["layer", "head", "part"])
    found["attribution"] = _agreement(known)
    found["bands"] = {part: _band(known, bands, part, n_layers) for part in ("K", "V")}
    found["example"] = _example(example) if example is not None else None
    return found


def _pairs(table: Any) -> dict[str, Any]:
    rows = table.drop_duplicates("pair")
    return {
        "runs": len(rows),
        "facts": int(rows["cluster"].nunique()),
        "able_runs": int(rows["able"].sum()),
        "able_facts": int(rows.loc[rows["able"], "cluster"].nunique()),
        "kinds": [
            {"kind": kind, "runs": len(mine), "able": int(mine["able"].sum())}
            for kind, mine in rows.groupby("kind", sort=False)
        ],
    }


def _controls(table: Any) -> dict[str, float]:
    """Largest departures, in logits, from what must hold exactly; over all runs, also those that the model cannot
    do."""
    whole = table[table["grid"] == WHOLE]
    names = list(dict.fromkeys(whole["segment"]))
    early = whole[whole["segment"].isin(names[: names.index(VALUE)])]
    swapped = table[(table["grid"] == EVERYTHING) & (table["part"] == "KV")]
    return {
        "light_cone": float(early["effect"].abs().max()),
        "same": float(table.loc[table["grid"] == SAME, "effect"].abs().max()),
        "donor": float((swapped["value"] - swapped["donor"]).abs().max()),
        "largest": float(table.loc[table["grid"].isin([WHOLE, EVERYTHING]), "value"].abs().max()),
    }


def _band(known: Any, bands: Bands, part: str, n_layers: int) -> dict[str, Any] | None:
    """The band on all facts; those of the halves, and what they do on the other half, patched at once."""
    everywhere = band_of(profile(known, part, n_layers))
    patched = known[(known["grid"] == BANDS) & (known["part"] == part)] if part in bands else known[:0]
    if everywhere is None or not len(patched):
        return None
    whole = known[(known["grid"] == EVERYTHING) & (known["part"] == part)].set_index("pair")["effect"]
    inside = patched[patched["where"] == "inside"]
    outside = patched[patched["where"] == "outside"]
    effects = profile(known, part, n_layers)
    return {
        "layers": [everywhere.start, everywhere.stop - 1],
        "halves": [[band.start, band.stop - 1] for band in bands[part].values()],
        "summed": float(effects.sum()),
        "summed_inside": float(effects[everywhere.start : everywhere.stop].sum()),
        "inside": _pooled(inside),
        "outside": _pooled(outside) if len(outside) else None,
        "of_whole": _pooled(inside.assign(way=inside["pair"].map(whole))),
    }


def _agreement(known: Any) -> dict[str, Any]:
    """Rank correlation of each first-order score with exact patching: within each run, and then over runs."""
    cells = known[(known["grid"] == HEADS) & known["effect"].notna()]
    found: dict[str, Any] = {"cells": len(cells)}
    for score in ("score", "linear"):
        for part in ("K", "V"):
            own = [
                float(mine[score].rank().corr(mine["effect"].rank()))
                for _, mine in cells[cells["part"] == part].groupby("pair")
                if mine[score].nunique() > 1 and mine["effect"].nunique() > 1
            ]
            found[f"{score}_{part}"] = _quartiles(own)
    return found


def _quartiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"low": float(low), "median": float(middle), "high": float(high)}


def _example(example: Any) -> dict[str, Any]:
    """The example's cells as lists: slots with their texts, and by grid the share of the way of each."""
    first = example.drop_duplicates("slot").sort_values("slot")
    labels = {"fact": str(first["cluster"].iloc[0]), "slots": first["slot"].astype(int).tolist()}
    labels |= {"texts": first["text"].tolist(), "segments": first["segment"].tolist()}
    return labels | {
        "cells": [
            {
                "grid": row.grid,
                "slot": int(row.slot),
                "layer": None if pd.isna(row.layer) else int(row.layer),
                "part": row.part,
                "share": float((row.effect if pd.isna(row.score) else row.score) / row.way),
            }
            for row in example.itertuples()
        ]
    }


def _pooled(cells: Any, comparisons: int = 1) -> dict[str, Any]:
    return pooled(summarise(cells.assign(all=0), ["all"], comparisons).to_dict("records")[0]).record()


def _listed(cells: Any, by: Sequence[str]) -> list[dict[str, Any]]:
    """One entry per group, with its pooled share of the way and interval."""
    return [
        {axis: int(row[axis]) if axis in ("layer", "head") else str(row[axis]) for axis in by} | pooled(row).record()
        for row in summarise(cells, by).to_dict("records")
    ]
