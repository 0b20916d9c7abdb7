"""In which latents two runs of the same conversations differ."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from kvprobe.probing.permutation import sign_flipped

Means = Float[np.ndarray, "conversations dim"]


def compare_latents(one: Means, other: Means, flips: int, rng: np.random.Generator) -> pd.DataFrame:
    """A row for each latent: its mean in both runs (`one`, `other`), the mean `difference`, whether it is not always
    zero (`alive`), and `p` of the difference, corrected for all latents.

    Args:
        flips: of signs of whole conversations, for p; see `sign_flipped`.
    """
    change = one - other
    columns = {"one": one.mean(0), "other": other.mean(0), "difference": change.mean(0)}
    alive = (columns["one"] != 0) | (columns["other"] != 0)
    return pd.DataFrame({**columns, "alive": alive, "p": sign_flipped(change, flips, rng)})


def by_difference(one: Means, other: Means) -> Int[np.ndarray, "alive"]:
    """The latents that are not always zero, those first whose means differ most. By size and not by p, of which many
    are the least that the flips allow."""
    alive = np.flatnonzero((one.mean(0) != 0) | (other.mean(0) != 0))
    return alive[np.argsort(-np.abs((one - other).mean(0)[alive]), kind="stable")]


def differing_and_random(
    one: Means, other: Means, count: int, draws: int, rng: np.random.Generator
) -> tuple[list[int], Mapping[str, list[int]]]:
    """The latents that differ most, and as many of all others that are not always zero, drawn at random: `random 0`,
    `random 1` ….

    Args:
        count: latents of a set.
        draws: random sets.
    """
    ranked = by_difference(one, other)
    top, others = ranked[:count], ranked[count:]
    return top.tolist(), {f"random {draw}": rng.permutation(others)[:count].tolist() for draw in range(draws)}


def fewest(values: Float[np.ndarray, "columns"]) -> int:
    """How many of the largest hold half of the sum."""
    return int(np.searchsorted(np.sort(values)[::-1].cumsum(), values.sum() / 2) + 1)
