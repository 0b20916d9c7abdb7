"""What the sessions' files hold, joined."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from kvprobe.experiments.parts import tensor_of_parts
from kvprobe.models.lens import Family
from kvprobe.probing.features import READS, Features, Site
from kvprobe.probing.splits import Split, centred_within
from kvprobe.studies.multihop.collect import Place, name_of
from kvprobe.studies.multihop.config import Config
from kvprobe.tasks.designs import Target

TARGET = Target("code", tuple("0123456789"))


@dataclass(frozen=True)
class Collected:
    """All sessions together; features are read from their files when they are asked for.

    Attributes:
        digits: of each sample's code.
        contexts: number of the session of each sample.
        use: `logprob`, `margin`, `correct` (per use arm and code token) and `kl` (per use arm), samples first.
    """

    paths: Sequence[Path]
    families: tuple[Family, ...]
    digits: Int[np.ndarray, "samples digits"]
    contexts: Int[np.ndarray, "samples"]
    use: dict[str, np.ndarray]

    @classmethod
    def load(cls, paths: Sequence[Path], config: Config) -> "Collected":
        """What `collect` wrote."""
        joined = {
            name: tensor_of_parts(paths, name).numpy() for name in ("digits", "logprob", "margin", "correct", "kl")
        }
        digits = joined.pop("digits")
        contexts = np.repeat(np.arange(len(paths)), len(digits) // len(paths))
        return cls(paths, config.families, digits, contexts, joined)

    @property
    def labels(self) -> Int[Tensor, "digits samples"]:
        return torch.from_numpy(self.digits.T.copy())

    def features(self, condition: str, at: Place, family: Family) -> Float[Tensor, "rows layers reads dim"]:
        """One row per sample, or, for the restart, one per session."""
        return tensor_of_parts(self.paths, name_of(condition, at, family))

    def rows(self, condition: str) -> Int[np.ndarray, "samples"]:
        """Which row of the features is each sample's."""
        return self.contexts if condition == "restart" else np.arange(len(self.contexts))

    def joined(self, condition: str, at: Place) -> Features:
        """What probes read at a place, all families."""
        tensors: dict[Family, Tensor] = {family: self.features(condition, at, family) for family in self.families}
        return Features.of_read_outs(tensors, self.rows(condition), self.labels, self.contexts, TARGET)

    def vectors(
        self, condition: str, at: Place, pick: tuple[Family, Site], split: Split
    ) -> tuple[Float[Tensor, "samples dim"], Float[Tensor, ""]]:
        """What a probe at one site reads, and its root mean square before any centring."""
        family, site = pick
        pieces = []
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                pieces.append(file.get_slice(name_of(condition, at, family))[:, site.layer, READS.index(site.read)])
        seen = torch.cat(pieces)[torch.from_numpy(self.rows(condition))]
        size = seen.square().mean().sqrt()
        return (centred_within(seen, self.contexts) if split == "paired" else seen), size
