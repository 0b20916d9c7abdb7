"""How often each declared study claims anything where there is nothing: the table in docs/results/coverage.md.

    python -m tests.claims_on_noise [REPETITIONS [STUDY ...]]

A study's tests make up rows (`noise`) in which no condition differs from any other. A family is what a claim is chosen
from: all findings of one name whose intervals hold together. At most 5 % of families should hold a claim, and at most
5 % of answers, whatever families they rest on.
"""

import sys
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from tqdm import tqdm

from kvprobe.experiments.page import answer
from kvprobe.experiments.study import Conclusion
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.studies import STUDIES
from tests.experiments.made_up import page_of
from tests.frozen import MODULES

REPETITIONS = 300


def claimed(study: str, repetitions: int) -> dict[str, tuple[float, int]]:
    """By claim: the share of families with one, in percent, and the size of a family."""
    noise = import_module(f"tests.studies.{MODULES[study]}").noise
    declaration = STUDIES[study].declaration
    false_claims: dict[str, list[bool]] = defaultdict(list)
    sizes: dict[str, int] = {}
    comparisons = attrgetter("comparisons")
    for repetition in tqdm(range(repetitions), desc=study, unit="run"):
        findings = noise(np.random.default_rng([repetition, 7])).findings
        for claim in declaration.claims:
            of_claim = findings.where(claim.finding)
            sizes[claim.finding] = of_claim[0].comparisons if of_claim else 1
            # Findings of one family follow one another, but for those of a family that has another size.
            for _, alike in groupby(sorted(of_claim, key=comparisons), comparisons):
                same_size = list(alike)
                for start in range(0, len(same_size), size_of := same_size[0].comparisons or 1):
                    family = same_size[start : start + size_of]
                    false_claims[claim.finding].append(any(finding.value.differs(claim.against) for finding in family))
    return {name: (100 * float(np.mean(claims)), sizes[name]) for name, claims in false_claims.items()}


class Watched(Findings):
    """Findings that remember which of them were looked at."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self.seen: list[Finding] = []

    def where(self, name: str, **keys: Key | tuple[Key, ...]) -> list[Finding]:
        findings = super().where(name, **keys)
        self.seen += findings
        return findings

    def find(self, name: str, **keys: Key) -> Finding | None:
        finding = super().find(name, **keys)
        self.seen += [finding] if finding else []
        return finding


def answered(study: str, repetitions: int) -> float:
    """The share of answers, in percent, that rest on a finding of noise beyond its claim. A little too many: a finding
    that an answer looks at is counted even if it says nothing of it."""
    tests, declaration = import_module(f"tests.studies.{MODULES[study]}"), STUDIES[study].declaration
    against = {claim.finding: claim for claim in declaration.claims}
    config, conclusion = tests.example()
    wrong = 0
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = page_of(declaration, config, conclusion, Path(folder))
        for repetition in tqdm(range(repetitions), desc=f"{study}: answers", unit="run"):
            of_noise = tests.noise(np.random.default_rng([repetition, 7]))
            watched = Watched(of_noise.findings)
            patch.setattr(
                Conclusion, "of", lambda _, of_noise=of_noise, watched=watched: replace(of_noise, findings=watched)
            )
            answer(declaration, run)
            claimed = [finding for finding in watched.seen if finding.comparisons and finding.name in against]
            wrong += any(finding.value.differs(against[finding.name].against) for finding in claimed)
    return 100 * wrong / repetitions


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    print("| study | claim | findings | claimed of noise |\n| --- | --- | --- | --- |")
    for study in sys.argv[2:] or STUDIES:
        for name, (percent, size) in claimed(study, repetitions).items():
            print(f"| {study} | {name} | {size} | {percent:.1f} |", flush=True)
        print(f"| {study} | the answer | | {answered(study, repetitions):.1f} |", flush=True)


if __name__ == "__main__":
    main()
