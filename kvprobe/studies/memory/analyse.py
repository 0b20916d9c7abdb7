"""How far the budget is off, and how the time of a token grows with what stands before it."""

from typing import Any

import numpy as np

from kvprobe.stats import estimate


def analyse(peaks: Any, growth: Any, times: Any) -> dict[str, Any]:
    """The study's numbers.

    Returns:
        `off`: for each of what was measured, the largest relative error, with its sign and context. `growth_equal`:
            tokens at
        which the cache was predicted to the byte, of how many. `slope`: by what power of the length the time of a token
        grows, with the cache and without it, between the shortest and the longest half of the lengths. `faster`: how
        many times.
    """
    off = {}
    for what, rows in peaks.groupby("what", sort=False):
        error = rows["predicted"] / rows["measured"] - 1
        worst = error.abs().idxmax()
        off[str(what)] = {"error": float(error[worst]), "context": int(rows["context"][worst])}
    medians = times.groupby("length")[["cached", "anew"]].median()
    return {
        "off": off,
        "contexts": int(peaks["context"].nunique()),
        "growth_equal": int((growth["measured"] == growth["transformers"]).sum()),
        "growth_tokens": len(growth),
        "seconds": {
            name: {str(length): float(value) for length, value in medians[name].items()} for name in ("cached", "anew")
        },
        "slope": {name: slope(times, name) for name in ("cached", "anew")},
        "faster": {str(length): float(row["anew"] / row["cached"]) for length, row in medians.iterrows()},
        "difference": float(times["difference"].max()),
    }


def slope(times: Any, name: str) -> dict[str, Any]:
    """The exponent of the length in the time of a token, over the longer half of the lengths (the shorter half is ruled
    by what every pass costs): the mean over repeats of what each gives, with its interval over repeats."""
    table: Any = times.pivot(index="repeat", columns="length", values=name)
    lengths = np.array(table.columns, dtype=float)
    chosen = lengths >= np.median(lengths)
    return estimate(np.polyfit(np.log(lengths[chosen]), np.log(table.to_numpy(float)[:, chosen]).T, 1)[0]).record()
