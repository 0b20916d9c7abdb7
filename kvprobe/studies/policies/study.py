"""The policies study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.studies.policies import Config
from kvprobe.studies.policies.collect import FULL, KINDS, RANDOM, RANDOM_SINKS, SINKS, collect
from kvprobe.studies.policies.conclude import GAINS, NAMES, conclude
from kvprobe.studies.policies.figures import InstructionsByPlace, QualityByMemory

STUDY = Study(
    name="policies",
    title="Cache policies, quality for memory",
    question=(
        "A conversation of some hundred tokens holds instructions and a number that will be asked for later. Cache "
        "policies throw parts of its KV cache away, or round them. What does each policy cost in quality for the "
        "memory that it saves?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(QualityByMemory(), InstructionsByPlace()),
    claims=tuple(Claim(name, above="better", below="worse") for name in GAINS.values()),
    labels={
        "kind": {FULL: "full cache"} | {name: kind.label for name, kind in KINDS.items()},
        "level": "{:g} %".format,
        "measure": NAMES,
        "baseline": {RANDOM: "random eviction", RANDOM_SINKS: f"random eviction that spares the first {SINKS} slots"},
    },
)
