"""Studies: one folder, one question. Listing them imports nothing heavy."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvprobe.errors import UserError
from kvprobe.names import unknown

if TYPE_CHECKING:
    from pathlib import Path

    from kvprobe.experiments.runs import Run


@dataclass(frozen=True)
class Study:
    """A study by name; its code is imported when it is run."""

    name: str
    question: str

    @property
    def config(self) -> type[Any]:
        """The dataclass of its settings."""
        return import_module(f"kvprobe.studies.{self.name}.config").Config

    def run(self, config: Any, root: "Path", name: str | None = None) -> "Run":
        """Run it with these settings (or resume) in a directory below `root`."""
        return import_module(f"kvprobe.studies.{self.name}.study").run(config, root, name)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "leakage",
            "How much of a hidden number survives in the KV cache after the turn that held it was masked?",
        ),
        Study(
            "compaction",
            "Mask or restart? How much of the difference is provenance, how much position, how much delimiters?",
        ),
        Study("policies", "What does each cache policy cost in quality for the memory that it saves?"),
        Study(
            "idle_rebuild",
            "A compacted session goes idle and its cache is rebuilt from the visible text. Where does it drift?",
        ),
        Study("robustness", "How much of the cache can be damaged, and how, before answers go wrong?"),
        Study("bands", "Which layers' caches can bear noise, and how much of that is the noise's own scale?"),
        Study("bitflips", "What does a single flipped bit of K or V do, by its place in the number?"),
        Study("patching", "From which layers, slots and heads is a fact read, and from K or from V?"),
        Study("carriers", "After a turn was masked, which of the slots that stay carry its effect?"),
        Study(
            "dangling",
            "A turn is hidden: where does the attention go that looked at it, and does anything point there?",
        ),
        Study("memory", "Is the memory budget right, and what does the cache cost and save?"),
        Study("use", "Does the model use what a probe reads in its cache, and where?"),
        Study("filter_poison", "Which attention blocks, MLPs and heads pass damage on, and which keep it away?"),
        Study(
            "multihop",
            "Every turn is summarised and masked: how many turns later can the first still be read, and by which way?",
        ),
        Study(
            "features",
            "Which sparse features differ after a turn was masked, which tell what it said, and do they matter?",
        ),
    )
}


def find(name: str) -> Study:
    """The study of this name; an unknown one is refused with the near match."""
    if name not in STUDIES:
        raise UserError(unknown("study", name, STUDIES))
    return STUDIES[name]
