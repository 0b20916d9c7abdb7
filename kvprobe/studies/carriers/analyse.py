"""From swaps to numbers: what share of the hidden turn's effect each group of slots carries, with intervals.

Each conversation is a cluster. Shares are pooled: the mean effect over the mean way from base to donor, so that a
question on which the two caches hardly differ does not count the most. Shares of groups need not add up to one.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import pandas as pd

from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.patching.pairs import pooled, summarise
from kvprobe.stats import estimate, wilson
from kvprobe.studies.carriers.collect import CODES, DIRECTIONS, QUESTIONS
from kvprobe.studies.carriers.config import Config
from kvprobe.studies.carriers.groups import BEFORE, GROUPS, SELF, TOKEN
from kvprobe.wording import estimate_of

CLAIMS = 4
"""Of the headline: the band, K or V, the summary or later turns, the code. The intervals that decide them hold
together."""
BOTH = "both"
"""The two questions together."""
COMPARED = {
    "summary over later turns": (("summary", "KV"), ("later turns", "KV")),
    "text over delimiters": (("summary text", "KV"), ("summary delimiters", "KV")),
    "V over K": (("all after", "V"), ("all after", "K")),
}
"""Differences between shares of the same sweep, all layers."""

Record = dict[str, Any]


def analyse(table: Any, config: Config) -> Record:
    """The numbers of a run from what `collect` gives."""
    table = table.assign(pair=table["context"], cluster=table["context"])
    swapped = table[table["question"] != CODES]
    cells = swapped[swapped["group"].isin(GROUPS)]
    kl = cells[cells["metric"] == "kl"]
    return {
        "conversations": int(table["context"].nunique()),
        "bands": [band for band in dict.fromkeys(kl["band"]) if band != EVERY_LAYER],
        "scale": _scale(cells),
        "shares": _shares(cells[cells["band"] == EVERY_LAYER]),
        "layers": _layers(kl[kl["band"] != EVERY_LAYER]),
        "compared": _compared(kl),
        "most": _most(kl),
        "codes": _codes(table[table["question"] == CODES]),
        "tokens": _tokens(swapped[(swapped["group"] == TOKEN) & (swapped["metric"] == "kl")]),
        "controls": _controls(table),
    }


def share(metrics: Mapping[str, Any], group: str, part: str = "KV", **labels: str) -> Record:
    """The share of a group over all layers, by default of both questions, restoring, in KL."""
    wanted = {"group": group, "part": part, "question": BOTH, "direction": DIRECTIONS[0], "metric": "kl"} | labels
    return next(each for each in metrics["shares"] if wanted.items() <= each.items())


def _scale(cells: Any) -> list[Record]:
    """How far the two caches' replies are apart, and what the reply is with everything in view."""
    found = []
    for question in QUESTIONS:
        sweeps = cells[(cells["question"] == question) & (cells["direction"] == DIRECTIONS[0])]
        once = sweeps.drop_duplicates(["context", "metric"])
        kl, logprob = (once[once["metric"] == metric].sort_values("context") for metric in ("kl", "logprob"))
        found.append(
            {
                "question": question,
                "kl": _mean(kl["base"]),
                "largest_kl": float(kl["base"].max()),
                "heaviest": float(kl["base"].max() / kl["base"].sum()) if kl["base"].sum() else 1.0,
                "retained": _mean(logprob["donor"]),
                "recomputed": _mean(logprob["base"]),
                "full": _mean(logprob["full"]),
                "gain": _mean(logprob["way"]),
                "right": wilson(int(logprob["right"].sum()), len(logprob)).record(),
            }
        )
    return found


def _mean(values: Any, comparisons: int = 1) -> Record:
    return estimate(values.to_numpy(dtype=float), comparisons=comparisons).record()


def _shares(cells: Any) -> list[Record]:
    """Every group and part at all layers, with how many of the slots after the hidden turn it is."""
    size = cells[cells["group"] == "all after"]["slots"].mean()
    counted = cells.groupby("group")["slots"].mean()
    by = ["question", "direction", "metric", "group", "part"]
    return [
        {**{name: row[name] for name in by}, **_told(row), "slots": float(counted[row["group"]])}
        | {"of_slots": float(counted[row["group"]] / size)}
        for row in summarise(_with_both(cells), by).to_dict("records")
    ]


def _layers(kl: Any) -> list[Record]:
    """Every kind of slot in every band, the questions together."""
    by = ["direction", "group", "part", "band"]
    return [
        {**{name: row[name] for name in by}, "share": _told(row)["share"]}
        for row in summarise(kl, by).to_dict("records")
    ]


def _with_both(cells: Any) -> Any:
    return pd.concat([cells, cells.assign(question=BOTH)], ignore_index=True)


def _told(row: Mapping[str, Any]) -> Record:
    """The share and the effect itself of a row of `summarise`, as estimates; None where a share has no scale."""
    share = pooled(row)
    return {"share": share.record() if isfinite(share.mean) else None, "effect": pooled(row, "effect").record()}


def _difference(more: Any, less: Any) -> Record | None:
    """The share of some cells less that of others of the same sweeps."""
    keys = ["context", "question", "direction"]
    both = more.merge(less[[*keys, "effect"]], on=keys, suffixes=("", "_less"))
    paired = both.assign(effect=both["effect"] - both["effect_less"], one="")
    return _told(summarise(paired, ["one"], CLAIMS).to_dict("records")[0])["share"]


def _compared(kl: Any) -> Record:
    """`COMPARED` by direction, name and question."""
    every = _with_both(kl[kl["band"] == EVERY_LAYER])

    def gap(direction: str, question: str, more: tuple[str, str], less: tuple[str, str]) -> Record | None:
        own = every[(every["direction"] == direction) & (every["question"] == question)]
        one, other = (own[(own["group"] == group) & (own["part"] == part)] for group, part in (more, less))
        return _difference(one, other)

    return {
        direction: {
            name: {question: gap(direction, question, *pair) for question in (*QUESTIONS, BOTH)}
            for name, pair in COMPARED.items()
        }
        for direction in DIRECTIONS
    }


def _most(kl: Any) -> Record:
    """The band of layers with the largest share when all slots after the hidden turn are swapped in it, and by how much
    it is beyond the next."""
    found = {}
    for direction in DIRECTIONS:
        cells = kl[(kl["direction"] == direction) & (kl["group"] == "all after") & (kl["part"] == "KV")]
        shares = {
            row["band"]: _told(row)["share"]
            for row in summarise(cells[cells["band"] != EVERY_LAYER], ["band"]).to_dict("records")
        }
        order = sorted((band for band in shares if shares[band] is not None), key=lambda band: -shares[band]["mean"])
        first = order[0] if order else None
        beyond = [_difference(cells[cells["band"] == first], cells[cells["band"] == other]) for other in order[1:]]
        found[direction] = {
            "band": first,
            "share": None if first is None else shares[first],
            "over_next": beyond[0] if beyond else None,
            "told": bool(beyond) and all(each is not None and estimate_of(each).above() for each in beyond),
        }
    return found


def _codes(rows: Any) -> Record:
    """What of logit(own code) − logit(other code) the masked turn still decides, in conversations where the model can
    tell the two with everything in view."""
    able = rows[(rows["full"] > 0) & (rows["full_other"] < 0)]
    count = int(able["context"].nunique())
    found: Record = {"of": int(rows["context"].nunique()), "able": count}
    if count < 2:
        return found
    # Over the whole swing in view: what turning the code from the one to the other could move.
    swing = able.assign(effect=-able["effect"], way=able["full"] - able["full_other"])
    once = swing.drop_duplicates("context").sort_values("context")
    shares = summarise(swing[swing["group"].isin(GROUPS)], ["group"]).to_dict("records")
    return found | {
        "in_view": _mean(once["way"]),
        "masked": _mean(once["base"] - once["donor"], CLAIMS),
        "groups": [{"group": row["group"], **_told(row)} for row in shares],
    }


def _tokens(rows: Any) -> list[Record]:
    """Each slot's own share in the first conversation, in order."""
    ordered = rows.sort_values("slot")
    return [
        {"token": str(row["token"]), "share": float(row["effect"] / row["way"]) if row["way"] else 0.0}
        for row in ordered.to_dict("records")
    ]


def _controls(table: Any) -> Record:
    """What must be nothing, and what must be everything."""

    def largest(group: str) -> Record:
        rows = table[table["group"] == group]
        return {metric: float(found["effect"].abs().max()) for metric, found in rows.groupby("metric")}

    whole = table[
        (table["group"] == "all after")
        & (table["band"] == EVERY_LAYER)
        & (table["part"] == "KV")
        & (table["question"] != CODES)
    ]
    missed = (whole["value"] - whole["donor"]).abs()
    return {
        "before_apart": float(table["apart"].max()),
        "before": largest(BEFORE),
        "self": largest(SELF),
        "all_missed": {metric: float(missed[rows.index].max()) for metric, rows in whole.groupby("metric")},
    }
