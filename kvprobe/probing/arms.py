"""Slots that were read under several arms, for probes of each.

An arm is one way to go on from a conversation: with everything in view, masked, restarted … The same samples stand
under all arms. One that no sample can reach, such as a restart, is read once for each context and shared by its
samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvprobe.inference.capture import Captured
from kvprobe.models.lens import Family
from kvprobe.probing.features import READS, Features, read_outs
from kvprobe.probing.splits import variation_within
from kvprobe.tasks.designs import Target
from kvprobe.tidy import crossed


def arm_read_outs(
    arm: str, captured: Captured, slots: slice = slice(None)
) -> dict[str, Float[Tensor, "rows layers reads dim"]]:
    """What probes read of an arm, family by family, named as `Arms` expects it; on the CPU.

    Args:
        slots: which of the captured ones; all by default.
    """
    families: dict[Family, None] = dict.fromkeys(family for family, _ in captured.tensors)
    vectors = {family: read_outs(captured.stack(family)[..., slots, :]) for family in families}
    return {f"{arm}.{family}": read.contiguous().cpu() for family, read in vectors.items()}


@dataclass(frozen=True)
class Arms:
    """What was read of the same samples under several arms.

    Attributes:
        read: gives a tensor by its name: what `arm_read_outs` gave, one row for each sample, or one for each context;
            and what `kvprobe.inference.outcomes.use_measurements` gave.
        families: that probes read.
        labels: class numbers.
        contexts: number of each sample's context, in order from 0.
        target: what the labels are of.
        texts: of some arms, the tokens that were read, context by context.
    """

    read: Callable[[str], Tensor]
    families: Sequence[Family]
    labels: Int[Tensor, "targets samples"]
    contexts: Int[np.ndarray, "samples"]
    target: Target
    texts: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    def named(self, joined: str = "") -> Shaped[np.ndarray, "samples"]:
        """What each sample's labels are called, such as the digits of its code."""
        return np.array([joined.join(self.target.classes[label] for label in row) for row in self.labels.T.tolist()])

    def features(self, arm: str, families: Sequence[Family] | None = None) -> Features:
        """What probes read of an arm; of all families by default."""
        tensors: dict[Family, Tensor] = {family: self.read(f"{arm}.{family}") for family in families or self.families}
        samples = len(self.contexts)
        rows = np.arange(samples) if len(next(iter(tensors.values()))) == samples else self.contexts
        texts = tuple(self.texts[arm][context] for context in self.contexts) if arm in self.texts else None
        return Features.of_read_outs(tensors, rows, self.labels, self.contexts, self.target, texts)

    def variation(self, arm: str, families: Sequence[Family] = ("k", "v"), *, by_read: bool = False) -> pd.DataFrame:
        """How far an arm's slots vary within contexts: the `variation` by `family` and `layer`, see
        `kvprobe.probing.splits.variation_within`.

        Args:
            by_read: of each read-out by itself, in a column `read`; otherwise of all together.
        """
        tables = []
        for family in families:
            vectors = self.read(f"{arm}.{family}")
            keys = {"family": [family], "layer": range(vectors.shape[1])} | ({"read": READS} if by_read else {})
            varies = variation_within(vectors if by_read else vectors.flatten(2), self.contexts)
            tables.append(crossed(keys, {"variation": varies}))
        return pd.concat(tables, ignore_index=True)

    def use(self, conditions: Sequence[str]) -> pd.DataFrame:
        """What the model makes of the answer under each condition that it was asked in.

        Returns:
            One row per `sample` (with its `context`) and `condition`: `logprob` and `margin` of the whole true answer
            in nats, `token_accuracy`, and `kl_from_full` of its first token in nats.
        """
        columns = {
            **{name: self.read(name).double().numpy().sum(-1) for name in ("logprob", "margin")},
            "token_accuracy": self.read("correct").double().numpy().mean(-1),
            "kl_from_full": self.read("kl").double().numpy(),
        }
        rows = crossed({"sample": range(len(self.contexts)), "condition": conditions}, columns)
        return rows.assign(context=self.contexts[rows["sample"]])
