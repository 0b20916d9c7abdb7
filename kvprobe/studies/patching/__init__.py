"""Patching: from which layers, slots and heads is a fact read, and from K or from V?"""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import FACT_KINDS, FACTS_OF_A_KIND, FactKind


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the patching study.

    Attributes:
        kinds: of facts.
        facts: of each kind.
        ways: 2 patches each fact both ways, its second value into the run with the first and back; 1 alternates.
        step: residual streams are patched at every so many layers; 0 leaves that out.
        check: cells of the attribution that are also patched exactly, for each run.
        seed: of that draw and of the halves.
    """

    kinds: tuple[FactKind, ...] = FACT_KINDS
    facts: int = 4
    ways: int = 1
    step: int = 6
    check: int = 24

    def validate(self) -> None:
        require("facts", self.facts, 1, FACTS_OF_A_KIND)
        require("ways", self.ways, 1, 2)
        require("step", self.step, 0)
        require("check", self.check, 8)


run = STUDIES["patching"].run
