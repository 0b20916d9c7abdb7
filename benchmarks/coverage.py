"""How often each kind of interval that a report prints holds the truth, and how often a family of claims on noise has a
false one.

Every quantity is simulated from a distribution whose truth is known, at 4 to 48 clusters, and given to the very
functions that the studies call. The tables go into docs/results/coverage.md.

    python benchmarks/coverage.py [--quick]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
from scipy.special import log_ndtr

from kvprobe.ranks import spearman
from kvprobe.report.crossing import crossings
from kvprobe.stats import (
    DIFFERENCE,
    FEWEST,
    SHARE,
    Estimate,
    binomial,
    estimate,
    means,
    newcombe,
    ratio,
    statistic,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "coverage.md"
CLUSTERS = (4, 8, 12, 16, 48)
REPETITIONS, QUICK = 2000, 300
CHUNK = 100
"""Families that are drawn at once."""
FAMILIES = (1, 4, 9, 24, 64)
"""How many comparisons a headline picks its claims from; see each study's `CLAIMS`."""
Draw = Callable[[np.random.Generator, int], Estimate]


@dataclass(frozen=True)
class Kind:
    """A kind of interval on one sort of data.

    Attributes:
        draw: an estimate from this many new clusters.
    """

    name: str
    data: str
    truth: float
    draw: Draw


def kinds() -> list[Kind]:
    """Every kind that a report of a study prints, on normal, skewed and binary data."""
    every = [
        Kind(f"mean, {sizes}", data, truth, _mean(law, sizes == "2 to 6 samples a cluster"))
        for sizes in ("5 samples a cluster", "2 to 6 samples a cluster")
        for data, truth, law in (
            ("normal", 0.0, lambda rng, count: rng.normal(size=count)),
            ("exponential", 1.0, lambda rng, count: rng.exponential(size=count)),
            ("lognormal, σ = 1", float(np.exp(0.5)), lambda rng, count: rng.lognormal(size=count)),
        )
    ]
    for share in (0.5, 0.2, 0.1, 0.02):
        every.append(Kind("share, 1 trial a cluster", f"binary, {share}", share, _share(share, 1, 0.0)))
        for trials in (5, 20):
            data = f"binary, {share}, correlation 0.3"
            every.append(Kind(f"share, {trials} trials a cluster", data, share, _share(share, trials, 0.3)))
    for one, other in ((0.2, 0.2), (0.5, 0.1), (0.3, 0.0)):
        data = f"binary, {one} and {other}"
        every.append(Kind("paired difference of shares", data, one - other, _paired(one, other)))
        every.append(Kind("difference of independent shares (Newcombe)", data, one - other, _newcombe(one, other)))
    for damage in ("equal", "exponential", "lognormal, σ = 1"):
        every.append(Kind("pooled index, 1 − Σ left / Σ damage", f"damage {damage}", 0.3, _pooled(damage)))
    for spread in (0.5, 1.0):
        truth, data = float(np.exp(spread**2 / 2)), f"lognormal, σ = {spread}"
        every.append(Kind("ratio of sums, independent", data, 1.0, _ratio(spread, tied=False)))
        every.append(Kind("ratio of sums, one a multiple of the other", data, truth, _ratio(spread, tied=True)))
    every.append(Kind("ratio of means", "exponential", 2.0, _ratio_of_means))
    every.append(Kind("slope within clusters", "normal", -0.1, _slope))
    every.append(Kind("least memory (where a loss crosses its tolerance)", "normal", 0.4, _crossing))
    for noise in (0.3, 1.0):
        data = f"30 lognormal layers, noise σ = {noise}"
        every.append(Kind("rank correlation across layers", data, float(spearman(*_effects())[0]), _ranks(noise)))
    return every


def coverage(kind: Kind, clusters: int, repetitions: int, seed: int = 0) -> float | None:
    """The share of repetitions in which the interval holds the truth; None where none is printed."""
    rng = np.random.default_rng([seed, clusters])
    drawn = [kind.draw(rng, clusters) for _ in range(repetitions if clusters >= FEWEST else 1)]
    return (
        float(np.mean([not interval.differs(kind.truth) for interval in drawn]))
        if any(interval.has_interval for interval in drawn)
        else None
    )


def false_claims(
    law: "Law", comparisons: int, clusters: int, repetitions: int, share: float = 0.5, seed: int = 0
) -> float:
    """How often a family of comparisons whose truth is zero has a claim; `share` of their variance is common to all."""
    rng = np.random.default_rng([seed, clusters, comparisons])
    claimed = []
    for _ in range(0, repetitions, CHUNK):
        common, separate = rng.normal(size=(CHUNK, 1, clusters)), rng.normal(size=(CHUNK, comparisons, clusters))
        values = law(share**0.5 * common + (1 - share) ** 0.5 * separate)
        _, low, high = means(values, np.arange(clusters), comparisons=comparisons)
        claimed.append(((low > 0) | (high < 0)).any(-1).mean())
    return float(np.mean(claimed))


Law = Callable[[np.ndarray], np.ndarray]
LAWS: dict[str, Law] = {
    "normal": lambda normal: normal,
    "exponential": lambda normal: -log_ndtr(normal) - 1,
    "lognormal, σ = 1": lambda normal: np.exp(normal) - np.exp(0.5),
}
"""Data of mean zero, made of standard normal data."""


def write(name: str, text: str, page: Path = PAGE) -> None:
    """Put a section between its two marks in the page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}{text}{rest[rest.index(end) :]}", encoding="utf-8")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def _mean(law: Callable[[np.random.Generator, int], np.ndarray], unequal: bool) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        sizes = rng.integers(2, 7, size=count) if unequal else np.full(count, 5)
        clusters = np.repeat(np.arange(count), sizes)
        return estimate(law(rng, count)[clusters] + 0.3 * rng.normal(size=len(clusters)), clusters)

    return draw


def _chances(rng: np.random.Generator, share: float, correlation: float, count: int) -> np.ndarray:
    scale = 1 / correlation - 1 if correlation else 0.0
    return rng.beta(share * scale, (1 - share) * scale, size=count) if correlation else np.full(count, share)


def _share(share: float, trials: int, correlation: float) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        hits = rng.binomial(trials, _chances(rng, share, correlation, count))
        return estimate(hits / trials, within=None if trials == 1 else SHARE)

    return draw


def _paired(one: float, other: float) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        return estimate((rng.binomial(1, one, count) - rng.binomial(1, other, count)).astype(float), within=DIFFERENCE)

    return draw


def _newcombe(one: float, other: float) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        return newcombe(*(binomial(int(rng.binomial(count, share)), count) for share in (one, other)))

    return draw


def _pooled(law: str) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        damage = {"equal": np.ones(count), "exponential": rng.exponential(size=count)}.get(law)
        damage = rng.lognormal(size=count) if damage is None else damage
        return ratio(damage * (0.3 + 0.3 * rng.normal(size=count)), damage)

    return draw


def _ratio(spread: float, tied: bool) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        top, bottom = rng.lognormal(sigma=spread, size=(2, count))
        return ratio(top * bottom if tied else top, bottom)

    return draw


def _ratio_of_means(rng: np.random.Generator, count: int) -> Estimate:
    level = rng.exponential(size=count)
    pair = (
        np.stack([2 * level + rng.exponential(size=count) * 0.5 - 0.5, level + rng.exponential(size=count) * 0.5 - 0.5])
        + 1
    )
    ratio = statistic([pair], lambda drawn: (drawn[:, 0] - 1) / (drawn[:, 1] - 1), (0.0, np.inf))
    return ratio or Estimate(nan)


def _slope(rng: np.random.Generator, count: int) -> Estimate:
    places = np.arange(5) - 2.0
    values = rng.normal(-0.1, 0.2, size=(count, 1)) * places + rng.normal(size=(count, 5))
    return estimate(values @ places / (places**2).sum())


def _crossing(rng: np.random.Generator, count: int) -> Estimate:
    """The loss is 0.5 less the memory, so that it crosses 0.1 at 0.4."""
    memory = np.array([1.0, 0.75, 0.5, 0.3, 0.1])
    losses = 0.5 - memory[:, None] + 0.3 * rng.normal(size=(1, count)) + 0.1 * rng.normal(size=(5, count))
    mean, low, high = crossings(memory, np.stack(means(losses, np.arange(count))), 0.1, between=True)
    return Estimate(float(mean), float(low), float(high))


def _effects() -> np.ndarray:
    """What 30 layers truly have of two quantities, as logarithms, with a correlation of 0.8."""
    one, other = np.random.default_rng(0).normal(size=(2, 1, 30))
    return np.stack([one, 0.8 * one + 0.6 * other])


def _ranks(noise: float) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Estimate:
        loud = 0.5 * rng.normal(size=count)
        pair = [np.exp(one.T + noise * rng.normal(size=(30, count)) + loud) for one in _effects()]
        return statistic(pair, spearman, DIFFERENCE) or Estimate(nan)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repetitions, and the page stays as it is")
    quick = parser.parse_args().quick
    repetitions = QUICK if quick else REPETITIONS

    def shown(share: float | None) -> str:
        return "range" if share is None else f"{100 * share:.1f}"

    rows = [
        [kind.name, kind.data, *(shown(coverage(kind, clusters, repetitions)) for clusters in CLUSTERS)]
        for kind in kinds()
    ]
    covered = table(["interval", "data", *(f"{count} clusters" for count in CLUSTERS)], rows)
    enough = [count for count in CLUSTERS if count >= FEWEST]
    rows = [
        [str(family), data, *(shown(false_claims(law, family, count, repetitions)) for count in enough)]
        for data, law in LAWS.items()
        for family in FAMILIES
    ]
    claimed = table(["comparisons", "data", *(f"{count} clusters" for count in enough)], rows)
    print(covered, claimed)
    if not quick:
        write("coverage", covered)
        write("false claims", claimed)


if __name__ == "__main__":
    main()
