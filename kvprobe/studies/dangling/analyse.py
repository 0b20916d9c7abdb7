"""From patterns and outcomes to numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.stats import cluster_weights, wilson
from kvprobe.studies.dangling.collect import CLOSED, FULL, MASKED, RANDOM, SHARED, TOP
from kvprobe.studies.dangling.config import Config
from kvprobe.tasks.ordinal import VERBS

PLACES = ("sink", "later", "local", "elsewhere")
"""Where attention can go: the first slot; the later turn; the suffix itself; other slots."""


def analyse(table: Any, rescues: Any, memos: Any, config: Config) -> dict[str, Any]:
    """All numbers of a run."""
    arms = table[table["grid"] == "arms"]
    prompts = list(dict.fromkeys(arms["prompt"]))
    weights = cluster_weights(len(prompts), np.random.default_rng(config.seed))
    wide = {arm: own.set_index("prompt").loc[prompts] for arm, own in arms.groupby("arm")}
    heads = table[(table["grid"] == "heads") & (table["arm"] == MASKED)]
    found: dict[str, Any] = {
        "prompts": len(prompts),
        "able": int((wide[FULL]["margin"] > 0).sum()),
        "able_masked": int((wide[MASKED]["margin"] > 0).sum()),
        "mass": _pooled(_mean(heads, "dangling", prompts), weights),
        "went": _went(heads, prompts, weights),
        "expected": _went(table[(table["grid"] == "heads") & (table["arm"] == SHARED)], prompts, weights),
        "way": _pooled((wide[FULL]["margin"] - wide[MASKED]["margin"]).to_numpy(float), weights),
        "heads": _by_head(heads),
        "arms": {
            arm: {name: _pooled(own[name].to_numpy(float), weights) for name in ("margin", "kl", "kl_masked")}
            for arm, own in wide.items()
        },
        "rescues": _rescues(rescues, wide[FULL], wide[MASKED], prompts, weights),
        "closed": _closed(table, prompts, weights) if CLOSED in wide else None,
        "memos": None if memos is None else _memos(memos),
        "balance": _balance(heads),
    }
    return found


def _pooled(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(weights @ values / len(values), [2.5, 97.5])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def _share(top: np.ndarray, bottom: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    low, high = np.percentile((weights @ top) / (weights @ bottom), [2.5, 97.5])
    return {"mean": float(top.sum() / bottom.sum()), "low": float(low), "high": float(high)}


def _mean(heads: Any, column: str, prompts: Sequence[str]) -> np.ndarray:
    """Mean over all heads, by conversation."""
    return heads.groupby("prompt")[column].mean().loc[list(prompts)].to_numpy(float)


def _went(heads: Any, prompts: Sequence[str], weights: np.ndarray) -> dict[str, dict[str, float]]:
    """Shares of what dangled that each part of the cache gained."""
    gone = _mean(heads, "dangling", prompts)
    return {place: _share(_mean(heads, place, prompts), gone, weights) for place in PLACES}


def _by_head(heads: Any) -> list[dict[str, Any]]:
    table = heads.groupby(["layer", "head"])[["dangling", *PLACES]].mean().reset_index()
    return [{**row, "layer": int(row["layer"]), "head": int(row["head"])} for row in table.to_dict("records")]


def _balance(heads: Any) -> float:
    """Attention is neither made nor lost: how far what was gained is from what dangled, at most."""
    return float((heads[list(PLACES)].sum(axis=1) - heads["dangling"]).abs().max())


def _rescues(rescues: Any, full: Any, masked: Any, prompts: Sequence[str], weights: np.ndarray) -> list[dict[str, Any]]:
    """The share of the way from masked to full that each set gives back, and the difference between the two sorts."""
    way, damage = (full["margin"] - masked["margin"]).to_numpy(float), masked["kl"].to_numpy(float)
    found = []
    for size in sorted(rescues["size"].unique()):
        entry: dict[str, Any] = {"size": int(size)}
        gained, lessened = {}, {}
        for sort in (TOP, RANDOM):
            own = rescues[(rescues["size"] == size) & (rescues["sort"] == sort)]
            own = own.groupby("prompt")[["margin", "kl"]].mean().loc[list(prompts)]
            gained[sort] = (own["margin"] - masked["margin"]).to_numpy(float)
            lessened[sort] = damage - own["kl"].to_numpy(float)
            entry[sort] = {"margin": _share(gained[sort], way, weights), "kl": _share(lessened[sort], damage, weights)}
        entry["difference"] = {
            "margin": _share(gained[TOP] - gained[RANDOM], way, weights),
            "kl": _share(lessened[TOP] - lessened[RANDOM], damage, weights),
        }
        found.append(entry)
    return found


def _closed(table: Any, prompts: Sequence[str], weights: np.ndarray) -> dict[str, Any]:
    """What closing the gap does beyond masking: how far attention moves, as a share of what dangled."""
    heads = table[table["grid"] == "heads"]
    columns = list(PLACES)
    keys = ["prompt", "layer", "head"]
    masked, closed = (heads[heads["arm"] == arm].set_index(keys)[columns].sort_index() for arm in (MASKED, CLOSED))
    moved = (closed - masked).abs().sum(axis=1) / 2
    gone = heads[heads["arm"] == MASKED].set_index(keys)["dangling"].sort_index()
    by_prompt = [each.groupby("prompt").mean().loc[list(prompts)].to_numpy(float) for each in (moved, gone)]
    return {"moved": _share(by_prompt[0], by_prompt[1], weights)}


def _memos(memos: Any) -> list[dict[str, Any]]:
    found = []
    for reference in VERBS:
        for arm in ("seen", "masked", "crossed"):
            own = memos[(memos["reference"] == reference) & (memos["arm"] == arm)]
            for follows in ("payload", "pointer"):
                share = wilson(int(own[follows].sum()), len(own))
                found.append(
                    {"reference": reference, "arm": arm, "follows": follows, "memos": len(own), "mean": share.mean,
                     "low": share.low, "high": share.high}
                )  # fmt: skip
    return found
