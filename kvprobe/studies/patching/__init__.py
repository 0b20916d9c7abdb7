"""From which layers, slots and heads is a fact read, and from K or from V?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
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
    facts: int = ranged(4, 1, FACTS_OF_A_KIND)
    ways: int = ranged(1, 1, 2)
    step: int = ranged(6, 0)
    check: int = ranged(24, 8)


run = STUDIES["patching"].run
