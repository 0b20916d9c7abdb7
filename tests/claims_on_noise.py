"""How often each declared study claims anything where there is nothing: the table in docs/intervals.md.

    python -m tests.claims_on_noise [REPETITIONS]

A study's tests make up rows (`noise`) in which no condition differs from any other. A family is what a claim is chosen
from: all findings of one name whose intervals hold together. At most 5 % of families should hold a claim.
"""

import sys
from collections import defaultdict
from importlib import import_module
from itertools import groupby
from operator import attrgetter

import numpy as np
from tqdm import tqdm

from kvprobe.studies import STUDIES
from tests.frozen import MODULES

REPETITIONS = 300


def claimed(study: str, repetitions: int) -> dict[str, tuple[float, int]]:
    """By claim: the share of families with one, in percent, and the size of a family."""
    noise = import_module(f"tests.studies.{MODULES[study]}").noise
    declaration = STUDIES[study].declaration
    found: dict[str, list[bool]] = defaultdict(list)
    sizes: dict[str, int] = {}
    comparisons = attrgetter("comparisons")
    for repetition in tqdm(range(repetitions), desc=study, unit="run"):
        findings = noise(np.random.default_rng([repetition, 7])).findings
        for claim in declaration.claims:
            of_claim = findings.where(claim.finding)
            sizes[claim.finding] = of_claim[0].comparisons if of_claim else 1
            # Findings of one family follow one another, but for those of a family that has another size.
            for _, alike in groupby(sorted(of_claim, key=comparisons), comparisons):
                own = list(alike)
                for start in range(0, len(own), size_of := own[0].comparisons or 1):
                    family = own[start : start + size_of]
                    found[claim.finding].append(any(finding.value.differs(claim.against) for finding in family))
    return {name: (100 * float(np.mean(each)), sizes[name]) for name, each in found.items()}


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    print("| study | claim | findings | claimed of noise |\n| --- | --- | --- | --- |")
    for study in STUDIES:
        for name, (percent, size) in claimed(study, repetitions).items():
            print(f"| {study} | {name} | {size} | {percent:.1f} |")


if __name__ == "__main__":
    main()
