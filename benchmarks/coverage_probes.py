"""How often the intervals of probes hold the truth, and how often a probing claims something of noise.

Features are drawn of contexts that each add an offset of their own; labels push some of them, by a strength that
differs between contexts, or none (noise). The truth is what the same procedure reads on average over all draws of
contexts of this number; of noise, accuracy is chance. Half the sites of a design are searched, as a study does: each
fold is read at the site that did best on its inner fold. The floor is one vector a context.

    OMP_NUM_THREADS=1 python benchmarks/coverage_probes.py [--quick]
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from coverage import table, write

from kvprobe.models.lens import Family
from kvprobe.probing.claims import FLOOR
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import Fits, chosen, fit_sites, fit_tasks
from kvprobe.probing.intervals import INFORMATION, held_out
from kvprobe.probing.probe_features import control_tasks, probe_features
from kvprobe.probing.splits import SPLITS, Split, fold_numbers
from kvprobe.stats import DIFFERENCE, SHARE, Estimate
from kvprobe.tasks.designs import Target

CLASSES, DIM, SITES, FOLDS, SIGNAL, EACH = 4, 12, 2, 5, 1.5, 5
TARGET = Target("letter", tuple("abcd"))
COUNTS = (8, 16, 48)
EQUAL = (1 / CLASSES,) * CLASSES
DATA = {
    "noise": (0.0, EQUAL),
    "noise, labels 9 : 1": (0.0, (0.9, 0.1)),
    "noise, labels 7 : 2 : 1": (0.0, (0.7, 0.2, 0.1)),
    "a signal": (SIGNAL, EQUAL),
}
"""By name: the strength of the signal, and how frequent each class is."""
WITHIN = {"accuracy": SHARE, "leak": DIFFERENCE, "selectivity": DIFFERENCE, "bits": INFORMATION}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=8, help="draws of labels, of 40 designs each")
    parser.add_argument("--probings", type=int, default=200, help="whole probings of noise at each number of contexts")
    parser.add_argument("--quick", action="store_true", help="a tenth of both, and the page stays as it is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draws, probings = (
        max(1, count // 10 if arguments.quick else count) for count in (arguments.draws, arguments.probings)
    )

    def shown(share: float) -> str:
        return f"{100 * share:.1f}"

    rows = [
        [f"{contexts}", features, split, *(shown(held[name]) for name in WITHIN)]
        for contexts in COUNTS
        for features, (signal, shares) in DATA.items()
        for split in SPLITS
        for held in (coverage(contexts, EACH, signal, split, draws, shares=shares),)
    ]
    covered = table(["contexts", "features", "split", *WITHIN], rows)
    print(covered, flush=True)
    rows = [
        [f"{contexts}", *(shown(false_claims(contexts, EACH, probings, permutations)) for permutations in (0, 39))]
        for contexts in COUNTS
    ]
    claimed = table(["contexts", "intervals alone", "and 39 permutations"], rows)
    print(claimed)
    if not arguments.quick:
        write("coverage of probes", covered)
        write("false claims of probes", claimed)


def coverage(
    contexts: int,
    repeats: int,
    signal: float,
    split: Split,
    draws: int,
    designs: int = 40,
    shares: Sequence[float] = EQUAL,
) -> dict[str, float]:
    """The share of intervals that hold the truth, by what they are of."""
    intervals: dict[str, list[Estimate]] = defaultdict(list)
    means: dict[str, list[float]] = defaultdict(list)
    for draw in range(draws):
        rng = np.random.default_rng([contexts, repeats, draw])
        features, floor = drawn(rng, contexts, repeats, signal, SITES * designs, shares=shares)
        fold = fold_numbers(split, features.contexts, FOLDS, rng)
        control = control_tasks(features, rng)
        fits, memorised = fit_tasks(features, split, fold, [features.labels, control])
        others = fit_sites(floor, split, fold)
        for first in range(0, SITES * designs, SITES):
            read, blind, learnt = (chosen(_some(group, first), fold) for group in (fits, others, memorised))
            hits, floored = (_hits(picked.predicted, features.labels) for picked in (read, blind))
            values = {
                "accuracy": hits,
                "leak": hits - floored,
                "selectivity": hits - _hits(learnt.predicted, control),
                "bits": read.information.double().numpy(),
            }
            for name, value in values.items():
                intervals[name].append(held_out(value, features.contexts, WITHIN[name]))
                means[name].append(float(value.mean()))
    truth = {name: float(np.clip(np.mean(values), *WITHIN[name])) for name, values in means.items()}
    if not signal:
        truth |= {"accuracy": max(shares), "leak": 0.0}
        if split != "random":  # there, a probe can memorise the labels of the control
            truth["selectivity"] = 0.0
    return {
        name: float(np.mean([value.low <= truth[name] <= value.high for value in values]))
        for name, values in intervals.items()
    }


def false_claims(contexts: int, repeats: int, probings: int, permutations: int) -> float:
    """The share of probings of noise that call anything decodable, under whatever split."""
    claims = []
    for number in range(probings):
        rng = np.random.default_rng([contexts, repeats, number, permutations])
        features, floor = drawn(rng, contexts, repeats, 0.0, SITES)
        probing = probe_features(features, {FLOOR: floor}, folds=FOLDS, permutations=permutations, rng=rng)
        claims.append(": decodable" in str(probing))
    return float(np.mean(claims))


def drawn(
    rng: np.random.Generator,
    contexts: int,
    repeats: int,
    signal: float,
    sites: int,
    offset: float = 1.0,
    shares: Sequence[float] = EQUAL,
) -> tuple[Features, Features]:
    """Features and their floor, which differs between contexts alone."""
    homes = np.repeat(np.arange(contexts), repeats)
    labels = rng.choice(len(shares), len(homes), p=shares)
    offsets = offset * rng.standard_normal((contexts, sites, DIM))
    strength = signal * np.exp(0.5 * rng.standard_normal((contexts, sites)))
    vectors = offsets[homes] + rng.standard_normal((len(homes), sites, DIM))
    vectors += strength[homes, :, None] * np.eye(CLASSES, DIM)[labels][:, None]
    floor = offsets + 0.3 * rng.standard_normal(offsets.shape)

    def of(tensor: np.ndarray, rows: np.ndarray) -> Features:
        where: dict[Family, tuple[Site, ...]] = {"v": tuple(Site(layer, None, "mean") for layer in range(sites))}
        read: dict[Family, torch.Tensor] = {"v": torch.from_numpy(tensor).float()}
        return Features(read, where, rows, torch.from_numpy(labels)[None], homes, TARGET)

    return of(vectors, np.arange(len(homes))), of(floor, homes)


def _some(fits: Fits, first: int) -> Fits:
    """The sites of one design."""
    design = slice(first, first + SITES)
    return Fits(fits.sites[design], fits.predicted[design], fits.information[design], fits.inner_accuracy[design])


def _hits(predicted: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    return predicted.eq(labels).double().mean(0).numpy()


if __name__ == "__main__":
    main()
