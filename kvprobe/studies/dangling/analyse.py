"""From patterns and outcomes to numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.stats import SHARE, estimate, ratio, wilson
from kvprobe.studies.dangling.collect import CLOSED, FULL, MASKED, RANDOM, SHARED, TOP
from kvprobe.studies.dangling.config import Config
from kvprobe.tasks.ordinal import VERBS

PLACES = ("sink", "later", "local", "elsewhere")
"""Where attention can go: the first slot; the later turn; the suffix itself; other slots."""


def analyse(table: Any, rescues: Any, memos: Any, config: Config) -> dict[str, Any]:
    """All numbers of a run."""
    arms = table[table["grid"] == "arms"]
    prompts = list(dict.fromkeys(arms["prompt"]))
    claims = len(rescues["size"].unique()) + 1
    wide = {arm: own.set_index("prompt").loc[prompts] for arm, own in arms.groupby("arm")}
    heads = table[(table["grid"] == "heads") & (table["arm"] == MASKED)]
    found: dict[str, Any] = {
        "prompts": len(prompts),
        "able": int((wide[FULL]["margin"] > 0).sum()),
        "able_masked": int((wide[MASKED]["margin"] > 0).sum()),
        "mass": estimate(_mean(heads, "dangling", prompts), within=SHARE).record(),
        "went": _went(heads, prompts),
        "expected": _went(table[(table["grid"] == "heads") & (table["arm"] == SHARED)], prompts),
        "way": estimate((wide[FULL]["margin"] - wide[MASKED]["margin"]).to_numpy(float), comparisons=claims).record(),
        "heads": _by_head(heads),
        "arms": {
            arm: {name: estimate(own[name].to_numpy(float)).record() for name in ("margin", "kl", "kl_masked")}
            for arm, own in wide.items()
        },
        "rescues": _rescues(rescues, wide[FULL], wide[MASKED], prompts, claims),
        "closed": _closed(table, prompts) if CLOSED in wide else None,
        "memos": None if memos is None else _memos(memos),
        "balance": _balance(heads),
    }
    return found


def _mean(heads: Any, column: str, prompts: Sequence[str]) -> np.ndarray:
    """Mean over all heads, by conversation."""
    return heads.groupby("prompt")[column].mean().loc[list(prompts)].to_numpy(float)


def _went(heads: Any, prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Shares of what dangled that each part of the cache gained."""
    gone = _mean(heads, "dangling", prompts)
    return {place: ratio(_mean(heads, place, prompts), gone).record() for place in PLACES}


def _by_head(heads: Any) -> list[dict[str, Any]]:
    table = heads.groupby(["layer", "head"])[["dangling", *PLACES]].mean().reset_index()
    return [{**row, "layer": int(row["layer"]), "head": int(row["head"])} for row in table.to_dict("records")]


def _balance(heads: Any) -> float:
    """Attention is neither made nor lost: how far what was gained is from what dangled, at most."""
    return float((heads[list(PLACES)].sum(axis=1) - heads["dangling"]).abs().max())


def _rescues(rescues: Any, full: Any, masked: Any, prompts: Sequence[str], claims: int) -> list[dict[str, Any]]:
    """The share of the way from masked to full that each set gives back, and the difference between the two sorts, of
    which the headline picks one: their intervals hold together."""
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
            entry[sort] = {"margin": ratio(gained[sort], way).record(), "kl": ratio(lessened[sort], damage).record()}
        entry["difference"] = {
            "margin": ratio(gained[TOP] - gained[RANDOM], way, comparisons=claims).record(),
            "kl": ratio(lessened[TOP] - lessened[RANDOM], damage, comparisons=claims).record(),
        }
        found.append(entry)
    return found


def _closed(table: Any, prompts: Sequence[str]) -> dict[str, Any]:
    """What closing the gap does beyond masking: how far attention moves, as a share of what dangled."""
    heads = table[table["grid"] == "heads"]
    columns = list(PLACES)
    keys = ["prompt", "layer", "head"]
    masked, closed = (heads[heads["arm"] == arm].set_index(keys)[columns].sort_index() for arm in (MASKED, CLOSED))
    moved = (closed - masked).abs().sum(axis=1) / 2
    gone = heads[heads["arm"] == MASKED].set_index(keys)["dangling"].sort_index()
    by_prompt = [each.groupby("prompt").mean().loc[list(prompts)].to_numpy(float) for each in (moved, gone)]
    return {"moved": ratio(by_prompt[0], by_prompt[1]).record()}


def _memos(memos: Any) -> list[dict[str, Any]]:
    found = []
    for reference in VERBS:
        for arm in ("seen", "masked", "crossed"):
            own = memos[(memos["reference"] == reference) & (memos["arm"] == arm)]
            for follows in ("payload", "pointer"):
                share = wilson(int(own[follows].sum()), len(own))
                found.append(
                    {"reference": reference, "arm": arm, "follows": follows, "memos": len(own), **share.record()}
                )
    return found
